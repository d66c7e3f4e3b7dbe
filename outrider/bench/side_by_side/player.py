"""Conversations played on a server: each request is sent when it is due, and each chunk is noted when it comes."""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from outrider.bench.side_by_side.arrivals import ClosedLoop, Load
from outrider.bench.side_by_side.prompts import Encoder
from outrider.bench.side_by_side.served import Served, ServedStep
from outrider.bench.workloads.conversation import Conversation
from outrider.core.types import Sampling, Timing
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation
from outrider.engine.output import succeeded

PARTS = ("target", "drafter", "rows", "verify", "commit", "replay", "rest")
"""Parts of a step's time."""


@dataclass(frozen=True, kw_only=True)
class OutputChunk:
    """New tokens of one request.

    Attributes:
        drafted: Draft tokens of the step that made them.
        accepted: Accepted ones.
        answer: The whole text, in the last chunk of a request; None before.
    """

    id: str
    num_tokens: int
    drafted: int
    accepted: int
    answer: str | None = None


@runtime_checkable
class Server(Protocol):
    """What answers requests: an engine in this process, or anything else that tells its chunks."""

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        ...

    def submit(self, id: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        """Send a request."""
        ...

    def advance(self) -> list[OutputChunk]:
        """Wait for the next chunks, and return them."""
        ...


class EngineServer:
    """An engine in this process.

    Attributes:
        timings: The clocks of all iterations so far.
    """

    def __init__(self, engine: Engine, generation: Generation) -> None:
        self._engine, self._generation = engine, generation
        self.timings: dict[int, Timing] = {}

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return self._engine.busy

    def submit(self, id: str, prompt: Sequence[int], max_new_tokens: int, seed: int) -> None:
        """Send a request."""
        sampling = replace(self._generation.sampling or Sampling(), seed=seed)
        self._engine.add(
            list(prompt), id=id, options=self._generation, max_new_tokens=max_new_tokens, sampling=sampling
        )

    def advance(self) -> list[OutputChunk]:
        """Make a step. Raises the error of a request that fails."""
        chunks = []
        for update in self._engine.step():
            succeeded(update)
            step = update.step
            if step is not None:
                self.timings[id(step.timing)] = step.timing
            chunks.append(
                OutputChunk(
                    id=update.id,
                    num_tokens=len(update.tokens),
                    drafted=0 if step is None else step.num_draft_tokens,
                    accepted=0 if step is None else step.num_accepted_tokens,
                    answer=None if update.output is None else update.output.text,
                )
            )
        return chunks


@dataclass(kw_only=True)
class _Pending:
    """A request that has no end yet."""

    conversation: Conversation
    answers: list[str]
    prompt_tokens: int
    arrived: float
    steps: list[ServedStep] = field(default_factory=list)


@dataclass(kw_only=True)
class Player:
    """Plays conversations, one after the other or several at once; an answer is part of the next turn's prompt.

    Attributes:
        max_new_tokens: Most tokens of an answer whose conversation names no number.
        room: Most tokens of a prompt and its answer; a conversation ends before a turn that needs more.
        clock: Seconds that only go forwards.
        sleep: Waits for so many seconds.
    """

    encoder: Encoder
    max_new_tokens: int
    room: int
    clock: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep

    def play(self, server: Server, conversations: Sequence[Conversation], load: Load, seed: int = 0) -> list[Served]:
        """All requests of the conversations, in the order of their ends."""
        times = load.times(conversations)
        order = sorted(range(len(conversations)), key=lambda i: 0.0 if times is None else times[i])
        waiting, pending, served = deque(order), dict[str, _Pending](), list[Served]()
        began = self.clock()

        def now() -> float:
            return self.clock() - began

        def due() -> bool:
            if times is None:
                return len(pending) < (load.concurrency if isinstance(load, ClosedLoop) else 1)
            return times[waiting[0]] <= now()

        while waiting or server.busy:
            while waiting and due():
                number = waiting.popleft()
                arrived = now() if times is None else times[number]
                self._ask(server, pending, conversations[number], [], arrived, seed)
            if not server.busy:
                if waiting and times is not None:
                    self.sleep(max(0.0, times[waiting[0]] - now()))
                continue
            for chunk in server.advance():
                at, request = now(), pending[chunk.id]
                request.steps.append(
                    ServedStep(drafted=chunk.drafted, accepted=chunk.accepted, emitted=chunk.num_tokens, at=at)
                )
                if chunk.answer is not None:
                    served.append(_served(chunk.id, pending.pop(chunk.id)))
                    answers = [*request.answers, chunk.answer]
                    if len(answers) < request.conversation.num_turns:
                        self._ask(server, pending, request.conversation, answers, at, seed)
        return served

    def _ask(
        self,
        server: Server,
        pending: dict[str, _Pending],
        conversation: Conversation,
        answers: list[str],
        arrived: float,
        seed: int,
    ) -> None:
        """Send the next request of a conversation, if it fits."""
        prompt = self.encoder.prompt(conversation, answers)
        wanted = self.wanted(conversation)
        if len(prompt) + wanted > self.room:
            return
        id = request_id(conversation, len(answers))
        server.submit(id, prompt, wanted, request_seed(seed, id))
        pending[id] = _Pending(conversation=conversation, answers=answers, prompt_tokens=len(prompt), arrived=arrived)

    def wanted(self, conversation: Conversation) -> int:
        """Most tokens of an answer."""
        return conversation.output_tokens or self.max_new_tokens


def request_id(conversation: Conversation, turn: int) -> str:
    """A request's name: its conversation's, and the number of the turn where there are several.

    Example:
        >>> request_id(Conversation(id="a", category="", opening="x"), 0)
        'a'
    """
    return conversation.id if conversation.num_turns == 1 else f"{conversation.id}#{turn + 1}"


def request_seed(seed: int, id: str) -> int:
    """The seed of a request, which does not depend on the order in which requests are served."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{id}".encode(), digest_size=8).digest(), "big")


def _served(id: str, request: _Pending) -> Served:
    steps = [step for step in request.steps if step.emitted]
    return Served(
        id=id,
        conversation=request.conversation.id,
        category=request.conversation.category,
        turn=len(request.answers),
        prompt_tokens=request.prompt_tokens,
        num_tokens=sum(step.emitted for step in steps),
        arrived=request.arrived,
        first=steps[0].at if steps else None,
        ended=request.steps[-1].at,
        steps=tuple(steps),
    )
