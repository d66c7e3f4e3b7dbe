"""Answers as clients get them, byte for byte, but for names, times and log-probabilities.

`python -m tests.serve.test_golden` writes the file anew, after a change of the answers that is wanted.
"""

import contextlib
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.serve.settings import HttpSettings
from tests.serve.api.test_chat import READING, TEMPLATE
from tests.serve.served import NAME, loaded, serving

FILE = Path(__file__).parent / "golden.txt"
SECTION = "#### "
TALK = [{"role": "user", "content": "Tell me about a dog."}]
LOOKING = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
LOOK = {"name": "look", "description": "Look somewhere.", "parameters": LOOKING | {"additionalProperties": False}}
TOOLS = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "wait"}}]
ANTHROPIC_TOOLS = [
    {"name": "look", "description": "Look somewhere.", "input_schema": LOOK["parameters"]},
    {"name": "wait"},
]
RESPONSES_TOOLS = [{"type": "function", **LOOK, "strict": True}]
CALL = '<tool_call>{"name": "look", "arguments": {"far": true}}</tool_call>'
USAGE = {"stream_options": {"include_usage": True}}
COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
COMPLETIONS, CHAT, MESSAGES, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"
Case = dict[str, Any]


def says(text: str) -> Case:
    """What makes a model write a text."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 100}


def answers(text: str) -> Case:
    """The same for a conversation's answer in OpenAI's newer format, which has another name for the longest length."""
    return {"structured_outputs": {"choice": [text]}, "max_output_tokens": 100}


COMPLETED: dict[str, tuple[Case, Case]] = {
    # As GuideLLM asks.
    "usage": ({"max_tokens": 4, "stop": None, "ignore_eos": True}, COUNTED),
    # As lm-evaluation-harness asks.
    "scored": ({"prompt": [[9, 10, 11]], "max_tokens": 1, "logprobs": 1, "echo": True, "seed": 1234}, {}),
    "echoed": ({"prompt": ["Once", "The dog"], "echo": True, "max_tokens": 0, "logprobs": 1}, USAGE),
    "several": (
        {"prompt": ["Once", "The dog"], "n": 2, "temperature": 1, "seed": 3, "max_tokens": 4, "speculation": False},
        USAGE,
    ),
    "ids": ({"max_tokens": 9, "return_token_ids": True, "echo": True, "stream_interval": 3}, {}),
    "logprobs": ({"max_tokens": 3, "logprobs": 2, "return_tokens_as_token_ids": True}, COUNTED),
    "prompt_logprobs": ({"prompt": "The dog", "max_tokens": 2, "prompt_logprobs": 1}, {}),
    "stop": ({**says("I see a red dog."), "stop": ["never", "red"]}, {}),
    "stop_kept": ({**says("I see a red dog."), "stop": "red", "include_stop_str_in_output": True}, USAGE),
    "regex": ({"structured_outputs": {"regex": "(ab|cd)7"}, "max_tokens": 9, "skip_special_tokens": False}, {}),
    "cut": ({"prompt": "Once upon a time there was", "truncate_prompt_tokens": 2, "max_tokens": 2}, USAGE),
}
"""Fields of requests for completions, and those of their streams besides."""
CHATTED: dict[str, tuple[Case, Case]] = {
    # As `vllm bench serve` asks.
    "usage": ({"max_completion_tokens": 4}, USAGE),
    "counted": ({"max_tokens": 5, "logprobs": True, "top_logprobs": 2}, COUNTED),
    "several": ({"max_tokens": 4, "n": 2, "temperature": 1, "seed": 3, "speculation": False}, {}),
    # As agents ask.
    "required": ({"max_tokens": 48, "tools": TOOLS[:1], "tool_choice": "required", "parallel_tool_calls": False}, {}),
    "any": ({"max_tokens": 60, "tools": TOOLS, "tool_choice": "required"}, COUNTED),
    "named": ({"max_tokens": 48, "tools": TOOLS, "tool_choice": {"function": {"name": "look"}}}, USAGE),
    "cut": ({"max_tokens": 2, "tools": TOOLS, "tool_choice": {"function": {"name": "look"}}}, {}),
    "schema": (
        {"max_tokens": 40, "response_format": {"type": "json_schema", "json_schema": {"schema": LOOK["parameters"]}}},
        {},
    ),
    "continued": (
        {
            "messages": [*TALK, {"role": "assistant", "content": "Once upon"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
            "max_tokens": 6,
            "return_token_ids": True,
            "stream_interval": 2,
        },
        {},
    ),
    "stop": ({**says("a\u2028b\u0085c 🐈 red dog"), "stop": ["red"]}, USAGE),
    "reasoned": ({**says(f"<think>Hm, so.</think>I look.{CALL}{CALL}"), "tools": TOOLS}, COUNTED),
    "hidden": ({**says("<think>Secret</think>Yes"), "include_reasoning": False, "logprobs": True}, USAGE),
    "logprobs": ({**says("<think>Hm</think>Yes"), "logprobs": True, "top_logprobs": 1}, {}),
    "unread": ({**says("<tool_call>look!</tool_call>"), "tools": TOOLS}, {}),
    "bare": ({**says('{"name": "look", "arguments": {"far": false}}'), "tools": TOOLS}, {}),
}
"""The same of chat completions."""
IN_ANTHROPICS: dict[str, Case] = {
    # As a coding agent asks.
    "system": {"max_tokens": 4, "system": [{"type": "text", "text": "Short.", "cache_control": {}}]},
    "stop": {**says("I see a red dog."), "stop_sequences": ["red"]},
    "named": {"max_tokens": 48, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "tool", "name": "look"}},
    "any": {"max_tokens": 60, "tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}},
    "schema": {"max_tokens": 40, "output_config": {"format": {"type": "json_schema", "schema": LOOK["parameters"]}}},
    "continued": {"messages": [*TALK, {"role": "assistant", "content": "The dog"}], "max_tokens": 3},
    "reasoned": {**says(f"<think>Hm, so.</think>I look.{CALL}{CALL}"), "tools": ANTHROPIC_TOOLS},
}
"""Fields of messages."""
IN_RESPONSES: dict[str, Case] = {
    "instructed": {"max_output_tokens": 4, "instructions": "Be brief.", "metadata": {"a": "b"}},
    "logprobs": {"max_output_tokens": 3, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
    "named": {
        "max_output_tokens": 48,
        "tools": RESPONSES_TOOLS,
        "tool_choice": {"type": "function", "name": "look"},
    },
    "required": {"max_output_tokens": 60, "tools": RESPONSES_TOOLS, "tool_choice": "required"},
    "schema": {
        "max_output_tokens": 40,
        "text": {"format": {"type": "json_schema", "name": "answer", "schema": LOOK["parameters"]}},
    },
    "reasoned": {**answers(f"<think>Hm, so.</think>I look.{CALL}{CALL}"), "tools": RESPONSES_TOOLS},
    "empty": {**answers("<think>Hm.</think>"), "reasoning": {"effort": "low"}},
}
"""Fields of responses."""
REFUSED: dict[str, tuple[str, Any]] = {
    "completions/model": (COMPLETIONS, {"prompt": "a", "model": "nobody"}),
    "completions/missing": (COMPLETIONS, {"temperature": "hot", "n": 0}),
    "completions/fields": (COMPLETIONS, {"prompt": "a", "suffix": "b"}),
    "completions/range": (COMPLETIONS, {"prompt": "a", "temperature": -1}),
    "completions/empty": (COMPLETIONS, {"prompt": []}),
    "completions/grammar": (COMPLETIONS, {"prompt": "a", "structured_outputs": {"regex": "(("}}),
    "completions/streamed": (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1, "stream": True}),
    "completions/speculation": (COMPLETIONS, {"prompt": "a", "speculation": {"drafter": "nobody"}}),
    "completions/list": (COMPLETIONS, ["prompt"]),
    "chat/tool": (CHAT, {"messages": TALK, "tools": TOOLS, "tool_choice": {"function": {"name": "run"}}}),
    "chat/free": (CHAT, {"messages": TALK, "tools": TOOLS}),
    "chat/zero": (CHAT, {"messages": TALK, "max_tokens": 0}),
    "chat/image": (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    "chat/logprobs": (CHAT, {"messages": TALK, "top_logprobs": 2, "stream": True}),
    "messages/model": (MESSAGES, {"messages": TALK, "max_tokens": 4, "model": "nobody"}),
    "messages/missing": (MESSAGES, {"messages": TALK}),
    "messages/thinking": (
        MESSAGES,
        {"messages": TALK, "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 3}},
    ),
    "messages/n": (MESSAGES, {"messages": TALK, "max_tokens": 4, "n": 2, "stream": True}),
    "responses/stored": (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}),
    "responses/tool": (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}], "stream": True}),
    "responses/unknown": (RESPONSES + "/resp_1/cancel", {}),
    "route": ("/v1/nothing", {}),
}
"""Requests that get errors."""
OTHERS: dict[str, tuple[str, Case]] = {
    "counted": (MESSAGES + "/count_tokens", {"messages": TALK, "tools": ANTHROPIC_TOOLS}),
    "tokenized": ("/tokenize", {"messages": TALK, "return_token_strs": True}),
    "page": ("/v1/outrider/stream", {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, "tree": True}),
}
"""Requests to other routes."""
MASKS = (
    (r"(?<![0-9a-f])(?:[0-9a-f]{32}|[0-9a-f]{24})(?![0-9a-f])", "HEX"),
    (r"fp_[0-9a-f]{12}", "fp_HEX"),
    (r'"(created|created_at|cached_tokens|cache_read_input_tokens|input_tokens)":\d+', r'"\1":0'),
    (r'"((?:time_to_first_token|generation_time|queue_time|mean_itl)_ms)":[\d.e+-]+', r'"\1":0'),
    (r'"(tokens_per_second|drafter_seconds|target_seconds|seconds)":[\d.e+-]+', r'"\1":0'),
    (r"-\d+\.\d+(e-\d+)?", "-0.0"),
    (r': keep-alive\n\n|event: ping\ndata: \{"type":"ping"\}\n\n', ""),
)


def requests() -> dict[str, tuple[bool, str, Any]]:
    """By name: whether the model is one that is said to reason and to call tools, the route and the body."""
    found: dict[str, tuple[bool, str, Any]] = {}

    def add(name: str, path: str, body: Case, streamed: Case) -> None:
        reasons = "<t" in json.dumps(body) or name == "chat/bare"
        body = {"model": NAME, "temperature": 0, **body}
        found[f"{name}, whole"] = reasons, path, body
        found[f"{name}, streamed"] = reasons, path, {**body, "stream": True, **streamed}

    for name, (body, streamed) in COMPLETED.items():
        add(f"completions/{name}", COMPLETIONS, {"prompt": "Once upon a time", **body}, streamed)
    for name, (body, streamed) in CHATTED.items():
        add(f"chat/{name}", CHAT, {"messages": TALK, **body}, streamed)
    for name, body in IN_ANTHROPICS.items():
        add(f"messages/{name}", MESSAGES + "?beta=true", {"messages": TALK, **body}, {})
    for name, body in IN_RESPONSES.items():
        add(f"responses/{name}", RESPONSES, {"input": "Tell me about a dog.", **body}, {})
    for name, (path, body) in (REFUSED | OTHERS).items():
        found[name] = False, path, body
    return found


REQUESTS = requests()


@contextlib.contextmanager
def clients() -> Iterator[dict[bool, httpx.Client]]:
    """Clients of a model as it is, and of one that is said to reason and to call tools. Drafts have one length."""
    engine = loaded(length="fixed:2")
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = TEMPLATE
    caller = loaded(length="fixed:2", tokenizer=tokenizer)
    with (
        serving(engine) as url,
        serving(caller, HttpSettings(response_template=READING)) as other,
        httpx.Client(base_url=url, timeout=60) as plain,
        httpx.Client(base_url=other, timeout=60) as reasoning,
    ):
        yield {False: plain, True: reasoning}


@pytest.fixture(scope="module")
def both() -> Iterator[dict[bool, httpx.Client]]:
    with clients() as found:
        yield found


def masked(text: str) -> str:
    """An answer without what differs from run to run. Events of several outputs are put in the outputs' order."""
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    if not text.startswith("data: "):
        return text
    return "".join(sorted(re.findall(r".*?\n\n", text, re.DOTALL), key=place))


