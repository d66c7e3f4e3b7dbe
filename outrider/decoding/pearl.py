"""PEARL: draft and verify at once (Liu et al. 2024).

Between two steps of a request, tokens may lie *ahead* of its anchor: drafted, but not verified (`Running.ahead`). If
none lie ahead, the step is a *pre-verify*: the target runs on the anchor while the drafter drafts, and then the first
draft token is verified. If some lie ahead, the step is a *post-verify*: the target runs on them while the drafter
drafts behind them, as if all were accepted. If all are accepted, they are emitted without a bonus token, and the new
draft tokens lie ahead. If one is rejected, everything behind it is thrown away.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.constraints.masks import follow
from outrider.core.constraint import Constraint
from outrider.core.dice import Dice
from outrider.core.sampling import without_law
from outrider.core.texts import text_of
from outrider.core.types import Ahead, Draft, InputError, Request, Running, Sampling, Step, Timing
from outrider.decoding import drafting
from outrider.decoding.both import at_once, in_turn
from outrider.decoding.clock import StepClock, clock_on
from outrider.decoding.progress import begin, cut, end, prefill, tokens_left
from outrider.decoding.protocol import Cycle, Keep, Parts, Watch
from outrider.decoding.reading import LogProbs, TargetReading, masks_of, no_distribution
from outrider.decoding.step import advance, step_dice
from outrider.drafters.protocol import Observed
from outrider.lengths.fixed import FixedLength
from outrider.trees.shape import chain_shape

LONGEST = 16
"""Longest draft that the measurement can choose."""


@dataclass(frozen=True, kw_only=True)
class PearlDecoding:
    """Draft and verify at once. With one device for each, a step takes as long as the slower of the two.

    The two threads share nothing that changes: only the drafter's thread uses drafter states, each thread has its own
    dice, and both caches are rolled back after both have ended. All draws are keyed by request, step, purpose and node,
    so both clocks give the same tokens.

    Attributes:
        num_speculative_tokens: Tokens drafted per step, at least two. None takes the named length policy; without one
            it measures, when the engine is built, how many tokens the drafter drafts during one target forward. Name a
            number if outputs must be the same on every machine.
        clock: `real` runs the drafter in its own thread, and on a GPU in its own stream. `simulated` runs drafter and
            target in turn and reports the time that two devices would have needed: `Timing.overlap` is the shorter of
            the two times.

    References:
        Liu et al. 2024, PEARL, algorithm 2. https://arxiv.org/abs/2408.11850
    """

    drafts_ahead: ClassVar[bool] = True

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
        *,
        dice: Dice | None = None,
        keep: Keep | None = None,
        watch: Watch | None = None,
    ) -> list[Step]:
        """One pre-verify or post-verify of every request, as `Decoding.step` says.

        All prompts must be prefilled. One dice can serve both threads, because the target's thread draws nothing while
        the drafter's thread drafts.
        """
        clock = clock_on(parts.target.device, self._now)
        drafters, verifiers = (dice or step_dice(states) for _ in range(2))
        follow(states)
        shadows = [_shadow(state) for state in states]
        draft = functools.partial(_draft, parts, shadows, drafters)
        blocks = [Ahead(tokens=state.ahead.tokens[:-1]) for state in states]
        chains = _packed([state.tokens[-1] for state in states], blocks, parts.target.device)
        # What the target may say is looked up beforehand, so that the drafter's side alone asks constraints meanwhile.
        masks = masks_of(chains, states, parts.target.vocab_size)
        read = functools.partial(_read, parts, states, chains, masks, clock)
        if self.clock == "real":
            new, side = at_once(self._worker, draft, read, clock, _device(parts))
        else:
            new, side = in_turn(draft, read, clock)
        blocks = [s.ahead if s.ahead.tokens else n.part(slice(1)) for s, n in zip(states, new, strict=True)]
        judged = _packed([s.tokens[-1] for s in states], blocks, parts.target.device)
        rows = _with_leaves(judged, side.rows)
        verdict = parts.verifier.verify(judged, rows, verifiers)
        _check(judged, rows, states)
        counts, following = verdict.num_accepted.tolist(), verdict.next_tokens.tolist()
        clock.lap("verify")
        if watch is not None:
            logits = _with_leaves(judged, side.reading.extension.logits)
            watch(Cycle(states=states, draft=judged, rows=rows, logits=logits, verdict=verdict))
        outcomes = [_outcome(parts, state, new[i], counts[i], following[i], keep) for i, state in enumerate(states)]
        emitted = [outcome.tokens for outcome in outcomes]
        logprobs = side.reading.log_probs(states, [range(1, len(tokens)) for tokens in emitted], emitted)
        steps = [
            _step_of(s, side.reading, i, outcomes[i], counts[i], logprobs[i], clock, len(states))
            for i, s in enumerate(states)
        ]
        parts.target.commit({s.slot: range(len(o.tokens)) for s, o in zip(states, outcomes, strict=True)})
        clock.lap("commit")
        _update_states(parts, states, shadows, new, outcomes, steps)
        clock.lap("drafter")
        return steps

    def settled(self, parts: Parts, named: bool) -> Parts:
        """The parts with the draft length that was given or measured. A length policy that the user named stays."""
        if named:
            if self.num_speculative_tokens is not None:
                raise InputError(
                    "both length and pearl's num_speculative_tokens say how long to draft; give one of them"
                )
            return parts
        length = self.num_speculative_tokens or balanced_length(parts)
        return replace(parts, length=FixedLength(num_speculative_tokens=length))


def balanced_length(parts: Parts, rounds: int = 5, now: Callable[[], float] = time.perf_counter) -> int:
    r"""How many tokens the drafter drafts in the time of one target forward, $\lceil t_p / t_q \rceil$, from 2 to 16.

    Takes the medians of a few steps on an arbitrary prompt, after one warm-up step.

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
    state = begin(parts, request)
    timings: list[Timing] = []
    try:
        prefill(parts, state)
        while len(timings) <= rounds and tokens_left(parts, state) > 2 * length:
            timings += [step.timing for step in parts.decoding.step(parts, [state])]
    finally:
        end(parts, state)
    if not timings:
        raise InputError("the context is too short to measure pearl's draft length; give num_speculative_tokens")
    target, drafter = (
        statistics.median(getattr(t, part) for t in timings[1:] or timings) for part in ("target", "drafter")
    )
    return min(max(2, math.ceil(target * length / max(drafter, 1e-9))), LONGEST)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """The result of a step for one request.

    Attributes:
        tokens: The emitted tokens.
        settled: Number of draft tokens that were verified or thrown away.
        survives: Whether all verified tokens were accepted and emitted, so that the tokens behind them stay valid.
        ahead: The tokens behind them, if they stay valid; otherwise empty.
    """

    tokens: list[int]
    settled: int
    survives: bool
    ahead: Ahead


