"""Anthropic's client against /v1/messages."""

import anthropic
import httpx
import pytest

from outrider.serve.limits import Limits
from outrider.serve.settings import HttpSettings
from tests.serve.served import NAME, loaded, serving

GREEDY = {"temperature": 0}
"""The client has no argument for it."""
HELLO = [{"role": "user", "content": "Tell me about a dog."}]


@pytest.fixture
def client(url):
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        yield client


def test_a_message_and_its_stream_say_the_same(client):
    fields = {"model": NAME, "messages": HELLO, "max_tokens": 24, "extra_body": GREEDY, "system": "Be brief."}
    message = client.messages.create(**fields)
    assert message.content[0].type == "text"
    assert message.stop_reason in ("max_tokens", "end_turn")
    assert message.usage.output_tokens <= 24
    with client.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == last.content[0].text == message.content[0].text
    assert (last.stop_reason, last.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)
    prompt = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
    assert last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0) == prompt > 0


def test_the_first_event_knows_the_prompts_length(client):
    count = client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens
    events = list(client.messages.create(model=NAME, messages=HELLO, max_tokens=4, stream=True))
    assert events[0].type == "message_start"
    usage = events[0].message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count
    assert events[-1].type == "message_stop"


def test_a_count_grows_with_the_system_text(client):
    short = client.messages.count_tokens(model=NAME, messages=HELLO).input_tokens
    long = client.messages.count_tokens(model=NAME, messages=HELLO, system="Be brief and kind.").input_tokens
    assert long > short


def test_a_stop_sequence_is_told(client):
    full = client.messages.create(model=NAME, messages=HELLO, max_tokens=48, extra_body=GREEDY).content[0].text
    word = full.split()[3]
    message = client.messages.create(
        model=NAME, messages=HELLO, max_tokens=48, extra_body=GREEDY, stop_sequences=[word]
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", word)
    assert message.content[0].text == full[: full.index(word)]


def test_an_answer_continues_what_the_assistant_said(client):
    messages = [*HELLO, {"role": "assistant", "content": "The dog"}]
    message = client.messages.create(model=NAME, messages=messages, max_tokens=8, extra_body=GREEDY)
    assert not message.content[0].text.startswith("The dog")


def test_a_tool_that_is_named_is_called(client):
    tool = {
        "name": "look",
        "description": "Look somewhere.",
        "input_schema": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
    }
    fields = {
        "model": NAME,
        "messages": HELLO,
        "max_tokens": 64,
        "tools": [tool],
        "tool_choice": {"type": "tool", "name": "look"},
    }
    message = client.messages.create(**fields, extra_body=GREEDY)
    [call] = [block for block in message.content if block.type == "tool_use"]
    assert (call.name, set(call.input)) == ("look", {"far"})
    assert message.stop_reason == "tool_use"
    with client.messages.stream(**fields, extra_body=GREEDY) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [call.input]


def test_errors_have_anthropics_format(client, url):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="nobody", messages=HELLO, max_tokens=4)
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.messages.create(model=NAME, messages=HELLO, max_tokens=0)
    assert wrong.value.body["error"]["type"] == "invalid_request_error"
    assert "max_tokens" in wrong.value.body["error"]["message"]
    answer = httpx.post(f"{url}/v1/messages", json={"messages": HELLO}, headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.json()["request_id"]) == (400, "mine")


def test_a_wrong_key_is_told_in_anthropics_format():
    with serving(loaded(), HttpSettings(keys=("right",))) as url:
        with (
            anthropic.Anthropic(base_url=url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError) as wrong,
        ):
            client.messages.create(model=NAME, messages=HELLO, max_tokens=4)
        assert wrong.value.body["error"]["type"] == "authentication_error"
        with anthropic.Anthropic(base_url=url, api_key="right", max_retries=0) as client:
            assert client.messages.create(model=NAME, messages=HELLO, max_tokens=4).content


def test_a_full_queue_is_overloaded():
    engine = loaded()
    with serving(engine, limits=Limits(max_queue=0)) as url, httpx.Client(base_url=url, timeout=60) as client:
        body = {"messages": HELLO, "max_tokens": 400, "stream": True, "ignore_eos": True}
        streams = [client.build_request("POST", "/v1/messages", json=body) for _ in range(engine.max_slots)]
        answers = [client.send(each, stream=True) for each in streams]
        full = client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 4})
        for each in answers:
            each.close()
    assert (full.status_code, full.json()["error"]["type"]) == (529, "overloaded_error")
