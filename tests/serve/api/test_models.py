"""Models, tokens, health, errors, keys, headers."""

import asyncio
import json
import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save

import outrider
from outrider import InputError, Setup, catalog
from outrider.cli.serve import ServeOptions, drafter_name, renewal_of
from outrider.embedded import EMBEDDED_DRAFT
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.serve.api.models import _cost_table
from outrider.serve.app import make_app
from outrider.serve.limits import Limits
from outrider.serve.run.service import Service
from outrider.serve.settings import HttpSettings
from tests.serve.served import loaded, serving
from tests.serve.streams import post

COMPLETION = {"prompt": "One", "max_tokens": 1}


def test_models_have_what_clients_read(client: httpx.Client, engine: outrider.Engine) -> None:
    found = client.get("/v1/models").json()
    assert [card["id"] for card in found["data"]] == ["pair", "other-name"]
    for card in found["data"]:
        assert card["root"]
        assert card["max_model_len"] == engine.parts.target.max_context
    assert client.get("/v1/models/other-name").json()["id"] == "other-name"
    missing = client.get("/v1/models/a/b")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_every_name_is_served_and_the_first_answers(client: httpx.Client) -> None:
    assert post(client, "/v1/completions", {**COMPLETION, "model": "other-name"})["model"] == "pair"
    answer = client.post("/v1/completions", json={**COMPLETION, "model": "gpt"})
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "there is no model 'gpt' here; this server has pair, other-name",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_tokens_there_and_back(client: httpx.Client, engine: outrider.Engine) -> None:
    text = "Once upon a time — naïve"
    found = post(client, "/tokenize", {"prompt": text, "return_token_strs": True})
    assert found["tokens"] == engine.tokenizer(text)["input_ids"]
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == engine.parts.target.max_context
    assert post(client, "/detokenize", {"tokens": found["tokens"]}) == {"prompt": text}
    messages = [{"role": "user", "content": "Hi"}]
    chat = post(client, "/tokenize", {"messages": messages})
    assert chat["tokens"] == engine.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("body", [{}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}])
def test_tokenize_takes_a_prompt_or_messages(client: httpx.Client, body: dict[str, object]) -> None:
    assert client.post("/tokenize", json=body).status_code == 400


def test_detokenize_refuses_unknown_ids(client: httpx.Client) -> None:
    assert client.post("/detokenize", json={"tokens": [10**9]}).status_code == 400


def test_tokenizer_info_has_no_paths(client: httpx.Client, engine: outrider.Engine) -> None:
    found = client.get("/tokenizer_info").json()
    assert found["eos_token"] == "<|end|>"
    assert found["chat_template"] == engine.tokenizer.chat_template
    assert found["tokenizer_class"]
    assert "assets" not in json.dumps(found)


def test_the_server_tells_how_it_is(client: httpx.Client) -> None:
    for path in ("/health", "/ping", "/live"):
        answer = client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert client.post("/ping").status_code == 200
    assert client.get("/version").json()["version"]
    assert client.get("/load").json() == {"server_load": 0}
    info = client.get("/server_info").json()
    assert "law" in info
    assert info["parts"]["drafter"] == "model"
    assert all(name in catalog.rows(family) for family, name in info["parts"].items())
    assert info["options"].keys() == info["parts"].keys()
    assert isinstance(info["options"]["length"]["most"], int)
    assert info["limits"]["max_queue"] == Limits().max_queue
    assert "/" not in info["models"][0]
    # This server measures nothing, and may find what another process measured.
    assert info["cost_table"] is None or info["cost_table"]["kept"]


def test_the_server_tells_how_old_its_costs_are() -> None:
    engine = loaded()
    table = replace(CostTable.of_formula(lambda requests, length: 0.01 * (1 + length)), measured=time.time() - 3600)
    engine.parts = replace(engine.parts, experience=Experience(table))
    with serving(engine) as url:
        found = httpx.get(f"{url}/server_info").json()["cost_table"]
    assert found == {"age_seconds": pytest.approx(3600, abs=300), "kept": True, "drift": 1.0}


