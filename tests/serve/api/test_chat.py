"""POST /v1/chat/completions over a real server."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import outrider
from outrider.core.sampling import unpacked
from outrider.serve.api.bodies import ChatBody
from outrider.serve.api.grammars import ToolUse, grammar_of
from outrider.serve.limits import Limits
from outrider.serve.settings import HttpSettings
from tests.serve.served import loaded, serving
from tests.serve.streams import chunks, post

PATH = "/v1/chat/completions"
TALK: dict[str, Any] = {
    "model": "pair",
    "messages": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Tell me a story."}],
    "max_completion_tokens": 12,
    "temperature": 0,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/place"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["place", "days"],
            "additionalProperties": False,
            "$defs": {"place": {"enum": ["Oslo", "Rome"]}},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}


def joined(found: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """The message that deltas add up to, and the reason of its end."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish_reason": None, "role": None}
    for chunk in found:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            assert not (delta.get("content") and delta.get("reasoning"))
            message["role"] = message["role"] or delta.get("role")
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["calls"]):
                    message["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                else:
                    assert "id" not in call
                message["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            message["finish_reason"] = choice["finish_reason"] or message["finish_reason"]
    return message


def test_the_answer_is_that_of_the_engine(client: httpx.Client, engine: outrider.Engine) -> None:
    found = post(client, PATH, TALK)
    messages = [{"role": "system", "content": "Be brief."}, TALK["messages"][1]]
    [own] = engine.generate([messages], max_new_tokens=12, sampling=outrider.Sampling(temperature=0))
    [choice] = found["choices"]
    assert choice["message"] == {"role": "assistant", "content": own.text, "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert found["object"] == "chat.completion"
    assert found["usage"]["prompt_tokens"] == own.prompt_tokens
    assert found["usage"]["completion_tokens"] == 12


def test_a_stream_adds_up_to_the_answer(client: httpx.Client) -> None:
    body = {**TALK, "logprobs": True, "top_logprobs": 2, "max_completion_tokens": 25}
    whole = post(client, PATH, body)["choices"][0]
    found = chunks(client, PATH, {**body, "stream_options": {"include_usage": True}})
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert found[0]["object"] == "chat.completion.chunk"
    message = joined(found)
    assert message["content"] == whole["message"]["content"]
    assert message["finish_reason"] == whole["finish_reason"]
    logprobs = [
        each
        for chunk in found
        for choice in chunk["choices"]
        if choice["logprobs"] is not None
        for each in choice["logprobs"]["content"]
    ]
    assert [each["token"] for each in logprobs] == [each["token"] for each in whole["logprobs"]["content"]]
    assert found[-1]["choices"] == []
    assert found[-1]["usage"]["completion_tokens"] == 25


def test_logprobs_have_bytes_and_the_likeliest(client: httpx.Client) -> None:
    choice = post(client, PATH, {**TALK, "logprobs": True, "top_logprobs": 3})["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(byte for each in content for byte in each["bytes"] or ()).decode() == choice["message"]["content"]
    for each in content:
        assert len(each["top_logprobs"]) == 3
        assert each["logprob"] == max(other["logprob"] for other in each["top_logprobs"])
    without = post(client, PATH, {**TALK, "logprobs": True})["choices"][0]["logprobs"]["content"]
    assert [each["top_logprobs"] for each in without] == [[]] * len(without)


def test_several_outputs_stream_apart(client: httpx.Client) -> None:
    body = {**TALK, "n": 3, "temperature": 1.0, "seed": 3, "speculation": False}
    whole = [choice["message"]["content"] for choice in post(client, PATH, body)["choices"]]
    found = chunks(client, PATH, body)
    assert [joined(found, i)["content"] for i in range(3)] == whole
    assert len(set(whole)) > 1
    for i in range(3):
        own = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["index"] == i]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own].count(None) == len(own) - 1


def test_continuous_usage_is_on_every_chunk(client: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(client, PATH, {**TALK, "stream_options": options})
    assert all(chunk["usage"]["prompt_tokens"] > 0 for chunk in found)
    assert found[-1]["choices"] == []


def test_a_message_can_be_continued(client: httpx.Client, engine: outrider.Engine) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    found = post(
        client, PATH, {**TALK, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    )
    [own] = engine.generate([messages], max_new_tokens=12, sampling=outrider.Sampling(temperature=0))
    assert found["choices"][0]["message"]["content"] == own.text


def test_a_json_schema_is_followed(client: httpx.Client) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    body = {**TALK, "max_completion_tokens": 120, "temperature": 1.0, "seed": 5, "response_format": form}
    for found in (
        post(client, PATH, body)["choices"][0]["message"]["content"],
        joined(chunks(client, PATH, body))["content"],
    ):
        value = json.loads(found)
        assert set(value) == {"ok", "n"}
        assert isinstance(value["ok"], bool)
    anything = {**body, "response_format": {"type": "json_object"}, "max_completion_tokens": 200}
    choice = post(client, PATH, anything)["choices"][0]
    if choice["finish_reason"] == "stop":
        json.loads(choice["message"]["content"])


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"choice": ["yes (sir)", "no. 1", "naïve → 5"]}, {"yes (sir)", "no. 1", "naïve → 5"}),
        ({"regex": "(ab|cd)7"}, {"ab7", "cd7"}),
        ({"grammar": 'root ::= "left" | "right"'}, {"left", "right"}),
    ],
)
def test_structured_outputs_are_followed(client: httpx.Client, asked: dict[str, Any], wanted: set[str]) -> None:
    for seed in range(3):
        body = {**TALK, "structured_outputs": asked, "temperature": 1.0, "seed": seed, "max_completion_tokens": 30}
        choice = post(client, PATH, body)["choices"][0]
        assert choice["message"]["content"] in wanted
        assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("streams", [False, True])
