"""A server in front of vLLM: keys, names and limits are ours, answers are vLLM's. vLLM is a fake here."""

import json
import socket

import httpx
import openai
import pytest

from outrider import InputError
from outrider.serve.answers_log import lessons_of
from outrider.serve.client.bench import counters
from outrider.serve.client.remote import Remote
from outrider.serve.limits import Limits
from outrider.serve.settings import HttpSettings
from outrider.serve.vllm.launch import Launch
from outrider.serve.vllm.passing import PassingService, make_passing_app
from outrider.serve.vllm.process import VllmProcess
from outrider.serve.vllm.weights import WeightRoutes
from tests.serve.served import listening
from tests.serve.vllm.conftest import DRAFTS

BODY = {"model": "mine", "prompt": [3, 4, 5], "max_tokens": 4}
ADMIN = {"authorization": "Bearer admin"}


def test_a_client_of_openai_is_answered(passing):
    client = openai.OpenAI(base_url=f"{passing}/v1", api_key="secret", max_retries=0)
    with client:
        assert client.models.list().data[0].id == "mine"
        assert client.completions.create(model="mine", prompt="abc").choices[0].text == "said"
        said = client.chat.completions.create(model="mine", messages=[{"role": "user", "content": "abc"}])
        assert said.choices[0].message.content == "cba"
        stream = client.completions.create(model="mine", prompt="abc", stream=True)
        assert "".join(each.choices[0].text for each in stream if each.choices) == "said"


def test_answers_have_our_names_and_counts(client):
    answer = client.post("/v1/completions", json=BODY, headers={"x-request-id": "mine-7"})
    assert answer.json()["id"] == answer.headers["x-request-id"] == "mine-7"
    text = client.get("/metrics").text
    assert 'outrider:http_requests_total{route="/{path:path}",status="200"}' in text
    assert "outrider:engine_up 1.0" in text
    assert "vllm:spec_decode_num_drafts_total" in text


def test_a_key_is_asked_for_and_vllms_own_is_not_told(passing):
    with httpx.Client(base_url=passing) as client:
        refused = client.post("/v1/completions", json=BODY)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/health").status_code == 200
        assert client.get("/version").json()["engine_version"] == "0.0.fake"


@pytest.mark.parametrize("route", ["/update_weights", "/pause", "/start_draft_weight_update", "/collective_rpc"])
def test_routes_that_change_vllm_are_not_passed_on(client, route):
    assert client.post(route, json={}).status_code == 404


def test_dots_lead_nowhere_without_a_key(passing):
    address = httpx.URL(passing)
    for path in ("/v1/admin/../completions", "/v1/admin/%2e%2e/completions", "/v1/admin/other"):
        with socket.create_connection((address.host, address.port)) as raw:
            lines = f"POST {path} HTTP/1.1", f"host: {address.host}", "content-length: 2", "connection: close"
            raw.sendall("\r\n".join([*lines, "", "{}"]).encode())
            assert b" 404 " in raw.makefile("rb").readline()


def test_a_body_that_is_too_long_goes_no_further(client):
    refused = client.post("/v1/completions", json=BODY | {"prompt": "a" * 20_000})
    assert refused.status_code == 413


def test_a_stream_comes_as_it_is_made(client, passing):
    with client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "seed": 1}) as answer:
        lines = answer.iter_lines()
        assert '"sa"' in next(lines)
        # The fake waits with the rest until it is told to go on: nothing holds the first piece back.
        with httpx.Client(base_url=passing, headers={"authorization": "Bearer secret"}) as other:
            assert other.get("/health").status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")