def test_costs_of_unknown_age_and_no_costs_are_told() -> None:
    table = CostTable.of_formula(lambda requests, length: 0.01 * (1 + length))
    assert _cost_table(Experience(table)) == {"age_seconds": None, "kept": True, "drift": 1.0}
    assert _cost_table(Experience()) is None


def test_every_answer_has_the_name_of_its_request(client: httpx.Client) -> None:
    for path in ("/health", "/nowhere", "/v1/models"):
        assert client.get(path, headers={"x-request-id": "load-7"}).headers["x-request-id"] == "load-7"
    own = post(client, "/v1/completions", COMPLETION, headers={"x-request-id": "load-8"})
    assert own["id"] == "cmpl-load-8"
    assert post(client, "/v1/completions", {**COMPLETION, "request_id": "load-9"})["id"] == "cmpl-load-9"
    answer = client.get("/health", headers={"x-request-id": "no name"})
    assert len(answer.headers["x-request-id"]) == 32
    for name in ("openai-processing-ms", "server-timing", "x-ratelimit-remaining-requests"):
        assert name in answer.headers


def test_two_requests_may_have_one_name(url: str) -> None:
    async def run() -> list[str]:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            body = {"prompt": "One", "max_tokens": 40, "ignore_eos": True}
            asked = [client.post("/v1/completions", json=body, headers={"x-request-id": "twin"}) for _ in range(3)]
            return [answer.json()["id"] for answer in await asyncio.gather(*asked)]

    ids = asyncio.run(run())
    assert len(set(ids)) == 3
    assert all(id.startswith("cmpl-twin") for id in ids)


def test_wrong_paths_and_methods_have_a_body(client: httpx.Client) -> None:
    answer = client.get("/nowhere")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = client.get("/v1/completions")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "not_found_error")


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    with serving(loaded(), HttpSettings(keys=("first", "second"))) as url:
        yield url


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer third"}, 401),
        ({"authorization": "first"}, 401),
        ({"authorization": "Bearer second"}, 200),
        ({"authorization": "bearer  first"}, 200),
        ({"x-api-key": "first"}, 200),
        ({"x-api-key": "f\u00efrst".encode("latin-1").decode("latin-1")}, 401),
    ],
)
def test_a_key_opens_v1(guarded: str, headers: dict[str, str], status: int) -> None:
    given = {name: value.encode("latin-1") for name, value in headers.items()}
    answer = httpx.get(f"{guarded}/v1/models", headers=given)
    assert answer.status_code == status
    if status == 401:
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "x-request-id" in answer.headers
    assert httpx.get(f"{guarded}/health").status_code == 200
    assert httpx.post(f"{guarded}/tokenize", json={"prompt": "a"}).status_code == 200


def test_guard_all_closes_the_other_routes(engine: outrider.Engine) -> None:
    app = make_app(Service(engine, names=("pair",)), HttpSettings(keys=("first",), guard_all=True))

    async def run() -> list[int]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            found = [await client.get("/version"), await client.get("/version", headers={"x-api-key": "first"})]
            return [answer.status_code for answer in found]

    assert asyncio.run(run()) == [401, 200]


def test_the_description_resolves_and_declares_errors(client: httpx.Client) -> None:
    found = client.get("/openapi.json").json()
    text = json.dumps(found)
    for name in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert name in found["components"]["schemas"]
    declared = found["paths"]["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "408", "413", "415", "429", "500", "503"} <= set(declared["responses"])
    assert "text/event-stream" in declared["responses"]["200"]["content"]
    assert declared["requestBody"]["required"]
    operations = [each for path in found["paths"].values() for each in path.values()]
    assert not any("422" in each["responses"] for each in operations)
    assert "HTTPValidationError" not in found["components"]["schemas"]
    overloaded = found["paths"]["/v1/messages"]["post"]["responses"]["529"]["content"]["application/json"]["schema"]
    assert overloaded["required"] == ["type", "error", "request_id"]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/health", None),
        ("/live", None),
        ("/ping", None),
        ("/metrics", "text/plain"),
        ("/version", "application/json"),
        ("/tokenizer_info", "application/json"),
        ("/v1/models", "application/json"),
    ],
)
def test_media_types_are_the_described_ones(client: httpx.Client, path: str, kind: str | None) -> None:
    described = client.get("/openapi.json").json()["paths"][path]["get"]["responses"]["200"].get("content", {})
    answer = client.get(path)
    assert answer.headers.get("content-type", "").partition(";")[0] == (kind or "")
    assert kind in described if kind else not described