def test_a_named_function_is_called(client: httpx.Client, streams: bool) -> None:
    body = {**TALK, "tools": [CLOCK, WEATHER], "tool_choice": {"type": "function", "function": {"name": "weather"}}}
    body |= {"max_completion_tokens": 120, "temperature": 1.0, "seed": 1}
    if streams:
        message = joined(chunks(client, PATH, body))
        [call] = message["calls"]
        reason, name, arguments = message["finish_reason"], call["name"], call["arguments"]
        assert message["content"] == ""
    else:
        choice = post(client, PATH, body)["choices"][0]
        assert choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        reason, name, arguments = choice["finish_reason"], call["function"]["name"], call["function"]["arguments"]
        assert call["id"].startswith("call_")
    assert (reason, name) == ("stop", "weather")
    value = json.loads(arguments)
    assert value["place"] in ("Oslo", "Rome")
    assert 1 <= value["days"] <= 9


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("tools", [[WEATHER], [CLOCK, WEATHER]], ids=len)
def test_some_function_must_be_called(client: httpx.Client, tools: list[Any], streams: bool) -> None:
    names = {tool["function"]["name"] for tool in tools}
    for seed in range(3):
        body = {**TALK, "tools": tools, "tool_choice": "required", "max_completion_tokens": 200}
        body["parallel_tool_calls"] = False
        body |= {"temperature": 1.0, "seed": seed}
        if streams:
            message = joined(chunks(client, PATH, body))
            [call], reason = message["calls"], message["finish_reason"]
        else:
            choice = post(client, PATH, body)["choices"][0]
            [made], reason = choice["message"]["tool_calls"], choice["finish_reason"]
            call = made["function"]
        assert call["name"] in names
        value = json.loads(call["arguments"])
        if call["name"] == "weather":
            assert value["place"] in ("Oslo", "Rome")
        assert reason == "tool_calls"


