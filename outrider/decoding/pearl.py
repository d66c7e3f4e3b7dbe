"""PEARL: the same step with drafting and verifying at once (Liu et al. 2024).

Between two steps of a request, tokens may lie *ahead* of its anchor: drafted, not judged (`Running.ahead`). While there
are none, a step is a *pre-verify*: the target reads the anchor while the drafter drafts, and the first drafted token is
judged as soon as both are done. While there are some, it is a *post-verify*: the target reads them while the drafter
drafts on behind them, as if all were accepted. Where all are, they are emitted without a bonus token, and what was
drafted meanwhile lies ahead. Where one is rejected, what was drafted behind it is thrown away.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.constraints.grammar import batch_masks, follow
from outrider.decoding.step import Clock, Parts, cut, prefill, tokens_left
from outrider.dice import Dice, PhiloxDice
from outrider.drafters.model import ModelDrafter
from outrider.lengths.fixed import FixedLength
from outrider.lm.protocol import Segment
from outrider.sampling import Prefix, log_probs, to_rows
from outrider.trees.grow import grow
from outrider.types import Ahead, Constraint, Draft, InputError, Request, Running, Sampling, Step, Timing

LONGEST = 16
"""Longest draft that is chosen by measurement."""


@dataclass(frozen=True, kw_only=True)
class PearlDecoding:
    """Draft and verify at once, so that the cheaper of the two costs no time where each has a device of its own.

    The two sides share nothing that changes: the drafter's thread alone touches drafter states, each side has its own
    dice, and both caches are rolled back when both sides are done. All draws are keyed by request, step, purpose and
    node, so both clocks give the same tokens.

    Attributes:
        num_speculative_tokens: Tokens drafted per step, at least two. None takes the length that is named, and without
            one as many as the drafter makes in the time of one target forward, measured when the engine is put
            together; name a number where outputs must be the same on every machine.
        clock: `real` runs the drafter in a thread of its own, and on a GPU in a stream of its own. `simulated` runs the
            sides one after the other and reports the time that two devices would have needed: `Timing.overlap` is the
            shorter of the two.

    References:
        Liu et al. 2024, PEARL, algorithm 2. https://arxiv.org/abs/2408.11850
    """

    ahead = True

    num_speculative_tokens: int | None = None
    clock: Literal["real", "simulated"] = "real"
    _now: Callable[[], float] = field(default=time.perf_counter, repr=False, compare=False)
    _worker: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="drafter"),
        init=False,
        repr=False,
        compare=False,
    )

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and self.num_speculative_tokens < 2:
            raise InputError(
                f"pearl's num_speculative_tokens must be >= 2, got {self.num_speculative_tokens}: the first token is "
                "judged at once, and there must be one more to lie ahead; use decoding step to draft one"
            )

    @torch.inference_mode()
    def step(
        self,
        parts: Parts,
        states: Sequence[Running],
        dice: Dice | None = None,
        keep: Callable[[Running, list[int]], int] | None = None,
    ) -> list[Step]:
        """One pre-verify or post-verify of every request; the states change in place.

        Args:
            states: Prefilled requests that may still emit a token.
            dice: The source of all draws; by default keyed by each request's seed and step. One for both sides will do,
                because the target's side draws nothing until the drafter's is done.
            keep: How many of the tokens about to be emitted the request still wants, at least one.
        """
        clock = Clock(self._now)
        drafters, verifiers = (dice or _dice(states) for _ in range(2))
        follow(states)
        shadows = [_shadow(s) for s in states]
        draft = functools.partial(_draft, parts, shadows, drafters, self._now)
        # What the target may say is looked up beforehand, so that the drafter's side alone asks constraints meanwhile.
        read = functools.partial(_read, parts, states, clock, _masks(parts, states))
        if self.clock == "real":
            drafted, reading = _at_once(self._worker, draft, read, clock, _device(parts))
        else:
            drafted, reading = _in_turn(draft, read, clock, parts.target.device)
        blocks = [s.ahead if s.ahead.tokens else new.part(slice(1)) for s, new in zip(states, drafted.new, strict=True)]
        judged = _packed([s.tokens[-1] for s in states], blocks, parts.target.device)
        verdict = parts.verifier.verify(judged, _with_leaves(judged, reading.rows), verifiers)
        counts, following = verdict.num_accepted.tolist(), verdict.next_tokens.tolist()
        clock.lap("verify")
        outcomes = [
            _outcome(parts, state, new, counts[i], following[i], keep)
            for i, (state, new) in enumerate(zip(states, drafted.new, strict=True))
        ]
        logprobs = [_log_probabilities(s, reading, i, outcomes[i].tokens) for i, s in enumerate(states)]
        steps = [
            Step(
                request=state.request.id,
                num_draft_tokens=outcome.settled,
                num_accepted_tokens=count,
                tokens=tuple(outcome.tokens),
                timing=clock.timing,
                num_requests=len(states),
                logprobs=said,
                logits=_logits(reading, i, outcome.tokens).float() if state.request.keep_logits else None,
            )
            for i, (state, outcome, count, said) in enumerate(zip(states, outcomes, counts, logprobs, strict=True))
        ]
        _commit(parts, states, shadows, drafted.new, outcomes)
        for state, made in zip(states, steps, strict=True):
            state.length_state = parts.length.update(state.length_state, made)
        clock.lap("commit")
        return steps


def balanced_length(parts: Parts, rounds: int = 5, now: Callable[[], float] = time.perf_counter) -> int:
    r"""How many tokens the drafter drafts in the time of one target forward, $\lceil t_p / t_q \rceil$, from 2 to 16.

    Medians of a few steps on an arbitrary prompt, after one that warms up.

    References:
        Liu et al. 2024, section 4.3. https://arxiv.org/abs/2408.11850
    """
    length = 4
    parts = replace(
        parts, length=FixedLength(num_speculative_tokens=length), decoding=PearlDecoding(clock="simulated", _now=now)
    )
    phrase = [token % parts.target.vocab_size for token in range(1, 9)]
    prompt = tuple(2 * phrase)[: parts.target.max_context // 2]
    request = Request(id="balance", prompt=prompt, max_new_tokens=1 << 20, sampling=Sampling(temperature=0.0, seed=0))
    state = Running(
        request=request,
        tokens=list(prompt),
        slot=parts.target.open(),
        drafter_state=parts.drafter.open(request),
        length_state=parts.length.open(),
    )
    timings: list[Timing] = []
    try:
        prefill(parts, state)
        while len(timings) <= rounds and tokens_left(parts, state) > 2 * length:
            timings += [made.timing for made in parts.decoding.step(parts, [state])]
    finally:
        parts.target.release(state.slot)
        parts.drafter.close(state.drafter_state)
    if not timings:
        raise InputError("the context is too short to measure pearl's draft length; give num_speculative_tokens")
    target, drafter = (
        statistics.median(getattr(t, part) for t in timings[1:] or timings) for part in ("target", "drafter")
    )
    return min(max(2, math.ceil(target * length / max(drafter, 1e-9))), LONGEST)


@dataclass(frozen=True, kw_only=True)
class _Drafted:
    """The drafter's side: what it made of each request, and in how many seconds."""

    new: list[Ahead]
    seconds: float


