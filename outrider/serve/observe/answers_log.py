"""A file of requests and their answers, which a drafter can learn from. It is kept where the operator asks for it."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.core.inputs import InputError
from outrider.serve.api.errors import ApiError
from outrider.serve.keys import Keys

RECORDED = ("/v1/completions", "/v1/chat/completions")
"""Routes whose answers are kept."""
ROUTE = "/v1/admin/answers"
"""Where the file is read, with the admin key."""
MOST_BYTES = 64 * 2**20
"""Longest request and longest answer that are kept."""
PIECE = 2**18
"""Bytes of the file that are sent at once."""
log = logging.getLogger("outrider.serve")


def opened_log(file: Path) -> Path:
    """The file, which may exist. Raises InputError where it cannot be written. Others of the machine cannot read it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
    except OSError as error:
        raise InputError(f"the log of answers {file} cannot be written: {error.strerror}") from error
    return file


class AnswersLog:
    """An ASGI middleware. It adds a line for each answer of `RECORDED`, unless its request has `"store": false`.

    A line has the fields of OpenAI's batches: `custom_id`, `url`, `body` (the request) and `response` with
    `status_code` and `body`. A stream is kept as if it had been answered at once.

    Args:
        file: Where lines go.
        admin_key: Lets clients read the file at `ROUTE`; None closes it.
    """

    def __init__(self, app: ASGIApp, *, file: Path, admin_key: str | None) -> None:
        self._app, self._file, self._admin_key = app, file, admin_key
        self._ending: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and keep what was said."""
        path = scope.get("path")
        if scope["type"] == "http" and path == ROUTE and scope["method"] == "GET":
            await self._read(scope, receive, send)
            return
        if scope["type"] != "http" or path not in RECORDED or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        asked, answered = bytearray(), bytearray()
        status, kind = 0, ""
        written = asyncio.get_running_loop().create_future()

        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.request" and len(asked) <= MOST_BYTES:
                asked.extend(message.get("body", b""))
            return message

        async def answer(message: Message) -> None:
            nonlocal status, kind
            if message["type"] == "http.response.start":
                status, kind = message["status"], Headers(raw=message["headers"]).get("content-type", "")
            elif message["type"] == "http.response.body" and len(answered) <= MOST_BYTES:
                answered.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                # Whoever has the whole answer may ask for the file at once.
                self._ending.add(written)
            await send(message)

        try:
            await self._app(scope, hear, answer)
            if status == 200 and max(len(asked), len(answered)) <= MOST_BYTES:
                id = str(scope.get("state", {}).get("request_id", ""))
                line = line_of(id, str(path), bytes(asked), bytes(answered), streamed="event-stream" in kind)
                if line is not None:
                    await asyncio.to_thread(self._add, line)
        finally:
            self._ending.discard(written)
            written.cancel()

    def _add(self, line: str) -> None:
        try:
            with self._file.open("ab") as file:
                # One write a line, so that no other one comes between.
                file.write(line.encode("utf-8", errors="replace"))
        except OSError as error:
            log.error("an answer was not kept in %s: %s", self._file, error.strerror)

    async def _read(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file to somebody with the admin key."""
        if self._admin_key is None or Keys((self._admin_key,)).owner(Headers(scope=scope)) is None:
            wrong = ApiError(401, "this route needs the server's admin key", headers={"www-authenticate": "Bearer"})
            await wrong.response()(scope, receive, send)
            return
        if self._ending:
            await asyncio.wait(self._ending)
        # Lines that come meanwhile are not sent: the length is told before.
        length = (await asyncio.to_thread(self._file.stat)).st_size
        headers = {"content-length": str(length)}
        pieces = pieces_of(self._file, length)
        await StreamingResponse(pieces, headers=headers, media_type="application/jsonl")(scope, receive, send)


def pieces_of(file: Path, length: int) -> Iterator[bytes]:
    """The first bytes of a file, in pieces."""
    with file.open("rb") as content:
        while length and (piece := content.read(min(length, PIECE))):
            length -= len(piece)
            yield piece


