"""`outrider generate` over HTTP makes what the engine behind the server makes."""

import json

import pytest

from outrider.cli.request import RequestOptions
from outrider.cli.url_backend import UrlBackend
from outrider.core.inputs import InputError
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.serve.client.remote import Remote
from tests.cli.runs import run
from tests.serve.served import NAME

MESSAGES = [{"role": "user", "content": "Tell me about a dog."}]
GREEDY = RequestOptions(max_new_tokens=6, temperature=0.0)


def outputs(url: str, *prompts, request: RequestOptions = GREEDY, **options) -> list[Output]:
    """The outputs of requests that run together, in the order of the prompts."""
    backend, ended = UrlBackend(Remote(url=url), NAME), dict[str, Output]()
    for number, prompt in enumerate(prompts):
        backend.add(prompt, request, id=str(number), **options)
    while backend.busy:
        for update in backend.step():
            if update.output is not None:
                ended[update.id] = update.output
    return [ended[str(number)] for number in range(len(prompts))]


def test_a_server_and_its_engine_make_the_same_tokens_of_each_kind_of_prompt(url: str, engine: Engine):
    prompts = ["Once upon a time", MESSAGES, (5, 6, 7)]
    for output, prompt in zip(outputs(url, *prompts), prompts, strict=True):
        [same] = engine.generate([prompt], options=GREEDY.generation(engine.sampling))
        assert output.tokens == same.tokens
        assert (output.text, output.finish_reason) == (same.text, same.finish_reason)
        assert output.num_accepted_tokens == sum(output.accepted_per_position)
        assert output.block_efficiency == pytest.approx(len(output.tokens) / output.num_steps)


def test_log_probabilities_are_those_of_the_engine(url: str, engine: Engine):
    for prompt in ("Once upon a time", MESSAGES):
        [output] = outputs(url, prompt, logprobs=2)
        [same] = engine.generate([prompt], options=GREEDY.generation(engine.sampling), logprobs=2)
        assert output.logprobs == pytest.approx(same.logprobs, abs=1e-4)
        assert [max(top, key=top.__getitem__) for top in output.top_logprobs] == output.tokens


def test_the_command_writes_records_and_each_output_has_draws_of_its_own(monkeypatch, capsys, url):
    options = ("--prompt", "Once upon a time", "--max-new-tokens", "8", "--temperature", "1", "--seed", "3", "--json")
    status, out, err = run(monkeypatch, capsys, "generate", "--url", url, "-n", "3", *options)
    assert status == 0, err
    records = sorted(map(json.loads, out.splitlines()), key=lambda each: each["index"])
    assert [each["sample_index"] for each in records] == [0, 1, 2]
    assert len({each["text"] for each in records}) > 1


def test_a_prompt_that_the_server_refuses_does_not_stop_the_others(monkeypatch, capsys, url):
    prompts = ("--prompt", "a " * 5000, "--prompt", "Once", "--max-new-tokens", "2", "--json")
    status, out, err = run(monkeypatch, capsys, "generate", "--url", url, *prompts)
    assert (status, json.loads(out)["prompt_index"]) == (2, 1)
    assert "prompt 1: " in err
    assert "answered 400" in err


def test_a_cancelled_request_keeps_what_has_come(url: str):
    backend = UrlBackend(Remote(url=url), NAME)
    backend.add("Once upon a time", RequestOptions(max_new_tokens=400, ignore_eos=True, temperature=0.0), id="a")
    updates = []
    while not updates:
        updates = backend.step()
    output = backend.cancel("a")
    assert output is not None
    assert (output.finish_reason, backend.busy) == ("cancelled", False)
    assert output.text.startswith("".join(each.text for each in updates))
    assert backend.cancel("a") is None
    assert backend.step() == []


def test_tools_need_a_conversation(url: str, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text('[{"type": "function", "function": {"name": "time", "parameters": {}}}]')
    with pytest.raises(InputError, match="tools can be given with chat messages alone; leave out --tools"):
        outputs(url, "Once", request=RequestOptions(tools=tools))