@pytest.mark.parametrize("streams", [False, True])
def test_several_functions_may_be_called_at_once(client: httpx.Client, streams: bool) -> None:
    grown = 0
    for seed in range(32):
        body = {**TALK, "tools": [CLOCK, WEATHER], "tool_choice": "required", "max_completion_tokens": 160}
        body |= {"temperature": 1.0, "seed": seed}
        if streams:
            message = joined(chunks(client, PATH, body))
            calls, reason = message["calls"], message["finish_reason"]
        else:
            choice = post(client, PATH, body)["choices"][0]
            calls = [call["function"] for call in choice["message"]["tool_calls"]]
            reason = choice["finish_reason"]
        whole = calls if reason == "tool_calls" else calls[:-1]
        assert all(call["name"] in ("clock", "weather") and json.loads(call["arguments"]) is not None for call in whole)
        grown = max(grown, len(calls))
        if seed >= 3 and grown > 1:
            break
    # Whether a text has several calls within so few tokens is left to chance.
    assert grown > 1


def test_a_forced_call_that_was_cut_off_ends_by_length(client: httpx.Client) -> None:
    body = {**TALK, "tools": [WEATHER], "tool_choice": {"function": {"name": "weather"}}, "max_completion_tokens": 2}
    assert post(client, PATH, body)["choices"][0]["finish_reason"] == "length"


TEMPLATE = """{% for m in messages %}<|user|>{{ m.content }}{% for c in m.tool_calls or [] %}
{%- for name in c.function.arguments %}{{ name }}{% endfor %}{% endfor %}
{% endfor %}{{ tools | length if tools else 0 }}<tool_call></think>
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""
READING = {
    "start_anchor": "<|assistant|>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": "\\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


@pytest.fixture(scope="module")
def caller(engine: outrider.Engine) -> Iterator[httpx.Client]:
    """A server whose model is said to reason and to call tools; grammars make it do so."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = TEMPLATE
    own = loaded(tokenizer=tokenizer)
    with serving(own, HttpSettings(response_template=READING)) as url, httpx.Client(base_url=url, timeout=60) as found:
        yield found


def literal(text: str) -> dict[str, Any]:
    """What makes a model write a text."""
    return {"structured_outputs": {"choice": [text]}, "max_completion_tokens": 200}


@pytest.mark.parametrize("streams", [False, True])
def test_reasoning_content_and_calls_are_told_apart(caller: httpx.Client, streams: bool) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"place": "Oslo", "days": 2}}</tool_call>'
    body = {**TALK, "tools": [WEATHER], **literal(f"<think>Hm, so.</think>I look.{call}{call}")}
    if streams:
        found = chunks(caller, PATH, {**body, "stream_options": {"include_usage": True}})
        message, used = joined(found), found[-1]["usage"]
        calls, reason = message["calls"], message["finish_reason"]
        assert (message["reasoning"], message["content"]) == ("Hm, so.", "I look.")
        arguments = [each["arguments"] for each in calls]
    else:
        answer = post(caller, PATH, body)
        choice, used = answer["choices"][0], answer["usage"]
        message, reason = choice["message"], choice["finish_reason"]
        assert message["reasoning"] == message["reasoning_content"] == "Hm, so."
        assert message["content"] == "I look."
        arguments = [each["function"]["arguments"] for each in message["tool_calls"]]
    assert [json.loads(each) for each in arguments] == [{"place": "Oslo", "days": 2}] * 2
    assert reason == "tool_calls"
    assert 0 < used["completion_tokens_details"]["reasoning_tokens"] < used["completion_tokens"]


def test_reasoning_can_be_left_out(caller: httpx.Client) -> None:
    body = {**TALK, **literal("<think>Secret</think>Yes"), "include_reasoning": False, "logprobs": True}
    choice = post(caller, PATH, body)["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Yes", "refusal": None}
    assert choice["logprobs"] is None
    text = json.dumps(chunks(caller, PATH, body))
    assert "Secret" not in text
    assert "Sec" not in text