def line_of(id: str, url: str, asked: bytes, answered: bytes, *, streamed: bool) -> str | None:
    """The line of an answer; None where the client wants none kept, or nothing whole was said."""
    try:
        request = json.loads(asked)
        answer = joined(events_of(answered)) if streamed else json.loads(answered)
    except ValueError:
        return None
    if not isinstance(request, dict) or request.get("store") is False or not answer or not answer.get("choices"):
        return None
    line = {
        "custom_id": id,
        "created": int(time.time()),
        "url": url,
        "body": request,
        "response": {"status_code": 200, "body": answer},
    }
    return json.dumps(line, ensure_ascii=False) + "\n"


def events_of(text: bytes) -> list[dict[str, Any]]:
    """The objects of a stream of events. Raises ValueError where it ended early, or with an error.

    Example:
        >>> events_of(b'data: {"choices": []}\\n\\ndata: [DONE]\\n\\n')
        [{'choices': []}]
    """
    lines = [line.removeprefix(b"data:").strip() for line in text.splitlines() if line.startswith(b"data:")]
    if not lines or lines[-1] != b"[DONE]":
        raise ValueError("the stream has no end")
    found = [json.loads(line) for line in lines[:-1]]
    if any("error" in each for each in found):
        raise ValueError("the stream has an error")
    return found


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer that the chunks of a stream add up to: text, reasoning, tokens and how each choice ended."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            whole = choices.setdefault(piece["index"], {"index": piece["index"], "finish_reason": None})
            whole["finish_reason"] = piece.get("finish_reason") or whole["finish_reason"]
            for name in ("prompt_token_ids", "token_ids"):
                if piece.get(name):
                    whole[name] = whole.get(name, []) + piece[name]
            delta = piece.get("delta")
            if delta is None:
                whole["text"] = whole.get("text", "") + (piece.get("text") or "")
                continue
            message = whole.setdefault("message", {"role": "assistant", "content": ""})
            message["content"] += delta.get("content") or ""
            if delta.get("tool_calls"):
                message["tool_calls"] = True
            if thought := delta.get("reasoning") or delta.get("reasoning_content"):
                message["reasoning"] = message.get("reasoning", "") + thought
    return {"choices": [choices[index] for index in sorted(choices)]}


def lessons_of(line: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What a drafter learns from a line of the log: a conversation, a prompt with its answer, or token ids.

    A line of other tools is passed through: `messages` that end with the assistant, or `prompt` with `completion`,
    `response` or `text`. Answers with tool calls or with content that is no text are left out.

    Example:
        >>> body = {"choices": [{"index": 0, "text": " upon a time", "finish_reason": "stop"}]}
        >>> list(lessons_of({"body": {"prompt": "Once"}, "response": {"status_code": 200, "body": body}}))
        [{'prompt': 'Once', 'response': ' upon a time'}]
    """
    response = line.get("response")
    if not isinstance(response, Mapping) or "body" not in line:
        if "messages" in line or "prompt" in line or "tokens" in line:
            yield dict(line)
        return
    request = line["body"]
    answer = response.get("body", response)
    for choice in answer.get("choices") or []:
        message, prompt = choice.get("message"), request.get("prompt")
        ids, tokens = choice.get("prompt_token_ids") or prompt, choice.get("token_ids")
        if tokens and isinstance(ids, list) and all(isinstance(token, int) for token in ids):
            yield {"tokens": [*ids, *tokens], "start": len(ids)}
        elif message is None and isinstance(prompt, str) and choice.get("text"):
            yield {"prompt": prompt, "response": choice["text"]}
        elif message is not None and message.get("content") and not message.get("tool_calls"):
            before = request.get("messages") or []
            if all(isinstance(each.get("content"), str) and not each.get("tool_calls") for each in before):
                spoken = [{"role": each["role"], "content": each["content"]} for each in before]
                yield {"messages": [*spoken, {"role": "assistant", "content": message["content"]}]}