def place(event: str) -> int:
    """The number of the output that an event belongs to; events of none come behind all."""
    found = re.match(r'data: \{"id":[^\n]*?"choices":\[\{"index":(\d+)', event)
    return int(found[1]) if found else 99 if '"choices":[]' in event or "[DONE]" in event else 0


def asked(clients: dict[bool, httpx.Client], name: str) -> str:
    """The status, the media type and the body of an answer."""
    reasons, path, body = REQUESTS[name]
    answer = clients[reasons].post(path, json=body)
    return f"{answer.status_code} {answer.headers['content-type']}\n{masked(answer.text)}\n"


def recorded() -> dict[str, str]:
    """The answers of the file, by name."""
    sections = FILE.read_text(encoding="utf-8").split(SECTION)[1:]
    return {name: text for name, _, text in (section.partition("\n") for section in sections)}


@pytest.mark.parametrize("name", REQUESTS)
def test_an_answer_is_the_recorded_one(both: dict[bool, httpx.Client], name: str) -> None:
    assert asked(both, name) == recorded()[name]


def test_every_recorded_event_is_one_line_of_json() -> None:
    answers = recorded()
    assert list(answers) == list(REQUESTS)
    for text in answers.values():
        head, _, body = text.partition("\n")
        events = body.removesuffix("\n").removesuffix("\n\n").split("\n\n") if "event-stream" in head else [body]
        for event in events:
            *names, data = event.removesuffix("\n").split("\n")
            assert all(each.startswith("event: ") for each in names)
            assert data == "data: [DONE]" or json.loads(data.removeprefix("data: "))


def record() -> None:
    """Write the file."""
    with clients() as both:
        FILE.write_text("".join(f"{SECTION}{name}\n{asked(both, name)}" for name in REQUESTS), encoding="utf-8")


if __name__ == "__main__":
    record()
