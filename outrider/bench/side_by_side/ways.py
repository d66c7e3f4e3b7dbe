"""Ways to answer requests: an engine of Outrider, transformers' own `generate`, and other engines behind a driver."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.engines.driver import AnswerTiming, Driver, DriverRequest, EngineOutput
from outrider.bench.engines.process import Refused, Stopped
from outrider.bench.side_by_side.arrivals import ClosedLoop, Load
from outrider.bench.side_by_side.player import PARTS, EngineServer, Player, request_id
from outrider.bench.side_by_side.served import Served
from outrider.bench.side_by_side.transformers_generate import generate
from outrider.bench.workloads.conversation import Conversation
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation


class LeftOut(Exception):
    """Why a way does not do a run, in one sentence."""


@dataclass(frozen=True, kw_only=True)
class Played:
    """A run of conversations.

    Attributes:
        seconds: From the first request to the last token.
        parts: Seconds of each part of the steps; empty where an engine does not tell.
        memory: Most bytes that the process of another engine has held since its start; None where that is not known.
    """

    served: Sequence[Served]
    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    memory: int | None = None


@dataclass(frozen=True, kw_only=True)
class EngineWay:
    """An engine of Outrider in this process.

    Attributes:
        name: Unique in a measurement.
        drafts: Whether it drafts; the fastest way that does not is what others are compared with.
        outside: Whether it runs in a process of its own.
        columns: Fewest columns of the target's forwards; None leaves them as they are.
    """

    name: str
    engine: Engine
    generation: Generation
    drafts: bool = True
    outside: bool = False
    columns: int | None = None

    def play(self, player: Player, conversations: Sequence[Conversation], load: Load, seed: int) -> Played:
        """Answer conversations, from a cold cache."""
        target: Any = self.engine.parts.target
        padded = target.pad_to
        self.engine.rest()
        target.pad_to = padded if self.columns is None else self.columns
        server = EngineServer(self.engine, self.generation)
        try:
            began = time.perf_counter()
            served = player.play(server, conversations, load, seed)
            seconds = time.perf_counter() - began
        finally:
            # Other engines use the same slots.
            for id in list(self.engine.running):
                self.engine.cancel(id)
            self.engine.rest()
            target.pad_to = padded
        parts = {part: sum(getattr(each, part) for each in server.timings.values()) for part in PARTS}
        return Played(served=served, seconds=seconds, parts=parts)


Answerer = Callable[[list[list[int]], int, int], EngineOutput]
"""Answers prompts together: prompts, tokens of each answer, seed."""


@dataclass(frozen=True, kw_only=True)
class BatchWay:
    """An engine that answers fixed batches: all prompts at once, and it returns when the last answer is whole.

    Attributes:
        answer: Answers prompts.
        decode: Turns an answer's tokens into the text of a message.
    """

    name: str
    answer: Answerer
    decode: Callable[[Sequence[int]], str]
    drafts: bool
    outside: bool

    def play(self, player: Player, conversations: Sequence[Conversation], load: Load, seed: int) -> Played:
        """Answer as many conversations together as the load has at once, then the next ones.

        Raises:
            LeftOut: It cannot.
        """
        if not isinstance(load, ClosedLoop):
            raise LeftOut("it answers batches, and cannot be sent requests while it runs")
        served: list[Served] = []
        clock, memory = 0.0, None
        for first in range(0, len(conversations), load.concurrency):
            some = conversations[first : first + load.concurrency]
            clock, memory = self._batch(player, some, seed, clock, served)
        return Played(served=served, seconds=clock, memory=memory)

    def _batch(
        self, player: Player, conversations: Sequence[Conversation], seed: int, clock: float, served: list[Served]
    ) -> tuple[float, int | None]:
        """Answer the first turns of some conversations together, then the second turns, and so on.

        Args:
            clock: Seconds so far.
            served: Gets the requests.

        Returns:
            Seconds at the end, and the memory that was told last.
        """
        memory: int | None = None
        open_: list[tuple[Conversation, list[str]]] = [(each, []) for each in conversations]
        while open_:
            prompts = [player.encoder.prompt(conversation, answers) for conversation, answers in open_]
            wanted = [player.wanted(conversation) for conversation, _ in open_]
            fits = [len(prompt) + count <= player.room for prompt, count in zip(prompts, wanted, strict=True)]
            turns = [each for each, fit in zip(zip(open_, prompts, wanted, strict=True), fits, strict=True) if fit]
            if not turns:
                break
            output = self.answer([prompt for _, prompt, _ in turns], max(count for *_, count in turns), seed)
            began, clock, memory, open_ = clock, clock + output.seconds, output.memory, []
            told: Sequence[AnswerTiming | None] = output.timings or [None] * len(turns)
            for ((conversation, answers), prompt, count), tokens, timing in zip(
                turns, output.tokens, told, strict=True
            ):
                first = None if timing is None else began + timing.prompt_seconds
                served.append(
                    Served(
                        id=request_id(conversation, len(answers)),
                        conversation=conversation.id,
                        category=conversation.category,
                        turn=len(answers),
                        prompt_tokens=len(prompt),
                        num_tokens=min(count, len(tokens) if timing is None else timing.num_tokens),
                        arrived=began,
                        first=first,
                        ended=clock if timing is None or first is None else first + timing.decode_seconds,
                        draft_tokens=None if timing is None else timing.draft_tokens,
                        accepted_tokens=None if timing is None else timing.accepted_tokens,
                    )
                )
                if len(answers) + 1 < conversation.num_turns:
                    open_.append((conversation, [*answers, self.decode(tokens[:count])]))
        return clock, memory


Way = EngineWay | BatchWay
"""A way to answer requests."""


def transformers_way(
    name: str,
    engine: Engine,
    generation: Generation,
    *,
    assistant: Any = None,
    lookup: int | None = None,
    draft: int = 5,
) -> BatchWay:
    """transformers' own `generate` on the target, plain or with its own speculation, which takes one prompt at a time.

    Args:
        assistant: A draft model.
        lookup: Tokens that its prompt lookup drafts.
        draft: Tokens that the assistant drafts.
    """
    target: Any = engine.parts.target
    settings = generation.sampling or Sampling()
    alone = assistant is not None or lookup is not None

    def answer(prompts: list[list[int]], num_tokens: int, seed: int) -> EngineOutput:
        if alone and len(prompts) > 1:
            raise LeftOut("transformers' own speculation takes one prompt at a time")
        engine.rest()
        generated = generate(
            target.model,
            prompts,
            max_new_tokens=num_tokens,
            sampling=settings,
            seed=seed,
            eos_ids=frozenset() if generation.ignore_eos else engine.eos_ids,
            assistant=assistant,
            num_assistant_tokens=draft,
            prompt_lookup_num_tokens=lookup,
        )
        return EngineOutput(tokens=[list(tokens) for tokens in generated.tokens], seconds=generated.seconds)

    return BatchWay(name=name, answer=answer, decode=decoder(engine), drafts=alone, outside=False)


def driver_way(
    name: str, engine: Engine, driver: Driver, temperature: float, *, drafts: bool, ignore_eos: bool = True
) -> BatchWay:
    """Another engine behind a driver.

    Args:
        ignore_eos: Whether its answers go on behind end tokens, so that all are as long as was asked.
    """

    def answer(prompts: list[list[int]], num_tokens: int, seed: int) -> EngineOutput:
        request = DriverRequest(
            prompts=prompts,
            new_tokens=num_tokens,
            temperature=temperature,
            seed=seed,
            ignore_eos=ignore_eos,
            ids=False,
        )
        try:
            output = driver.ask(request)
        except (Refused, Stopped) as error:
            raise LeftOut(str(error)) from error
        told = [each.num_tokens for each in output.timings] or [len(tokens) for tokens in output.tokens]
        counts = sorted(set(told))
        least = num_tokens if ignore_eos else 1
        if counts[0] < least or counts[-1] > num_tokens or len(output.tokens) != len(prompts):
            lengths = ", ".join(map(str, counts))
            raise LeftOut(
                f"it wrote {lengths} tokens for {len(output.tokens)} prompts, not {num_tokens} for {len(prompts)}"
            )
        return output

    return BatchWay(name=name, answer=answer, decode=decoder(engine), drafts=drafts, outside=True)


def decoder(engine: Engine) -> Callable[[Sequence[int]], str]:
    """What turns an answer's tokens into the text of a message: up to its end token, without special tokens."""

    def decode(tokens: Sequence[int]) -> str:
        ends = [i for i, token in enumerate(tokens) if token in engine.eos_ids]
        kept = list(tokens[: ends[0]] if ends else tokens)
        tokenizer: Any = engine.tokenizer
        return str(tokenizer.decode(kept, skip_special_tokens=True)) if tokenizer is not None else ""

    return decode