@dataclass(frozen=True, kw_only=True)
class _Behind:
    """A constraint as seen behind tokens that lie ahead, which are not committed to it yet.

    Attributes:
        anchor: The newest committed token.
        ahead: The tokens ahead of it.
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
    """A copy of a request for the drafter, in which the tokens ahead are committed."""
    ahead, request = state.ahead.tokens, state.request
    if request.constraint is not None and ahead:
        behind = _Behind(constraint=request.constraint, anchor=state.tokens[-1], ahead=ahead)
        request = replace(request, constraint=behind)
    tokens = [*state.tokens, *ahead]
    text = None if state.text is None else text_of(state).followed_by(tokens)
    return replace(state, request=request, tokens=tokens, text=text)


@torch.inference_mode()
def _draft(parts: Parts, shadows: Sequence[Running], dice: Dice) -> list[Ahead]:
    """Draft behind everything that is committed or ahead."""
    draft = drafting.draft(parts, shadows, [_room(parts, shadow) for shadow in shadows], dice, _device(parts))
    tokens, new = draft.tokens.tolist(), []
    for first, last in zip(draft.offsets[:-1].tolist(), draft.offsets[1:].tolist(), strict=True):
        at, rows = draft.row_of[first : last - 1], None
        if draft.rows is not None and len(at) and (at >= 0).all():
            alone = len(at) == len(draft.rows)
            rows = draft.rows if alone else draft.rows[torch.from_numpy(at).to(draft.rows.device)]
        new.append(Ahead(tokens=tuple(tokens[first + 1 : last]), rows=rows, short_list=draft.short_list))
    return new


@dataclass(frozen=True, kw_only=True)
class _Side:
    """The target's results at the anchors and at the tokens ahead, except the last token ahead of each request."""

    reading: TargetReading
    rows: Float[Tensor, "read vocab"]


@torch.inference_mode()
def _read(
    parts: Parts, states: Sequence[Running], chains: Draft, masks: Int[Tensor, "read words"] | None, clock: StepClock
) -> _Side:
    """The target's rows after the anchors and the tokens ahead, except after the last one: its next token is drafted
    later.
    """
    reading = TargetReading.of(parts.target, chains, states)
    clock.lap("target")
    rows = reading.rows(states, masks)
    clock.lap("rows")
    return _Side(reading=reading, rows=rows)


def _device(parts: Parts) -> torch.device:
    """Where drafts are drawn: on the drafter's device if it has one, otherwise on the target's."""
    return parts.drafter.device or parts.target.device


