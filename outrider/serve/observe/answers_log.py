"""A file of requests and their answers, which a drafter can learn from. It is kept where the operator asks for it."""

import asyncio
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.inputs import InputError

ROUTE = "/v1/admin/answers"
"""Where the file is read, with the admin key."""
PIECE = 2**18
"""Bytes of the file that are sent at once."""
log = logging.getLogger("outrider.serve")


@dataclass(frozen=True, kw_only=True)
class AnswersLog:
    """The file of answers, with a line for each.

    A line has the fields of OpenAI's batches: `custom_id`, `url`, `body` (the request) and `response` with
    `status_code` and `body`. A stream is kept as if it had been answered at once.
    """

    file: Path

    @classmethod
    def opened(cls, file: Path) -> "AnswersLog":
        """The log in a file, which may exist. Others of the machine cannot read it.

        Raises:
            InputError: The file cannot be written.
        """
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600))
        except OSError as error:
            raise InputError(f"the log of answers {file} cannot be written: {error.strerror}") from error
        return cls(file=file)

    async def add(self, id: str, url: str, body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Keep an answer. Whoever gets the end of the answer behind this call finds it in the file.

        Args:
            id: The request's name.
            url: The path of its route.
        """
        line = {
            "custom_id": id,
            "created": int(time.time()),
            "url": url,
            "body": body,
            "response": {"status_code": 200, "body": answer},
        }
        await asyncio.to_thread(self._write, json.dumps(line, ensure_ascii=False) + "\n")

    def pieces(self, length: int) -> Iterator[bytes]:
        """The first bytes of the file, in pieces."""
        with self.file.open("rb") as content:
            while length and (piece := content.read(min(length, PIECE))):
                length -= len(piece)
                yield piece

    def _write(self, line: str) -> None:
        try:
            with self.file.open("ab") as file:
                # One write a line, so that no other one comes between.
                file.write(line.encode("utf-8", errors="replace"))
        except OSError as error:
            log.error("an answer was not kept in %s: %s", self.file, error.strerror)


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