def test_weights_are_given_by_vllms_routes_in_their_order(client, passing):
    assert client.put("/v1/admin/drafter/model/weights", content=b"good").status_code == 401
    answer = client.put("/v1/admin/drafter/model/weights", content=b"good" * 10, headers=ADMIN)
    assert answer.json() == {"drafter": "model"}
    refused = client.put("/v1/admin/drafter/model/weights", content=b"bad", headers=ADMIN)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("vLLM failed at /update_weights")
    assert "example.org" not in refused.text
    # After a failure another update may begin.
    assert client.put("/v1/admin/drafter/draft_model/weights", content=b"good", headers=ADMIN).status_code == 200
    unknown = client.put("/v1/admin/drafter/eagle/weights", content=b"good", headers=ADMIN)
    assert "unknown drafter 'eagle'; available: model, draft_model" in unknown.json()["error"]["message"]


def test_answers_are_kept_for_learning_unless_the_client_says_no(client, answers):
    answers.write_text("")
    client.post("/v1/completions", json=BODY)
    client.post("/v1/completions", json=BODY | {"stream": True})
    client.post("/v1/completions", json=BODY | {"store": False})
    client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "abc"}]})
    client.post("/v1/no/such", json=BODY)
    assert client.get("/v1/admin/answers").status_code == 401
    lines = client.get("/v1/admin/answers", headers=ADMIN).text.splitlines()
    lessons = [lesson for line in lines for lesson in lessons_of(json.loads(line))]
    spoken = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "cba"}]
    whole = {"tokens": [3, 4, 5, 5, 4, 3], "start": 3}
    assert lessons == [whole, whole, {"messages": spoken}]


def test_the_end_of_vllm_is_a_sentence_in_streams_and_answers(python):
    with VllmProcess(python, Launch(target="t", names=("mine",))) as process:
        service = PassingService(process, Limits())
        with listening(make_passing_app(service, HttpSettings()), service) as url, httpx.Client(base_url=url) as client:
            assert client.get("/health").status_code == 200
            with client.stream("POST", "/v1/completions", json=BODY | {"stream": True, "seed": 2}) as answer:
                told = [line for line in answer.iter_lines() if line]
            assert told[-1] == "data: [DONE]"
            assert json.loads(told[-2].removeprefix("data: "))["error"]["code"] == "engine_dead"
            process._process.wait()
            refused = client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert refused.json()["error"]["message"].startswith("vLLM, to which this server passes requests on")
            assert client.get("/health").json() == {"status": "engine_dead"}
            assert service.state == "engine_dead"
            assert service.in_flight == 0


def test_a_vllm_without_routes_for_weights_says_how_to_start_it(python, tmp_path):
    with VllmProcess(python, Launch(target="t", names=("mine",))) as process:
        seen = process.remote.get("/seen")
        assert seen["environment"]["VLLM_API_KEY"] == process.remote.key
        assert process.remote.key not in seen["arguments"]
        assert counters(process.remote) == {"drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
        with pytest.raises(InputError, match="this vLLM has no route /pause; start it with `outrider serve"):
            WeightRoutes(Remote(url=process.remote.url)).renew(tmp_path / "w")


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_build_for_cpus_that_drafts_is_asked_for_greedy_outputs_alone(python, route):
    body = {"model": "mine", "prompt": "abc", "messages": [{"role": "user", "content": "abc"}]}
    for speculation, statuses in ((DRAFTS, (400, 400, 200)), (None, (200, 200, 200))):
        launch = Launch(target="/a/target", speculation=speculation, names=("mine",))
        with VllmProcess(python, launch) as process:
            service = PassingService(process, Limits())
            with (
                listening(make_passing_app(service, HttpSettings()), service) as url,
                httpx.Client(base_url=url, timeout=30) as client,
            ):
                asked = [body, body | {"temperature": 1}, body | {"temperature": 0}]
                answers = [client.post(f"/v1/{route}", json=each) for each in asked]
                assert tuple(answer.status_code for answer in answers) == statuses
                if speculation is not None:
                    error = answers[0].json()["error"]
                    assert error["param"] == "temperature"
                    assert "wrong tokens above temperature 0 while it drafts; ask for temperature 0" in error["message"]
                    assert client.get("/v1/models").status_code == 200
