"""Deltas as OpenAI's output items and events: the client's own types take them. Bodies as conversations."""

from functools import partial

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.serve.api.bodies import checked
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.request import AnswerFormat
from outrider.serve.api.responses import ResponseWriter
from outrider.serve.api.responses_body import ResponsesRequest
from outrider.serve.errors import ServeError
from outrider.serve.run.templates import ChatPrompt
from tests.serve.writers import call, text, thought, told

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


def body(**fields) -> ResponsesRequest:
    return checked(ResponsesRequest, {"input": "Hi"} | fields)


def response_of(gateway: Gateway, *pieces, fields=None, **options) -> tuple[list[dict], dict]:
    """The events of some pieces, each checked, and the response."""
    asked = body(**(fields or {}))
    format = AnswerFormat(logprobs=asked.logprobs)
    events, response = told(gateway, partial(ResponseWriter, body=asked), *pieces, format=format, **options)
    for each in events:
        EVENT.validate_python(each)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    Response.model_validate(response)
    assert events[-1]["response"] == response
    return events, response


def test_reasoning_text_and_calls_are_items_in_order(gateway):
    events, response = response_of(
        gateway,
        thought("Let me see."),
        text("I "),
        text("look."),
        call(0, "c1", "weather", ""),
        call(0, arguments='{"city": "Paris"}'),
        prompt=10,
        tokens=9,
        cached=4,
        reasoning=3,
        fields={"tools": [WEATHER]},
    )
    assert [each["type"] for each in response["output"]] == ["reasoning", "message", "function_call"]
    assert response["output"][1]["content"][0]["text"] == "I look."
    assert response["output"][2]["arguments"] == '{"city": "Paris"}'
    assert {each["status"] for each in response["output"]} == {"completed"}
    assert response["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    names = [each["type"] for each in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 3
    added = [each["item"] for each in events if each["type"] == "response.output_item.added"]
    assert [each.get("content") for each in added] == [[], [], None]
    deltas = [each["delta"] for each in events if each["type"] == "response.output_text.delta"]
    assert "".join(deltas) == "I look."


def test_a_response_that_is_cut_off_is_incomplete(gateway):
    events, response = response_of(gateway, text("a"), reason="length")
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (events[-1]["type"], response["output"][0]["status"]) == ("response.incomplete", "incomplete")


def test_an_empty_answer_is_an_empty_message(gateway):
    _, response = response_of(gateway)
    assert response["output"][0]["content"][0]["text"] == ""


def test_log_probabilities_come_with_the_text(gateway):
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    _, response = response_of(gateway, text("a"), logprobs=[-0.5], top=[{6: -1.0, 7: -2.0}], fields=fields)
    [entry] = response["output"][0]["content"][0]["logprobs"]
    assert (entry["token"], entry["logprob"]) == (gateway.vocabulary.text(5), -0.5)
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == [(gateway.vocabulary.text(6), -1.0)]


def conversation(gateway: Gateway, **fields) -> tuple[ResponsesRequest, ToolUse, ChatPrompt]:
    """A checked body, its tools and its prompt."""
    asked = body(**fields)
    asked.check(20)
    tools = asked.tool_use(gateway)
    return asked, tools, asked.chat_prompt(gateway, tools)


def test_a_body_is_a_conversation(gateway):
    asked, tools, prompt = conversation(
        gateway,
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        ],
        tools=[WEATHER],
        tool_choice={"type": "function", "name": "weather"},
        max_output_tokens=9,
        text={"format": {"type": "json_schema", "name": "answer", "schema": {"type": "object"}, "strict": True}},
        reasoning={"effort": "low"},
        top_logprobs=2,
        seed=3,
    )
    assert [each["role"] for each in prompt.messages] == ["system", "user", "assistant", "tool"]
    spoken = prompt.messages[2]
    assert (spoken["reasoning"], spoken["content"]) == ("Hm.", "I look.")
    assert [each["id"] for each in spoken["tool_calls"]] == ["c1", "c2"]
    function = {"name": "weather", "parameters": WEATHER["parameters"], "strict": True}
    assert tools.listed == [{"type": "function", "function": function}]
    assert (tools.named, [tool.function.name for tool in tools.forced]) == (True, ["weather"])
    assert asked.form.json_schema.schema_ == {"type": "object"}
    assert (asked.logprobs, asked.seed, prompt.arguments["reasoning_effort"]) == (2, 3, "low")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_0"}, "previous_response_id"),
        ({"conversation": "conv_0"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0"),
        ({"input": []}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(gateway, fields, param):
    with pytest.raises(ServeError) as refused:
        conversation(gateway, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message
