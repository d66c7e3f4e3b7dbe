"""OpenAI's client against /v1/responses."""

import json

import openai
import pytest

from tests.serve.served import NAME

HELLO = "Tell me about a dog."


@pytest.fixture
def ai(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_a_response_and_its_stream_say_the_same(ai):
    fields = {"model": NAME, "input": HELLO, "max_output_tokens": 24, "temperature": 0.0, "instructions": "Be brief."}
    response = ai.responses.create(**fields)
    assert response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage.output_tokens <= 24
    events = list(ai.responses.create(**fields, stream=True))
    text = "".join(each.delta for each in events if each.type == "response.output_text.delta")
    last = events[-1].response
    assert events[-1].type == f"response.{response.status}"
    assert text == last.output_text == response.output_text
    assert last.status == response.status
    assert last.usage.output_tokens == response.usage.output_tokens


def test_log_probabilities_come_where_they_are_included(ai):
    response = ai.responses.create(
        model=NAME,
        input=HELLO,
        max_output_tokens=4,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        temperature=0.0,
    )
    [part] = response.output[0].content
    assert len(part.logprobs) == 4
    for each in part.logprobs:
        assert each.logprob == max(top.logprob for top in each.top_logprobs)


def test_a_function_that_is_named_is_called(ai):
    tool = {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]},
        "strict": True,
    }
    response = ai.responses.create(
        model=NAME,
        input=HELLO,
        tools=[tool],
        tool_choice={"type": "function", "name": "look"},
        max_output_tokens=64,
        temperature=0.0,
    )
    [call] = [item for item in response.output if item.type == "function_call"]
    assert call.name == "look"
    assert json.loads(call.arguments) in ({"far": True}, {"far": False})


def test_text_follows_a_schema(ai):
    schema = {
        "type": "object",
        "properties": {"far": {"type": "boolean"}},
        "required": ["far"],
        "additionalProperties": False,
    }
    response = ai.responses.create(
        model=NAME,
        input=HELLO,
        text={"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}},
        max_output_tokens=64,
        temperature=0.0,
    )
    assert json.loads(response.output_text) in ({"far": True}, {"far": False})


def test_nothing_is_stored(ai):
    response = ai.responses.create(model=NAME, input=HELLO, max_output_tokens=1, store=True)
    assert response.store is False
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as refused:
        ai.responses.create(model=NAME, input=HELLO, previous_response_id=response.id)
    assert refused.value.param == "previous_response_id"
