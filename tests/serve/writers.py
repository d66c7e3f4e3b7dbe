"""What a writer makes of deltas, without an engine that brings them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from outrider.engine.generation import Generation
from outrider.engine.output import Output, Times
from outrider.serve.api.call import Call, Writer
from outrider.serve.api.gateway import Gateway
from outrider.serve.api.request import AnswerFormat, ClientRequest, RequestPrompt
from outrider.serve.run.outputs import Delta, OutputEnd, OutputStream, OutputTask, RequestSpeculation
from outrider.serve.run.parser import Piece

Event = dict[str, Any]


def text(text: str) -> Piece:
    """More text."""
    return Piece(kind="content", text=text)


def thought(text: str) -> Piece:
    """More reasoning."""
    return Piece(kind="reasoning", text=text)


def call(number: int, id: str | None = None, name: str | None = None, arguments: str = "") -> Piece:
    """A piece of a tool call; the first one has an id and a name."""
    return Piece(kind="call", text=arguments, call=number, id=id, name=name)


def told(
    gateway: Gateway,
    writer: Callable[[Call], Writer],
    *pieces: Piece,
    reason: str = "stop",
    stopped_by: str | int | None = None,
    prompt: int = 1,
    tokens: int = 1,
    cached: int = 0,
    reasoning: int = 0,
    logprobs: Sequence[float] = (),
    top: Sequence[Mapping[int, float]] = (),
    format: AnswerFormat | None = None,
) -> tuple[list[Event], dict[str, Any]]:
    """The events of an output that comes piece by piece, and the answer that comes at once.

    Args:
        reason: Why the output ends.
        prompt: Number of prompt tokens.
        cached: How many of them needed no prefill.
        tokens: Number of tokens.
        reasoning: How many of them are reasoning.
        logprobs: Of the tokens 5, 6, ..., which come with the first piece.
    """
    format = format or AnswerFormat()
    output = OutputStream(
        index=0,
        prompt=0,
        task=OutputTask(id="1-0", prompt=(0,) * prompt),
        tokens=[0] * tokens,
        reasoning_tokens=reasoning,
    )
    request = ClientRequest(
        prompts=[RequestPrompt(tokens=output.task.prompt)],
        options=Generation(),
        most_tokens=None,
        speculation=RequestSpeculation(),
        format=format,
    )
    http = Request({"type": "http", "path": "/", "headers": [], "state": {"request_id": "1", "key": None}})
    answers = []
    for streams in (True, False):
        written = writer(
            Call(gateway=gateway, http=http, id="1", request=request, outputs=[replace(output)], created=1)
        )
        sent = written.begin() if streams else []
        for i, piece in enumerate((*pieces, None)):
            mine = written.call.outputs[0]
            if piece is None:
                called = any(each.kind == "call" for each in pieces)
                mine.end = OutputEnd(reason=reason, stopped_by=stopped_by, called=called)
                mine.output, mine.times = ended(prompt, cached), Times(queued=0.0)
            delta = Delta(
                output=mine,
                pieces=[] if piece is None else [piece],
                tokens=range(5, 5 + len(logprobs)) if i == 0 else (),
                logprobs=logprobs if i == 0 else (),
                top=top if i == 0 else (),
                first=i == 0,
                end=mine.end,
            )
            if streams:
                sent += written.add(delta)
            else:
                written.take(delta)
        answers.append(events_of(sent + written.end()) if streams else written.whole())
    events, whole = answers
    return events, json.loads(json.dumps(whole))


def ended(prompt: int, cached: int) -> Output:
    """An output that has ended, for its numbers of prompt tokens."""
    return Output(
        id="1-0",
        prompt_tokens=prompt,
        reused_tokens=cached,
        text="",
        tokens=[],
        finish_reason="stop",
        num_steps=0,
        num_draft_tokens=0,
        num_accepted_tokens=0,
        accepted_per_position=[],
        block_efficiency=0.0,
        seconds=0.0,
    )


def events_of(sent: Sequence[bytes]) -> list[Event]:
    """The values of events."""
    lines = b"".join(sent).decode().split("\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
