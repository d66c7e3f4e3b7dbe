"""Streams of events: their start, their comments, their ends."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from outrider.serve.api.sse import KEEP_ALIVE, EventStream, dumps, event

Body = Callable[[], AsyncIterator[bytes]]


class Wire:
    """What a server sends; the client leaves when told to."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.closed = 0
        self.leaves = asyncio.Event()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    async def receive(self) -> Any:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    @property
    def bodies(self) -> list[bytes]:
        return [each["body"] for each in self.sent if each["type"] == "http.response.body"]

    async def run(self, pieces: AsyncIterator[bytes], **options: float) -> None:
        def close() -> None:
            self.closed += 1

        stream = EventStream(
            pieces,
            failed=lambda error: [event({"error": str(error)})],
            close=close,
            **{"keep_alive": 5.0, "patience": 5.0, **options},
        )
        await stream({"type": "http", "state": {}}, self.receive, self.send)


def test_json_has_no_line_breaks_that_a_client_could_see() -> None:
    text = "a\u0085b\u2028c\u2029d\re\nf"
    found = dumps({"t": text})
    assert len(found.decode().splitlines()) == 1
    assert json.loads(found) == {"t": text}
    with pytest.raises(ValueError):
        dumps(float("nan"))


def test_pieces_are_sent_one_by_one() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for i in range(3):
            yield event(i)

    async def run() -> Wire:
        wire = Wire()
        await wire.run(pieces())
        return wire

    wire = asyncio.run(run())
    headers = dict(wire.sent[0]["headers"])
    assert headers[b"content-type"] == b"text/event-stream; charset=utf-8"
    assert b"content-length" not in headers
    assert wire.bodies == [b"data: 0\n\n", b"data: 1\n\n", b"data: 2\n\n", b""]
    assert wire.closed == 1


def test_an_error_before_the_first_piece_is_raised_and_one_behind_it_is_sent() -> None:
    async def pieces(first: bool) -> AsyncIterator[bytes]:
        if first:
            yield event(0)
        raise RuntimeError("no")

    async def run(first: bool) -> Wire:
        wire = Wire()
        try:
            await wire.run(pieces(first))
        finally:
            assert wire.closed == 1
        return wire

    with pytest.raises(RuntimeError):
        asyncio.run(run(False))
    assert asyncio.run(run(True)).bodies == [b"data: 0\n\n", b'data: {"error":"no"}\n\n', b""]


def test_a_comment_comes_when_nothing_else_does() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        await asyncio.sleep(0.1)
        yield event(0)

    async def run() -> Wire:
        wire = Wire()
        await wire.run(pieces(), keep_alive=0.03)
        return wire

    bodies = asyncio.run(run()).bodies
    assert bodies[0] == KEEP_ALIVE
    assert bodies[-2:] == [b"data: 0\n\n", b""]


@pytest.mark.parametrize("at_once", [True, False])
def test_pieces_are_closed_when_the_client_leaves(at_once: bool) -> None:
    ended: list[bool] = []

    async def pieces() -> AsyncIterator[bytes]:
        try:
            yield event(0)
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    async def run() -> Wire:
        wire = Wire()
        if at_once:
            wire.leaves.set()
        else:
            asyncio.get_running_loop().call_later(0.05, wire.leaves.set)
        await wire.run(pieces())
        return wire

    wire = asyncio.run(run())
    assert wire.closed == 1
    assert ended or at_once


def test_a_client_that_does_not_read_is_left() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        while True:
            yield event(0)

    class Stuck(Wire):
        async def send(self, message: Any) -> None:
            if len(self.sent) > 3:
                await asyncio.sleep(60)
            await super().send(message)

    async def run() -> Wire:
        wire = Stuck()
        await asyncio.wait_for(wire.run(pieces(), patience=0.05), 5)
        return wire

    assert asyncio.run(run()).closed == 1


def test_a_stream_that_ends_while_a_comment_is_sent_ends() -> None:
    class Slow(Wire):
        async def send(self, message: Any) -> None:
            await asyncio.sleep(0)
            await super().send(message)

    async def run(delay: float) -> int:
        async def pieces() -> AsyncIterator[bytes]:
            await asyncio.sleep(delay)
            yield event(0)

        wire = Slow()
        await wire.run(pieces(), keep_alive=0.003)
        return wire.closed

    async def all_of_them() -> list[int]:
        many = [run(0.003 * (i % 7) + 0.0005 * (i % 13)) for i in range(1500)]
        return await asyncio.wait_for(asyncio.gather(*many), 30)

    assert asyncio.run(all_of_them()) == [1] * 1500