@dataclass(frozen=True, kw_only=True)
class _Reading:
    """The target's side: what it says at the anchors and at the tokens ahead, the last of each request left out.

    Attributes:
        logits: Raw logits.
        rows: The distributions that they stand for.
        offsets: Where each request's begin.
    """

    logits: Float[Tensor, "read vocab"]
    rows: Float[Tensor, "read vocab"]
    offsets: list[int]


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """What a step comes to for one request.

    Attributes:
        tokens: What it emits.
        settled: Draft tokens that were judged or thrown away.
        survives: Whether all that was judged is emitted, so that what was drafted behind it is of use.
        ahead: What is of use of it.
    """

    tokens: list[int]
    settled: int
    survives: bool
    ahead: Ahead


@dataclass(frozen=True, kw_only=True)
class _Behind:
    """A constraint behind tokens that lie ahead, of which it has not been told.

    Attributes:
        anchor: The newest committed token.
        ahead: What lies ahead of it.
    """

    constraint: Constraint
    anchor: int
    ahead: tuple[int, ...]

    def open(self) -> object:
        return self.constraint.open()

    def masks(self, state: object, tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        count = len(self.ahead)
        above = [*range(-1, count), *(parent + count for parent in parents[1:])]
        return self.constraint.masks(state, [self.anchor, *self.ahead, *tokens[1:]], above)[count:]

    def commit(self, state: object, tokens: Sequence[int]) -> None:
        self.constraint.commit(state, tokens)


def _shadow(state: Running) -> Running:
    """A request as the drafter sees it: what lies ahead is committed."""
    ahead, request = state.ahead.tokens, state.request
    if request.constraint is not None and ahead:
        behind = _Behind(constraint=request.constraint, anchor=state.tokens[-1], ahead=ahead)
        request = replace(request, constraint=behind)
    return replace(state, request=request, tokens=[*state.tokens, *ahead])


def _chains(states: Sequence[Running]) -> list[list[int]]:
    """What the target reads: the anchors and all tokens ahead but the last, which nothing drawn yet follows."""
    return [[s.tokens[-1], *s.ahead.tokens[:-1]] for s in states]


def _masks(parts: Parts, states: Sequence[Running]) -> Int[Tensor, "read words"] | None:
    """What may follow each token that the target reads; None where no request is constrained."""
    chains = _chains(states)
    owners = np.repeat(np.arange(len(chains)), [len(chain) for chain in chains])
    parents = np.concatenate([np.arange(len(chain)) - 1 for chain in chains])
    tokens = torch.tensor([token for chain in chains for token in chain])
    return batch_masks(states, owners, tokens, parents, parts.target.vocab_size)


@torch.inference_mode()
def _draft(parts: Parts, shadows: Sequence[Running], dice: Dice, now: Callable[[], float]) -> _Drafted:
    """Draft behind everything that is committed or ahead."""
    began = now()
    rooms = [_room(parts, shadow) for shadow in shadows]
    draft = grow(parts.drafter, parts.tree, parts.length, shadows, rooms, dice, _device(parts))
    tokens, new = draft.tokens.tolist(), []
    for first, end in zip(draft.offsets[:-1].tolist(), draft.offsets[1:].tolist(), strict=True):
        at, rows = draft.row_of[first : end - 1], None
        if draft.rows is not None and len(at):
            alone = len(at) == len(draft.rows)
            rows = draft.rows if alone else draft.rows[torch.from_numpy(at).to(draft.rows.device)]
        new.append(Ahead(tokens=tuple(tokens[first + 1 : end]), rows=rows))
    return _Drafted(new=new, seconds=now() - began)


@torch.inference_mode()
def _read(parts: Parts, states: Sequence[Running], clock: Clock, masks: Int[Tensor, "read words"] | None) -> _Reading:
    """The target's rows after the anchors and after the tokens ahead."""
    chains = _chains(states)
    tokens = torch.tensor([token for chain in chains for token in chain]).to(parts.target.device, non_blocking=True)
    counts = [len(chain) for chain in chains]
    segments = [Segment(slot=s.slot, tokens=own) for s, own in zip(states, tokens.split(counts), strict=True)]
    logits = parts.target.extend(segments).logits
    clock.lap("target")
    owners, offsets = np.repeat(np.arange(len(states)), counts), [0, *np.cumsum(counts).tolist()]

    def prefix(row: int) -> Prefix:
        state, depth = states[owners[row]], row - offsets[owners[row]]
        return Prefix(prompt=state.request.prompt, output=[*state.output, *state.ahead.tokens[:depth]])

    rows = to_rows(logits, owners, [s.request.sampling for s in states], prefix, masks)
    clock.lap("rows")
    return _Reading(logits=logits, rows=rows, offsets=offsets)


def _in_turn(
    draft: Callable[[], _Drafted], read: Callable[[], _Reading], clock: Clock, device: torch.device
) -> tuple[_Drafted, _Reading]:
    """Both sides one after the other, on the clock of two devices."""
    drafted = draft()
    clock.lap("drafter")
    reading = read()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        clock.lap("target")
    clock.timing.overlap = min(clock.timing.drafter, clock.timing.target + clock.timing.rows)
    return drafted, reading


def _at_once(
    worker: ThreadPoolExecutor,
    draft: Callable[[], _Drafted],
    read: Callable[[], _Reading],
    clock: Clock,
    device: torch.device,
) -> tuple[_Drafted, _Reading]:
    """Both sides at once, the drafter's in the worker's thread and, on a GPU, in a stream of its own.

    Neither runs any more when this returns or raises, so that slots can be closed.
    """
    side = _stream(device) if device.type == "cuda" else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream(device))

    def beside() -> _Drafted:
        with nullcontext() if side is None else torch.cuda.stream(side):
            return draft()

    future = worker.submit(beside)
    try:
        reading = read()
        wait([future])
    except BaseException as error:
        wait([future])
        if (other := future.exception()) is not None:
            error.add_note(f"the drafter failed beside it: {other!r}")
        raise
    drafted = future.result()
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    clock.lap("rest")
    timing, waited = clock.timing, clock.timing.rest
    timing.drafter, timing.rest = drafted.seconds, max(0.0, waited - drafted.seconds)
    timing.overlap = max(0.0, drafted.seconds - waited)
    return drafted, reading


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that drafters use on a device; one for all, because memory is cached by stream."""
    return torch.cuda.Stream(device)


def _device(parts: Parts) -> torch.device:
    """Where drafts are drawn: where the draft model is, if there is one."""
    return parts.drafter.lm.device if isinstance(parts.drafter, ModelDrafter) else parts.target.device


def _dice(states: Sequence[Running]) -> PhiloxDice:
    return PhiloxDice(seeds=[s.request.sampling.seed or 0 for s in states], steps=[s.num_steps for s in states])


def _room(parts: Parts, shadow: Running) -> int:
    """Longest draft that fits behind what is committed or ahead. No bonus follows it, so it may reach the very end; one
    last token is not worth drafting, because a plain step brings it.
    """
    room = tokens_left(parts, shadow)
    if parts.drafter.max_context is not None:
        room = min(room, parts.drafter.max_context - len(shadow.tokens) - 1)
    return room if room > 1 else 0


def _packed(anchors: Sequence[int], blocks: Sequence[Ahead], device: torch.device) -> Draft:
    """Chains of given tokens behind given anchors."""
    chains = [[anchor, *block.tokens] for anchor, block in zip(anchors, blocks, strict=True)]
    sizes = np.array([len(chain) for chain in chains])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    depths = np.concatenate([np.arange(size) for size in sizes.tolist()])
    inner = np.ones(len(depths), dtype=bool)
    inner[offsets[1:] - 1] = False
    drawn = [block.rows.to(device) for block in blocks if block.rows is not None]
    return Draft(
        tokens=torch.tensor([token for chain in chains for token in chain]).to(device, non_blocking=True),
        parents=np.where(depths > 0, np.arange(len(depths)) - 1, -1),
        depths=depths,
        numbers=depths,
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(inner)]),
        links=np.flatnonzero(inner) + 1,
        rows=None if not drawn else drawn[0] if len(drawn) == 1 else torch.cat(drawn),
        row_of=np.where(inner, np.cumsum(inner) - 1, -1) if drawn else np.full(len(depths), -1),
        structure="chain",
    )


def _with_leaves(judged: Draft, rows: Float[Tensor, "read vocab"]) -> Float[Tensor, "nodes vocab"]:
    """The target's rows with a stand-in at the last token of each chain, where nobody asked the target.

    All the mass lies on one token, so that a bonus token costs no draw; it is not used.
    """
    read = np.ones(len(judged.depths), dtype=bool)
    read[judged.offsets[1:] - 1] = np.diff(judged.offsets) == 1
    if read.all():
        return rows
    everything = rows.new_zeros(len(read), rows.shape[1])
    everything[:, 0] = 1
    return everything.index_copy_(0, torch.from_numpy(np.flatnonzero(read)).to(rows.device), rows)


def _outcome(
    parts: Parts,
    state: Running,
    new: Ahead,
    accepted: int,
    following: int,
    keep: Callable[[Running, list[int]], int] | None,
) -> _Outcome:
    """What the verdict leaves of the tokens ahead, or of the first of the new ones, and of the others."""
    judged, behind = (state.ahead, new) if state.ahead.tokens else (new.part(slice(1)), new.part(slice(1, None)))
    drafted = judged.tokens
    whole = 0 < len(drafted) == accepted
    tokens = cut(parts, state, [*drafted[:accepted], *(() if whole else (following,))], keep)
    survives = whole and len(tokens) == accepted
    return _Outcome(
        tokens=tokens,
        settled=len(drafted) + (0 if survives else len(behind.tokens)),
        survives=survives,
        ahead=behind if survives else Ahead(),
    )


def _commit(
    parts: Parts,
    states: Sequence[Running],
    shadows: Sequence[Running],
    new: Sequence[Ahead],
    outcomes: Sequence[_Outcome],
) -> None:
    """Bring both caches and the states to where the outcomes are."""
    parts.target.commit({s.slot: range(len(o.tokens)) for s, o in zip(states, outcomes, strict=True)})
    paths = [range(1, len(n.tokens) + 1) if o.survives else range(0) for n, o in zip(new, outcomes, strict=True)]
    parts.drafter.commit(shadows, paths)
    for state, outcome in zip(states, outcomes, strict=True):
        if state.ahead.tokens and not outcome.survives:
            # The drafter has taken what lay ahead for committed.
            reached = len(state.tokens) + len(outcome.tokens) - 1
            state.drafter_state = parts.drafter.reuse(state.drafter_state, state.request, reached)
        state.tokens.extend(outcome.tokens)
        if state.request.constraint is not None:
            state.request.constraint.commit(state.constraint_state, outcome.tokens)
        state.ahead = outcome.ahead
        state.num_steps += 1
    known = [s.tokens[-len(o.tokens) - 1 : -1] for s, o in zip(states, outcomes, strict=True)]
    parts.drafter.observe(states, known, [{} for _ in states])


def _log_probabilities(
    state: Running, reading: _Reading, request: int, tokens: Sequence[int]
) -> tuple[float, ...] | None:
    """Log-softmax of the raw logits at every emitted token, if the request asked."""
    if not state.request.logprobs:
        return None
    logits = _logits(reading, request, tokens)
    return tuple(log_probs(logits, torch.tensor(tokens).to(logits.device)).tolist())


def _logits(reading: _Reading, request: int, tokens: Sequence[int]) -> Float[Tensor, "n vocab"]:
    """Raw logits that the emitted tokens of a request were drawn from."""
    first = reading.offsets[request]
    return reading.logits[first : first + len(tokens)]
