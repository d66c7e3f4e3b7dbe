"""Chunks of a chat completion as OpenAI's output items and events: the client's own types take them."""

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.serve.api.errors import ApiError
from outrider.serve.api.responses_body import ResponsesRequest, chat_body
from outrider.serve.api.responses_writer import ResponseAnswer
from tests.serve.chunks import call, chunk, usage

EVENT = TypeAdapter(ResponseStreamEvent)
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}


def told(*chunks, **fields) -> tuple[list[dict], dict]:
    """The events of some chunks, each checked, and the response."""
    request = ResponsesRequest.model_validate({"input": "Hi"} | fields)
    answer = ResponseAnswer(id="resp_1", model="m", request=request)
    events = list(answer.start())
    for each in chunks:
        events += answer.add(each)
    events += answer.end()
    for each in events:
        EVENT.validate_python(each)
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    found = answer.response()
    Response.model_validate(found)
    return events, found


def test_reasoning_text_and_calls_are_items_in_order():
    events, found = told(
        chunk({"role": "assistant", "content": ""}),
        chunk({"reasoning": "Let me see."}),
        chunk({"content": "I "}),
        chunk({"content": "look."}),
        chunk({"tool_calls": [call(0, "c1", "weather", "")]}),
        chunk({"tool_calls": [call(0, arguments='{"city": "Paris"}')]}),
        chunk({}, finish_reason="tool_calls"),
        chunk(None, usage=usage(10, 9, cached=4, reasoning=3)),
        tools=[WEATHER],
    )
    assert [each["type"] for each in found["output"]] == ["reasoning", "message", "function_call"]
    assert found["output"][1]["content"][0]["text"] == "I look."
    assert found["output"][2]["arguments"] == '{"city": "Paris"}'
    assert {each["status"] for each in found["output"]} == {"completed"}
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 4, "cache_write_tokens": 0}
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    names = [each["type"] for each in events]
    assert names[:2] == ["response.created", "response.in_progress"]
    assert names[-1] == "response.completed"
    assert names.count("response.output_item.added") == names.count("response.output_item.done") == 3
    added = [each["item"] for each in events if each["type"] == "response.output_item.added"]
    assert [each.get("content") for each in added] == [[], [], None]
    text = "".join(each["delta"] for each in events if each["type"] == "response.output_text.delta")
    assert text == "I look."


def test_a_response_that_is_cut_off_is_incomplete():
    events, found = told(chunk({"content": "a"}), chunk({}, finish_reason="length"), chunk(None, usage=usage(1, 1)))
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (events[-1]["type"], found["output"][0]["status"]) == ("response.incomplete", "incomplete")


def test_an_empty_answer_is_an_empty_message():
    _, found = told(chunk({"role": "assistant", "content": ""}), chunk({}, finish_reason="stop"))
    assert found["output"][0]["content"][0]["text"] == ""


def test_log_probabilities_come_with_the_text():
    entry = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    top = entry | {"top_logprobs": [{"token": "b", "logprob": -1.0, "bytes": [98]}]}
    _, found = told(
        chunk({"content": "a"}, logprobs={"content": [top]}),
        chunk({}, finish_reason="stop"),
        include=["message.output_text.logprobs"],
        top_logprobs=1,
    )
    assert found["output"][0]["content"][0]["logprobs"] == [top]


def body(**fields):
    return chat_body(ResponsesRequest.model_validate({"input": "Hi"} | fields))


def test_a_request_becomes_a_chat_completion():
    found = body(
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
    roles = [each["role"] for each in found["messages"]]
    assert roles == ["system", "user", "assistant", "tool"]
    said = found["messages"][2]
    assert (said["reasoning"], said["content"]) == ("Hm.", "I look.")
    assert [each["id"] for each in said["tool_calls"]] == ["c1", "c2"]
    assert found["tools"] == [
        {
            "type": "function",
            "function": {"name": "weather", "parameters": WEATHER["parameters"], "strict": True},
        }
    ]
    assert found["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    assert found["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}, "strict": True},
    }
    assert (found["logprobs"], found["top_logprobs"], found["seed"]) == (True, 2, 3)
    assert (found["max_completion_tokens"], found["reasoning_effort"]) == (9, "low")


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
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as refused:
        body(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message
