"""Deltas as Anthropic's content blocks and events: the client's own types take them. Bodies as conversations."""

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from outrider.serve.api.bodies import checked
from outrider.serve.api.errors import anthropic_error
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.grammars import ToolUse
from outrider.serve.api.messages import MessageWriter
from outrider.serve.api.messages_body import MessagesRequest
from outrider.serve.errors import QueueFull, ServeError
from outrider.serve.run.templates import ChatPrompt
from tests.serve.writers import call, text, thought, told

EVENT = TypeAdapter(RawMessageStreamEvent)
USER = {"role": "user", "content": "Hi"}


def message_of(gateway: Gateway, *pieces, **options) -> tuple[list[dict], dict]:
    """The events of some pieces, each checked, and the message."""
    events, message = told(gateway, MessageWriter, *pieces, **options)
    for each in events:
        EVENT.validate_python(each)
    Message.model_validate(message)
    return events, message


def test_thinking_text_and_calls_are_blocks_in_order(gateway):
    events, message = message_of(
        gateway,
        thought("Let "),
        thought("me see."),
        text("I look."),
        call(0, "c1", "weather", ""),
        call(0, arguments='{"city": "Pa'),
        call(0, arguments='ris"}'),
        call(1, "c2", "clock", "{}"),
        prompt=10,
        tokens=9,
        cached=4,
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
    ("ended", "stopped", "reason", "sequence"),
    [
        ("stop", None, "end_turn", None),
        ("stop", 7, "end_turn", None),
        ("stop", "END", "stop_sequence", "END"),
        ("length", None, "max_tokens", None),
    ],
)
def test_what_ended_a_message_is_told(gateway, ended, stopped, reason, sequence):
    _, message = message_of(gateway, text("a"), reason=ended, stopped_by=stopped)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


def test_arguments_that_are_cut_off_are_none(gateway):
    _, message = message_of(gateway, call(0, "c", "f", '{"a": [1'), reason="length")
    assert message["content"][0]["input"] == {}
    assert message["stop_reason"] == "max_tokens"


def body(**fields) -> MessagesRequest:
    return checked(MessagesRequest, {"messages": [USER], "max_tokens": 8} | fields)


def conversation(gateway: Gateway, **fields) -> tuple[MessagesRequest, ToolUse, ChatPrompt]:
    """A checked body, its tools and its prompt."""
    asked = body(**fields)
    asked.check()
    tools = asked.tool_use(gateway)
    return asked, tools, asked.prompt(gateway, tools)


def test_a_body_is_a_conversation(gateway):
    asked, tools, prompt = conversation(
        gateway,
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
    assert prompt.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "Hm.",
            "reasoning_content": "Hm.",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "é"}}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a tree"},
        {"role": "user", "content": "And?"},
        {"role": "system", "content": "Be kind."},
    ]
    assert tools.listed[0]["function"]["parameters"]["type"] == "object"
    assert (tools.forced, tools.several) == (tools.offered, False)
    assert (asked.stop_sequences, asked.top_k, asked.seed, asked.top_p) == (["END"], 3, 4, None)
    assert prompt.arguments == {"enable_thinking": False}
    assert (prompt.continue_final, prompt.generation_prompt) == (False, True)


def test_an_answer_continues_the_assistants_last_message(gateway):
    _, _, prompt = conversation(gateway, messages=[USER, {"role": "assistant", "content": "I"}])
    assert (prompt.continue_final, prompt.generation_prompt) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content.0.tool_use_id"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(gateway, fields, param):
    with pytest.raises(ServeError) as refused:
        conversation(gateway, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert param in refused.value.message


def test_errors_have_anthropics_types():
    errors = [
        *(ServeError(status, "x") for status in (400, 401, 404, 413, 500)),
        QueueFull("x"),
        QueueFull("x", code="a"),
    ]
    assert [anthropic_error(each, "r")["error"]["type"] for each in errors] == [
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "api_error",
        "overloaded_error",
        "rate_limit_error",
    ]