def test_a_call_that_is_no_json_is_text(caller: httpx.Client) -> None:
    choice = post(caller, PATH, {**TALK, "tools": [WEATHER], **literal("<tool_call>weather!</tool_call>")})["choices"][
        0
    ]
    assert choice["message"]["content"] == "<tool_call>weather!</tool_call>"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_calls_of_earlier_answers_are_read(caller: httpx.Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Oslo"}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "How is it "}, {"type": "text", "text": "there?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    tokens = post(caller, "/tokenize", {"messages": messages, "tools": [WEATHER]})["tokens"]
    text = post(caller, "/detokenize", {"tokens": tokens})["prompt"]
    assert "How is it there?" in text
    assert "place" in text
    assert "sunny" in text
    assert post(caller, PATH, {**TALK, "messages": messages, "tools": [WEATHER]})["usage"]["prompt_tokens"] == len(
        tokens
    )
    call["function"]["arguments"] = "{no"
    answer = caller.post(PATH, json={**TALK, "messages": messages})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


def test_without_tool_choice_none_hides_the_tools(caller: httpx.Client) -> None:
    with_tools = post(caller, PATH, {**TALK, "tools": [WEATHER]})
    without = post(caller, PATH, {**TALK, "tools": [WEATHER], "tool_choice": "none"})
    plain = post(caller, PATH, TALK)
    assert without["choices"] == plain["choices"]
    assert with_tools["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]


def test_effort_is_for_templates_that_read_it(client: httpx.Client) -> None:
    assert post(client, PATH, {**TALK, "reasoning_effort": "low"})["choices"] == post(client, PATH, TALK)["choices"]


def test_characters_at_which_clients_break_lines_arrive(client: httpx.Client) -> None:
    text = "a\u2028b\u0085c 🐈\u200d⬛"
    body = {**TALK, **literal(text)}
    assert post(client, PATH, body)["choices"][0]["message"]["content"] == text
    assert joined(chunks(client, PATH, body))["content"] == text


def asked(body: ChatBody, marks: tuple[str, str] | None) -> tuple[Any, str]:
    """The grammar of a body, and the field that asks for it."""
    tools = ToolUse.of(body.tools, body.tool_choice, several=True, limits=Limits())
    return grammar_of(tools, body.response_format, body.structured_outputs, Limits(), marks=marks)


def test_a_strict_tool_is_called_with_arguments_that_fit(engine: outrider.Engine) -> None:
    strict = copy.deepcopy(WEATHER)
    strict["function"]["strict"] = True
    body = ChatBody.model_validate({**TALK, "tools": [strict, CLOCK]})
    grammar, _ = asked(body, ("<tool_call>", "</tool_call>"))
    assert grammar is not None
    rule = grammar.bind(engine.tokenizer, engine.parts.target.vocab_size, engine.eos_ids)
    fits = '{"place": "Oslo", "days": 2}'
    for arguments, allowed in ((fits, True), ('{"place": "Bonn", "days": 2}', False), ("{}", False)):
        text = f'I look.<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call> Done.'
        assert follows(rule, engine.tokenizer(text)["input_ids"]) is allowed, text
    other = '<tool_call>\n{"name": "clock", "arguments": {"free": [1]}}\n</tool_call>'
    assert follows(rule, engine.tokenizer(other)["input_ids"])
    assert not follows(rule, engine.tokenizer(other.replace("clock", "watch"))["input_ids"])
    assert asked(ChatBody.model_validate({**TALK, "tools": [WEATHER]}), ("<a>", "</a>"))[0] is None
    assert asked(body, None)[0] is None


def follows(rule: Any, tokens: list[int]) -> bool:
    """Whether a constraint allows each of some tokens behind those before it."""
    state = rule.open()
    for token in tokens:
        if not unpacked(rule.masks(state, [0], [-1]), token + 1)[0, token]:
            return False
        rule.commit(state, [token])
    return True


@pytest.mark.parametrize("content", ["One day, a dog", [{"type": "text", "text": "One day"}]])
def test_a_prediction_changes_nothing_but_the_speed(client: httpx.Client, content: Any) -> None:
    plain = post(client, PATH, TALK)
    found = post(client, PATH, {**TALK, "prediction": {"type": "content", "content": content}})
    assert found["choices"][0]["message"] == plain["choices"][0]["message"]
    details = found["usage"]["completion_tokens_details"]
    # This server's drafter is a model, which does not read predictions.
    assert (details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]) == (0, 0)