def _room(parts: Parts, shadow: Running) -> int:
    """Longest draft that fits behind the committed tokens and those ahead. No bonus token follows, so it may reach the
    last token. A single last token is not drafted, because a plain step emits it.
    """
    room = drafting.room(parts, shadow, tokens_left(parts, shadow))
    return room if room > 1 else 0


def _packed(anchors: Sequence[int], blocks: Sequence[Ahead], device: torch.device) -> Draft:
    """Chains of given tokens behind given anchors."""
    chains = [[anchor, *block.tokens] for anchor, block in zip(anchors, blocks, strict=True)]
    shape = chain_shape(tuple(len(block.tokens) for block in blocks))
    drawn = _rows_of(blocks, device)
    owners = np.repeat(np.arange(len(blocks)), np.diff(shape.offsets))
    sampled = (shape.row_of >= 0) & np.array([block.rows is not None for block in blocks])[owners]
    return Draft(
        tokens=torch.tensor([token for chain in chains for token in chain]).to(device, non_blocking=True),
        parents=shape.parents,
        depths=shape.depths,
        numbers=shape.depths,
        offsets=shape.offsets,
        first_child=shape.first_child,
        links=shape.links,
        rows=drawn.rows,
        row_of=np.where(sampled, np.cumsum(sampled) - 1, -1),
        structure="chain",
        short_list=drawn.short_list,
    )


def _rows_of(blocks: Sequence[Ahead], device: torch.device) -> Ahead:
    """The rows of all blocks, over the short list that they share, or over the whole vocabulary."""
    with_rows = [(block.rows.to(device), block.short_list) for block in blocks if block.rows is not None]
    if not with_rows:
        return Ahead()
    few = with_rows[0][1]
    if all(other is few for _, other in with_rows):
        return Ahead(
            rows=with_rows[0][0] if len(with_rows) == 1 else torch.cat([rows for rows, _ in with_rows]), short_list=few
        )
    return Ahead(rows=torch.cat([rows if short is None else short.widened(rows) for rows, short in with_rows]))


def _with_leaves(judged: Draft, rows: Float[Tensor, "read vocab"]) -> Float[Tensor, "nodes vocab"]:
    """The target's rows, with a placeholder at the last token of each chain, which the target did not run on.

    The placeholder is one-hot, so that drawing the bonus token costs no random number. The bonus token is not used.
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
    keep: Keep | None,
) -> _Outcome:
    """The result of the verdict for one request."""
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


def _update_states(
    parts: Parts,
    states: Sequence[Running],
    shadows: Sequence[Running],
    new: Sequence[Ahead],
    outcomes: Sequence[_Outcome],
    steps: Sequence[Step],
) -> None:
    """Update the states of drafters and requests by the outcomes."""
    paths = [range(1, len(n.tokens) + 1) if o.survives else range(0) for n, o in zip(new, outcomes, strict=True)]
    drafting.commit(shadows, paths)
    known = [[state.tokens[-1], *outcome.tokens[:-1]] for state, outcome in zip(states, outcomes, strict=True)]
    for state, outcome, step in zip(states, outcomes, steps, strict=True):
        if state.ahead.tokens and not outcome.survives:
            # The drafter has taken what lay ahead for committed.
            reached, drafter = len(state.tokens) + len(outcome.tokens) - 1, drafting.drafter_of(state)
            state.drafter_state = drafter.reuse(state.drafter_state, state.request, reached)
        advance(parts, state, state, step)
        state.ahead = outcome.ahead
    observed = Observed(
        tokens=np.array([token for row in known for token in row], dtype=np.int64),
        offsets=np.cumsum([0, *map(len, known)]),
    )
    drafting.observe(parts, states, observed)


def _check(judged: Draft, rows: Float[Tensor, "nodes vocab"], states: Sequence[Running]) -> None:
    """Raise NoDistribution if a row of the target is no distribution."""
    lawless = without_law(rows).tolist()
    for i, state in enumerate(states):
        if any(lawless[judged.offsets[i] : judged.offsets[i + 1]]):
            raise no_distribution(state)


def _step_of(
    state: Running,
    reading: TargetReading,
    index: int,
    outcome: _Outcome,
    accepted: int,
    logprobs: LogProbs,
    clock: StepClock,
    num_requests: int,
) -> Step:
    """The `Step` of one request."""
    request = state.request
    return Step(
        request=request.id,
        num_draft_tokens=outcome.settled,
        num_accepted_tokens=accepted,
        tokens=tuple(outcome.tokens),
        timing=clock.timing,
        num_requests=num_requests,
        logprobs=logprobs.chosen,
        top_logprobs=logprobs.top,
        logits=reading.logits(index, range(1, len(outcome.tokens))) if request.keep_logits else None,
    )
