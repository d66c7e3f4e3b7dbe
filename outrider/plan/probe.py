"""Times steps of an engine's parts, by requests, draft length, context and temperature: the median of repeats."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.core.types import Request, Running, Sampling
from outrider.decoding.progress import begin, end, prefill, tokens_left
from outrider.decoding.protocol import Parts
from outrider.host.cores import Usage, crowded, shares
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength

CONTEXT, FAR = 64, 512
"""Tokens before the steps of most rows, and before those that tell what a longer context costs."""
PERIOD = 16
"""The text repeats itself after so many tokens, so that drafters that look tokens up always propose some."""
LENGTHS, ALL_LENGTHS = (0, 4, 8, 1, 2), (0, 4, 8, 1, 2, 3, 5, 6, 7)
"""Draft lengths of a short and of a thorough probe, the most important first."""
SAMPLED = (0, 8, 2)
"""Draft lengths of sampled steps in a short probe. Their forwards are those of greedy steps."""
WARM_UP, REPEATS, MANY_REPEATS = 2, 7, 24
"""Steps of each kind that are not timed, because they may compile or allocate; and the most that are timed, in
a short and in a thorough probe."""
SHORT, THOROUGH = 1.5, 20.0
"""Seconds of a probe, about. A slow model gets fewer kinds of steps, and at least three repeats."""
UNSTEADY = 1.5
"""How many times its fastest repeat the median repeat of most kinds takes on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of step: the fields are those of `StepCost`."""

    requests: int
    length: int
    sampled: bool = False


@dataclass(frozen=True, kw_only=True)
class GivenLength(FixedLength):
    """Drafts of a given length, which may be 0."""

    def __post_init__(self) -> None:
        return


class Bench:
    """Requests that make steps of any kind. Every step emits one token of a periodic text, whatever was accepted.

    So a drafter that looks tokens up always finds some. Requests begin when they are needed first, and begin anew when
    their contexts have doubled.

    Args:
        parts: What makes the steps.
        context: Tokens of each request at first.

    Attributes:
        states: The requests.
        text: The period of their text.
    """

    def __init__(self, parts: Parts, context: int) -> None:
        self._parts = replace(parts, experience=Experience())
        self._context = context
        self.text = [(place * 7919 + 11) % parts.target.vocab_size for place in range(PERIOD)]
        self.states: list[Running] = []

    def step(self, kind: Kind) -> StepCost | None:
        """Make a step; None if there is no room for it, or if it drafted less than it should."""
        if self.states and len(self.states[0].tokens) >= 2 * self._context:
            self.close()
        while len(self.states) < kind.requests:
            self._begin()
        states = self.states[: kind.requests]
        parts = replace(self._parts, length=GivenLength(num_speculative_tokens=kind.length))
        if any(tokens_left(parts, state) - 1 < kind.length for state in states):
            return None
        for i, state in enumerate(states):
            settings = Sampling(temperature=1.0 if kind.sampled else 0.0, seed=i)
            state.request = replace(state.request, sampling=settings)
        made = parts.decoding.step(parts, states, keep=lambda state, tokens: 1)
        for state in states:
            # The newest token has not been read by any model.
            state.tokens[-1] = self.text[(len(state.tokens) - 1) % PERIOD]
        if any(step.num_draft_tokens != kind.length for step in made):
            return None
        timing = made[0].timing
        return StepCost(
            requests=kind.requests,
            length=kind.length,
            context=self._context,
            sampled=kind.sampled,
            target=timing.target,
            drafter=timing.drafter,
            rest=timing.total - timing.target - timing.drafter,
        )

    def close(self) -> None:
        """Release the slots."""
        while self.states:
            end(self._parts, self.states.pop())

    def _begin(self) -> None:
        """Begin one more request."""
        number = len(self.states)
        prompt = tuple(self.text[place % PERIOD] for place in range(self._context))
        asked = Request(id=f"probe {number}", prompt=prompt, max_new_tokens=1 << 30, sampling=Sampling(seed=number))
        self.states.append(begin(self._parts, asked))
        prefill(self._parts, self.states[-1])
        # A drafter that reads hidden states drafts from a request's second step on.
        self.states[-1].num_steps = 1


def measure(
    parts: Parts, *, max_requests: int, thorough: bool = False, seconds: float | None = None
) -> CostTable | None:
    """The costs of steps of these parts; None if the drafter proposed nothing, or if there is no room for drafts.

    Kinds of steps take turns, forth and back, so that a machine that slows down affects all alike. The median repeat
    counts: the fastest one flatters steps of many parts, which are all fast at once only by luck, and drafting makes
    many parts. Nothing else may run, and all slots must be free.

    Args:
        max_requests: Most requests of a step.
        thorough: Measure all lengths at both temperatures, which takes longer.
        seconds: About how long it may take; by default `SHORT` or `THOROUGH`.
    """
    seconds = seconds or (THOROUGH if thorough else SHORT)
    deepest = parts.drafter.max_depth
    longest = min(max(ALL_LENGTHS) if deepest is None else deepest, parts.target.max_context // 4)
    batches = sorted({b for b in (1, 2, 4, 8, 16, 32, 64) if b < max_requests} | {max_requests})
    before, context = Usage.now(), min(CONTEXT, parts.target.max_context // 4)
    if min(context, longest) < 1:
        return None
    bench = Bench(parts, context)
    try:
        repeats = _repeated(bench, _kinds(batches, longest, thorough), seconds, MANY_REPEATS if thorough else REPEATS)
    finally:
        bench.close()
    found = {kind: _middle(rows) for kind, rows in repeats.items()}
    reach = max((kind.length for kind in found if kind.requests == 1), default=0)
    if Kind(requests=1, length=0) not in found or reach == 0:
        return None
    ends = [Kind(requests=1, length=0), Kind(requests=1, length=reach)]
    rows = list(found.values())
    # For each request, a longer context may cost less in a step of many.
    farther = [[replace(end, requests=b) for end in ends] for b in dict.fromkeys((1, batches[-1]))]
    for kinds in farther if thorough else farther[:1]:
        reading = kinds[0].requests * found[ends[0]].target * FAR / 8
        if any(kind not in found for kind in kinds) or parts.target.max_context < 2 * FAR or reading > seconds / 4:
            continue
        bench = Bench(parts, FAR)
        try:
            far = _repeated(bench, kinds, seconds / 4, REPEATS)
        finally:
            bench.close()
        rows += [_middle(each) for each in far.values()]
    unsteady = [found[kind].seconds / min(row.seconds for row in each) for kind, each in repeats.items()]
    busy = crowded(shares(before, Usage.now()), torch.get_num_threads()) or statistics.median(unsteady) > UNSTEADY
    catch_up = _catch_up(parts, found[ends[0]], found[ends[1]])
    return CostTable(rows=tuple(rows), catch_up=catch_up, busy=busy, measured=time.time())


def _kinds(batches: Sequence[int], longest: int, thorough: bool) -> list[Kind]:
    """The kinds of steps, the most important first: a slow model has time for the first ones alone."""
    lengths = list(dict.fromkeys(min(n, longest) for n in (ALL_LENGTHS if thorough else LENGTHS)))
    sampled = lengths if thorough else list(dict.fromkeys(min(n, longest) for n in SAMPLED))
    found = []
    for b in batches:
        found += [Kind(requests=b, length=n) for n in lengths]
        if thorough or b in (batches[0], batches[-1]):
            found += [Kind(requests=b, length=n, sampled=True) for n in sampled]
    return found


def _repeated(bench: Bench, kinds: Sequence[Kind], seconds: float, most: int) -> dict[Kind, list[StepCost]]:
    """The repeats of each kind of step, at most so many, as far as there is time."""
    began, spent = time.perf_counter(), 0.0
    todo: list[Kind] = []
    for kind in kinds:
        # A plain step and a draft are always measured.
        if len(todo) > 1 and (spent > seconds or time.perf_counter() - began > seconds):
            break
        warm = [bench.step(kind) for _ in range(WARM_UP)]
        if (last := warm[-1]) is not None:
            spent += 3 * last.seconds
            todo.append(kind)
    found: dict[Kind, list[StepCost]] = {kind: [] for kind in todo}
    for number in range(most):
        if number >= 3 and time.perf_counter() - began > seconds:
            break
        for kind in todo if number % 2 else todo[::-1]:
            if (row := bench.step(kind)) is not None:
                found[kind].append(row)
    return {kind: rows for kind, rows in found.items() if rows}


def _middle(rows: Sequence[StepCost]) -> StepCost:
    """The repeat of median seconds."""
    return sorted(rows, key=lambda row: row.seconds)[(len(rows) - 1) // 2]


def _catch_up(parts: Parts, plain: StepCost, drafted: StepCost) -> float:
    """Seconds per token that a drafter reads late: one of its forwards grows with its tokens as the target's does."""
    if not parts.drafter.waits:
        return 0.0
    per_token = max(0.0, drafted.target - plain.target) / drafted.length / plain.target
    return per_token * drafted.drafter / drafted.length
