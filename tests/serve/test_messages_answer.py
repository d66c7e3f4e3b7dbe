"""Chunks of a chat completion as Anthropic's content blocks and events: the client's own types take them."""

import json

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from outrider.serve.api.errors import ApiError
from outrider.serve.api.messages_body import MessagesRequest, chat_body
from outrider.serve.api.messages_writer import MessageAnswer, error_body
from tests.serve.chunks import call, chunk, usage

EVENT = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "Hi"}


def told(*chunks) -> tuple[list[dict], dict]:
    """The events of some chunks, each checked, and the message."""
    answer = MessageAnswer(id="msg_1", model="m")
    events = [answer.start(chunks[0])]
    for each in chunks:
        events += answer.add(each)
    events += answer.end()
    for each in events:
        EVENT.validate_python(each)
    message = answer.message()
    Message.model_validate(message)
    return events, message


def test_thinking_text_and_calls_are_blocks_in_order():
    events, message = told(
        chunk({"role": "assistant", "content": ""}, usage=usage(10, 0)),
        chunk({"reasoning": "Let "}),
        chunk({"reasoning": "me see."}),
        chunk({"content": "I look."}),
        chunk({"tool_calls": [call(0, "c1", "weather", "")]}),
        chunk({"tool_calls": [call(0, arguments='{"city": "Pa')]}),
        chunk({"tool_calls": [call(0, arguments='ris"}')]}),
        chunk({"tool_calls": [call(1, "c2", "clock", "{}")]}),
        chunk({}, finish_reason="tool_calls"),
        chunk(None, usage=usage(10, 9, cached=4)),
    )
    kinds = [each["type"] for each in message["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert [each["input"] for each in message["content"][2:]] == [{"city": "Paris"}, {}]
    assert message["stop_reason"] == "tool_use"
    assert events[0]["message"]["usage"]["input_tokens"] == 10
    assert message["usage"] == {
        "input_tokens": 6,
        "output_tokens": 9,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
    }
    names = [each["type"] for each in events]
    assert names[-2:] == ["message_delta", "message_stop"]
    assert names.count("content_block_start") == names.count("content_block_stop") == 4
    signed = [each["delta"]["type"] for each in events if each["type"] == "content_block_delta" and each["index"] == 0]
    assert signed == ["thinking_delta", "thinking_delta", "signature_delta"]
    starts = [each for each in events if each["type"] == "content_block_start"]
    assert [each["content_block"].get("text", each["content_block"].get("thinking", "")) for each in starts] == [""] * 4


@pytest.mark.parametrize(
    ("finish", "stopped", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 7, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
    ],
)
def test_what_ended_a_message_is_told(finish, stopped, reason, sequence):
    _, message = told(chunk({"content": "a"}, usage=usage(1, 1)), chunk({}, finish_reason=finish, stop_reason=stopped))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_a_call_that_is_named_ends_as_a_call():
    _, message = told(
        chunk({"tool_calls": [call(0, "c", "f", "{}")]}, usage=usage(1, 1)), chunk({}, finish_reason="stop")
    )
    assert message["stop_reason"] == "tool_use"


def test_arguments_that_are_cut_off_are_none():
    _, message = told(
        chunk({"tool_calls": [call(0, "c", "f", '{"a": [1')]}, usage=usage(1, 1)), chunk({}, finish_reason="length")
    )
    assert message["content"][0]["input"] == {}
    assert message["stop_reason"] == "max_tokens"


def body(**fields):
    return chat_body(MessagesRequest.model_validate({"messages": [USER], "max_tokens": 8} | fields))


def test_a_request_becomes_a_chat_completion():
    found = body(
        model="m",
        system=[
            {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "brief."},
        ],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "é"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "a tree"}]},
                    {"type": "text", "text": "And?"},
                ],
            },
            {"role": "system", "content": "Be kind."},
        ],
        tools=[{"name": "look", "input_schema": {"properties": {"at": {"type": "string"}}}}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        stop_sequences=["END"],
        temperature=0.5,
        top_k=3,
        thinking={"type": "disabled"},
        seed=4,
    )
    assert found["messages"] == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": "é"}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Be kind."},
    ]
    assert found["tools"][0]["function"]["parameters"]["type"] == "object"
    assert (found["tool_choice"], found["parallel_tool_calls"]) == ("required", False)
    assert (found["stop"], found["top_k"], found["seed"]) == (["END"], 3, 4)
    assert found["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in found


def test_an_answer_continues_the_assistants_last_message():
    found = body(messages=[USER, {"role": "assistant", "content": "I"}])
    assert (found["continue_final_message"], found["add_generation_prompt"]) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(fields, param):
    with pytest.raises(ApiError) as refused:
        body(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message


def test_errors_have_anthropics_types():
    found = {status: error_body(status, "x", "r")["error"]["type"] for status in (400, 401, 404, 413, 429, 500, 529)}
    assert json.dumps(found) == json.dumps(
        {
            400: "invalid_request_error",
            401: "authentication_error",
            404: "not_found_error",
            413: "request_too_large",
            429: "rate_limit_error",
            500: "api_error",
            529: "overloaded_error",
        }
    )
