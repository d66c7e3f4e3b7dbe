"""The engine: takes requests, gives each a slot, prefills it, steps all active ones together, and hands out text."""

import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
from transformers import PreTrainedTokenizerBase

from outrider.constraints.grammar import Grammar
from outrider.decoding.step import (
    PREFILL_CHUNK,
    Mark,
    Parts,
    StepDecoding,
    digest,
    mark,
    rewind,
    tokens_left,
    undigested,
)
from outrider.dice import Dice
from outrider.drafters.none import NoDrafter
from outrider.engine.output import FinishReason, Output, Update, succeeded
from outrider.engine.prompts import Prompt, encode
from outrider.engine.seats import Chunk, Seat, alike
from outrider.engine.text import Ending
from outrider.lengths.fixed import FixedLength
from outrider.trees.chain import ChainTree
from outrider.types import Constraint, InputError, Request, Running, Sampling, Step
from outrider.verifiers.match import MatchVerifier

Sink = Callable[[Step], None]


class Engine:
    """Speculative decoding of many requests at once, over parts that fit each other; made by `outrider.load`.

    Args:
        parts: Target, drafter, tree, verifier, length policy and decoding.
        tokenizer: For text prompts, text output, stop strings and chat; token ids work without it.
        eos_ids: Token ids that end an output.
        sampling: Settings of requests that bring none.
        max_slots: Most requests that run at once; further ones wait.
        keep_warm: Whether the last request's slot is kept for a prompt that continues it.
        max_prefill_tokens: Most prompt tokens that one step digests, over all requests, first come first: how long
            new prompts keep those waiting that decode.
        dice: Makes the dice of a step of these requests; by default keyed by each request's seed and step.

    Example:
        >>> import outrider
        >>> engine = outrider.load()
        >>> [out] = engine.generate(["Once upon a time"], max_new_tokens=8, sampling=outrider.Sampling(temperature=0))
        >>> len(out.tokens), out.finish_reason
        (8, 'length')
    """

    def __init__(
        self,
        parts: Parts,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        eos_ids: frozenset[int] = frozenset(),
        sampling: Sampling | None = None,
        max_slots: int = 8,
        max_prefill_tokens: int = PREFILL_CHUNK,
        keep_warm: bool = True,
        dice: Callable[[Sequence[Running]], Dice] | None = None,
    ) -> None:
        if max_prefill_tokens < 1:
            raise InputError(f"max_prefill_tokens must be >= 1, got {max_prefill_tokens}")
        self.parts = parts
        self.tokenizer = tokenizer
        self.eos_ids = eos_ids
        self.sampling = sampling or Sampling()
        self.max_slots = max_slots
        self.max_prefill_tokens = max_prefill_tokens
        self.keep_warm = keep_warm
        self.dice = dice
        self._waiting: deque[Seat] = deque()
        self._seats: dict[str, Seat] = {}
        self._warm: Running | None = None
        self._seeds = np.random.SeedSequence()

    def add(
        self,
        prompt: Prompt | Request,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        id: str | None = None,
        constraint: Constraint | Grammar | None = None,
    ) -> str:
        """Queue a request and return its id. Raises InputError where it cannot be run.

        Args:
            constraint: What the output must be: a grammar, or any other constraint on tokens.
        """
        if isinstance(prompt, Request):
            request = prompt
        else:
            request = Request(
                id=id or uuid.uuid4().hex[:12],
                prompt=tuple(self.encode(prompt)),
                max_new_tokens=max_new_tokens,
                sampling=sampling or self.sampling,
                eos_ids=frozenset() if ignore_eos else self.eos_ids,
                stop=tuple(stop),
                logprobs=logprobs,
            )
        if constraint is not None:
            request = replace(request, constraint=self._bind(constraint, request.eos_ids))
        if request.sampling.seed is None:
            seed = int(self._seeds.spawn(1)[0].generate_state(1, np.uint64)[0])
            request = replace(request, sampling=replace(request.sampling, seed=seed))
        self._check(request)
        seat = Seat(request=request, ending=Ending(self.tokenizer, request.stop))
        self._seats[request.id] = seat
        self._waiting.append(seat)
        return request.id

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt; chat messages go through the tokenizer's template, the assistant to speak next."""
        return encode(prompt, self.tokenizer)

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self._seats)

    def step(self, sink: Sink | None = None) -> list[Update]:
        """Admit what fits, prefill new requests, then draft, verify and commit for all ready ones.

        A request that fails ends with `finish_reason` `error`, and the others go on. What fails while several requests
        make a step together concerns all of them: the step is taken back and each makes its next one alone, so that
        the one at fault fails alone. The draws are those of the step that failed, so the others lose time and nothing
        else. An interrupt takes the step back too.
        """
        updates = [*self._admit(), *self._prefill()]
        ready = [seat for seat in self._seats.values() if seat.ready]
        together = [seat for seat in ready if not seat.suspect]
        for seats in ([together] if together else []) + [[seat] for seat in ready if seat.suspect]:
            updates += self._advance(seats, sink)
        return updates

    def cancel(self, id: str) -> Output | None:
        """End a request now; what it has emitted so far, or None if there is no such request."""
        seat = self._seats.get(id)
        return None if seat is None else self._finish(seat, "cancelled")

    def stream(self, prompt: Prompt | Request, **options: object) -> Iterator[Update]:
        """Run one request beside whatever else is active, and yield its updates as they come.

        Takes the options of `add`. Leaving the loop early cancels the request. What ends it by an error is raised.
        """
        id = self.add(prompt, **options)  # type: ignore[arg-type]
        try:
            while id in self._seats:
                yield from (succeeded(update) for update in self.step() if update.id == id)
        finally:
            self.cancel(id)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | Sequence[Sampling] | None = None,
        n: int = 1,
        stop: Sequence[str] = (),
        logprobs: bool = False,
        ignore_eos: bool = False,
        progress: Callable[[Output], None] | None = None,
        constraint: Constraint | Grammar | Sequence[Constraint | Grammar | None] | None = None,
    ) -> list[Output]:
        """Run prompts to their ends, as many at once as there are slots; outputs in the order of the prompts.

        Args:
            prompts: Texts, lists of token ids or lists of chat messages.
            sampling: One for all prompts, or one per prompt.
            n: Outputs per prompt; they stand side by side. With a seed given, the k-th is drawn from a seed derived
                from it and k, the first from the seed itself.
            progress: Called with each output as it ends.
            constraint: What the outputs must be; one for all prompts, or one per prompt, None where anything may be.

        What ends one of the requests by an error is raised, and the others are cancelled.
        """
        if isinstance(prompts, str):
            raise InputError("prompts must be a list; for one prompt give [prompt]")
        if n < 1:
            raise InputError(f"n must be >= 1, got {n}")
        settings = [sampling] * len(prompts) if sampling is None or isinstance(sampling, Sampling) else list(sampling)
        if len(settings) != len(prompts):
            raise InputError(f"got {len(settings)} samplings for {len(prompts)} prompts; give one, or one per prompt")
        if isinstance(constraint, Sequence) and not isinstance(constraint, str):
            rules = list(constraint)
        else:
            rules = [constraint] * len(prompts)
        if len(rules) != len(prompts):
            raise InputError(f"got {len(rules)} constraints for {len(prompts)} prompts; give one, or one per prompt")
        requests: list[str] = []
        steps: dict[str, list[Step]] = {}
        outputs: dict[str, Output] = {}
        try:
            for prompt, setting, rule in zip(prompts, settings, rules, strict=True):
                for k in range(n):
                    id = self.add(
                        prompt,
                        max_new_tokens=max_new_tokens,
                        sampling=setting if setting is None else setting.nth(k),
                        stop=stop,
                        logprobs=logprobs,
                        ignore_eos=ignore_eos,
                        constraint=rule,
                    )
                    requests.append(id)
                    steps[id] = []
            while any(id in self._seats for id in requests):
                for update in self.step(sink=lambda made: steps.get(made.request, []).append(made)):
                    if update.id in steps:
                        succeeded(update)
                    if update.output is not None and update.id in steps:
                        outputs[update.id] = replace(update.output, steps=steps[update.id])
                        if progress is not None:
                            progress(outputs[update.id])
        except BaseException:
            for id in requests:
                self.cancel(id)
            raise
        return [outputs[id] for id in requests]

    def plain(self) -> "Engine":
        """An engine over the same target that drafts nothing. The two share the target's slots, so it keeps none."""
        self.rest()
        return Engine(
            replace(
                self.parts,
                drafter=NoDrafter(),
                tree=ChainTree(),
                verifier=MatchVerifier(),
                length=FixedLength(),
                decoding=StepDecoding(),
            ),
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            sampling=self.sampling,
            max_slots=self.max_slots,
            max_prefill_tokens=self.max_prefill_tokens,
            keep_warm=False,
        )

    def rest(self) -> None:
        """Give back the slot that is kept warm for a prompt that continues the last one."""
        warm, self._warm = self._warm, None
        if warm is not None:
            self._release(warm)

    def _bind(self, constraint: Constraint | Grammar, eos_ids: frozenset[int]) -> Constraint:
        if isinstance(constraint, Grammar):
            return constraint.bind(self.tokenizer, self.parts.target.vocab_size, eos_ids)
        if not isinstance(constraint, Constraint):
            raise InputError(
                "a constraint is a grammar of outrider.constraints.grammar (json_schema, any_json, regex, ebnf), or an "
                f"object with open, masks and commit; got {constraint!r}"
            )
        return constraint

    def _check(self, request: Request) -> None:
        longest = self.parts.target.max_context
        if request.id in self._seats:
            raise InputError(f"a request {request.id!r} is already running; ids must be unique")
        if not request.prompt:
            raise InputError("the prompt is empty; give at least one token")
        if len(request.prompt) >= longest:
            raise InputError(
                f"the prompt has {len(request.prompt)} tokens and the context {longest}; shorten it to at most "
                f"{longest - 1} tokens, or raise max_context if the model allows more"
            )
        if request.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be >= 1, got {request.max_new_tokens}")
        width = self.parts.target.vocab_size
        if (worst := max(request.prompt)) >= width or min(request.prompt) < 0:
            raise InputError(f"token id {worst if worst >= width else min(request.prompt)} is not in 0 .. {width - 1}")
        if any(not 0 <= token < width for token in request.sampling.logit_bias):
            raise InputError(f"logit_bias names token ids outside 0 .. {width - 1}")
        if request.stop and self.tokenizer is None:
            raise InputError("stop strings need the target's tokenizer")
        if any(not text for text in request.stop):
            raise InputError("a stop string must not be empty")

    def _admit(self) -> list[Update]:
        failed = []
        while self._waiting and sum(seat.running is not None for seat in self._seats.values()) < self.max_slots:
            seat = self._waiting[0]
            seat.admitted = time.perf_counter()
            try:
                seat.running = self._resume(seat.request) or self._open(seat.request)
            except Exception as error:
                failed.append(self._fail(seat, error))
            else:
                self._waiting.popleft()
        return failed

    def _open(self, request: Request) -> Running:
        slot = self.parts.target.open()
        try:
            return Running(
                request=request,
                tokens=list(request.prompt),
                slot=slot,
                drafter_state=self.parts.drafter.open(request),
                length_state=self.parts.length.open(),
            )
        except BaseException:
            self.parts.target.release(slot)
            raise

    def _resume(self, request: Request) -> Running | None:
        """The slot that the last request left warm, if the new prompt begins as it does; otherwise it is given back."""
        warm, self._warm = self._warm, None
        if warm is None:
            return None
        shared = 0
        digested = min(self.parts.target.length(warm.slot), len(request.prompt) - 1)
        while shared < digested and warm.tokens[shared] == request.prompt[shared]:
            shared += 1
        if shared == 0 or self.parts.drafter.taps:
            self._release(warm)
            return None
        try:
            self.parts.target.truncate(warm.slot, shared)
            return Running(
                request=request,
                tokens=list(request.prompt),
                slot=warm.slot,
                drafter_state=self.parts.drafter.reuse(warm.drafter_state, request, shared),
                length_state=self.parts.length.open(),
            )
        except BaseException:
            self._abandon(warm)
            raise

    def _prefill(self) -> list[Update]:
        """Digest a chunk of every new prompt, first come first, `max_prefill_tokens` in all.

        Prompts of like length share a forward. Where no request decodes yet, their last chunks are left to their first
        step, whose forward digests them too.
        """
        left, chunks = self.max_prefill_tokens, []
        new = [seat for seat in self._seats.values() if seat.running is not None and not seat.ready]
        for seat in new:
            behind = len(undigested(self.parts, seat.state))
            count = min(behind, left)
            left -= count
            seat.ready = behind == 0
            end = self.parts.target.length(seat.state.slot) + count
            chunks.append(Chunk(seat=seat, count=count, end=end, last=count == behind))
        groups = alike([chunk for chunk in chunks if chunk.count])
        alone = len(groups) == 1 and not any(seat.ready for seat in self._seats.values())
        if alone and all(chunk.last for chunk in chunks) and self._digests_in_step:
            for seat in new:
                seat.ready = True
            return []
        return [update for group in groups for update in self._digest(group)]

    @property
    def _digests_in_step(self) -> bool:
        """Whether a step may digest a prompt and verify a draft behind it in one forward.

        Not where the drafter must see the prompt's hidden states before it drafts, nor where a rejected draft would
        make the prompt be digested again.
        """
        parts = self.parts
        return isinstance(parts.decoding, StepDecoding) and not parts.drafter.taps and parts.target.crops

    def _digest(self, chunks: Sequence[Chunk]) -> list[Update]:
        """Digest chunks in one forward."""
        seats = [chunk.seat for chunk in chunks]
        marks = [mark(seat.state) for seat in seats]
        try:
            digest(self.parts, [seat.state for seat in seats], [chunk.count for chunk in chunks])
        except BaseException as error:
            return self._failed(seats, marks, error)
        for chunk in chunks:
            chunk.seat.ready = chunk.last
        return []

    def _advance(self, seats: Sequence[Seat], sink: Sink | None) -> list[Update]:
        """One step of ready seats together."""
        by_id = {seat.request.id: seat for seat in seats}
        states = [seat.state for seat in seats]
        marks = [mark(state) for state in states]
        try:
            steps = self.parts.decoding.step(
                self.parts,
                states,
                dice=None if self.dice is None else self.dice(states),
                keep=lambda state, tokens: by_id[state.request.id].keep(tokens),
            )
        except BaseException as error:
            return self._failed(seats, marks, error)
        updates = [self._update(by_id[made.request], made) for made in steps]
        if sink is not None:
            for made in steps:
                sink(made)
        return updates

    def _failed(self, seats: Sequence[Seat], marks: Sequence[Mark], error: BaseException) -> list[Update]:
        """Take back what failed; one request alone ends by it, several are tried alone. An interrupt is raised."""
        failed = [update for pair in zip(seats, marks, strict=True) if (update := self._take_back(*pair))]
        if not isinstance(error, Exception):
            raise error
        return failed or ([self._fail(seats[0], error)] if len(seats) == 1 else [])

    def _take_back(self, seat: Seat, to: Mark) -> Update | None:
        """Put a request back to where it stood before a step that failed; its end, where even that fails."""
        try:
            rewind(self.parts, seat.state, to)
            seat.ready, seat.suspect, seat.ended = False, True, False
            seat.ending = Ending(self.tokenizer, seat.request.stop)
            seat.ending.keep(seat.state.output)
            seat.ending.take()
        except Exception as error:
            return self._fail(seat, error)
        return None

    def _update(self, seat: Seat, made: Step) -> Update:
        tokens = list(made.tokens)
        seat.suspect = False
        seat.num_draft_tokens += made.num_draft_tokens
        seat.accepted.append(made.num_accepted_tokens)
        seat.logprobs += made.logprobs or ()
        text = seat.ending.take()
        reason: FinishReason | None = None
        if seat.ended or seat.ending.stopped or tokens[-1] in seat.request.eos_ids:
            reason = "stop"
        elif tokens_left(self.parts, seat.state) == 0:
            reason = "length"
        if reason is None:
            return Update(id=made.request, tokens=tokens, text=text)
        text += seat.ending.finish()
        return Update(id=made.request, tokens=tokens, text=text, output=self._finish(seat, reason))

    def _fail(self, seat: Seat, error: Exception) -> Update:
        return Update(id=seat.request.id, tokens=[], text="", output=self._finish(seat, "error", error))

    def _finish(self, seat: Seat, reason: FinishReason, error: Exception | None = None) -> Output:
        """Take a request out. The last one to leave keeps its slot warm for a prompt that continues it."""
        del self._seats[seat.request.id]
        if seat.running is None:
            self._waiting.remove(seat)
        else:
            seat.running.constraint_state = None
            if error is not None:
                self._abandon(seat.running)
            elif self._seats or self._warm is not None or not self.keep_warm:
                self._release(seat.running)
            else:
                self._warm = seat.running
        if error is None:
            seat.ending.finish()
        return seat.output(reason, error)

    def _release(self, running: Running) -> None:
        self.parts.target.release(running.slot)
        self.parts.drafter.close(running.drafter_state)

    def _abandon(self, running: Running) -> None:
        """Release what can be released; the error that comes first is the one to report."""
        with suppress(Exception):
            self.parts.target.release(running.slot)
        with suppress(Exception):
            self.parts.drafter.close(running.drafter_state)