def test_priorities_must_be_allowed(client: httpx.Client) -> None:
    answer = client.post("/v1/completions", json=COMPLETION, headers={"x-outrider-priority": "3"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    with serving(loaded(), HttpSettings(priorities=True)) as url, httpx.Client(base_url=url) as own:
        post(own, "/v1/completions", COMPLETION, headers={"x-vllm-priority": "-3"})
        assert own.post("/v1/completions", json=COMPLETION, headers={"x-vllm-priority": "x"}).status_code == 400


def test_a_drafter_is_swapped_with_the_admin_key_alone() -> None:
    engine = loaded()
    drafter, name = engine.parts.drafter, catalog.name_of(engine.parts.drafter)
    with serving(engine, HttpSettings(keys=("first",), admin_key="root")) as url:
        path, body = f"{url}/v1/admin/drafter", {"drafter": name}
        assert httpx.post(path, json=body).status_code == 401
        assert httpx.post(path, json=body, headers={"x-api-key": "first"}).status_code == 401
        answer = httpx.post(path, json=body, headers={"x-api-key": "root"})
        assert (answer.status_code, answer.json()) == (200, {"drafter": name})
        answer = httpx.post(path, json={"drafter": "nobody"}, headers={"x-api-key": "root"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "drafter")
    assert engine.parts.drafter is drafter


def test_without_an_admin_key_nobody_swaps(client: httpx.Client) -> None:
    assert client.post("/v1/admin/drafter", json={"drafter": "suffix"}).status_code == 401


class Pickled:
    """Would write a file when it is unpickled."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.place,)


def test_a_drafter_gets_other_weights_while_the_server_runs(tmp_path: Path) -> None:
    engine = loaded(length="fixed:3")
    old, setup = engine.parts.drafter, Setup(dtype="float32", length="fixed:3")
    name = drafter_name(setup, engine)
    renewal = renewal_of(setup, ServeOptions(), engine, name)
    own = load_file(EMBEDDED_DRAFT / "model.safetensors")
    body = COMPLETION | {"temperature": 0, "ignore_eos": True, "max_tokens": 24}
    with (
        serving(engine, HttpSettings(admin_key="root"), renewal=renewal, drafter=name) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        path, key = "/v1/admin/drafter/model/weights", {"authorization": "Bearer root"}

        def drafts() -> tuple[str, int]:
            answer = post(client, "/v1/completions", body)
            return answer["choices"][0]["text"], answer["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]

        text, accepted = drafts()
        assert accepted > 0
        assert client.put(path, content=save(own)).status_code == 401
        turned = {name: torch.zeros_like(value) for name, value in own.items()}
        assert client.put(path, content=save(turned), headers=key).json() == {"drafter": "model"}
        assert drafts() == (text, 0)
        assert client.put(path, content=save(own), headers=key).status_code == 200
        assert drafts() == (text, accepted)
        newest = engine.parts.drafter
        missing = dict(list(own.items())[1:])
        touched = tmp_path / "touched"
        for wrong in (
            b"no tensors",
            pickle.dumps(Pickled(touched)),
            save(missing),
            save({k: v[:1] for k, v in own.items()}),
        ):
            assert client.put(path, content=wrong, headers=key).status_code == 400
        assert not touched.exists()
        assert client.put(path, content=b"0" * (renewal.most_bytes("model") + 1), headers=key).status_code == 413
        assert client.put(path.replace("model", "nobody"), content=save(own), headers=key).status_code == 400
        assert drafts() == (text, accepted)
    assert engine.parts.drafter is newest is not old


def test_a_drafter_without_a_folder_takes_no_weights() -> None:
    engine = loaded(drafter="ngram")
    renewal = renewal_of(Setup(drafter="ngram"), ServeOptions(), engine, "ngram")
    with pytest.raises(InputError, match="no folder on the server"):
        renewal.folder("ngram")
