"""Times steps of an engine's parts, by requests, draft length, context, temperature, and how many of them draft: the
median of repeats.
"""

import math
import random
import statistics
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float, Int

from outrider.core.types import Request, Running, Sampling
from outrider.decoding.progress import begin, end, prefill, tokens_left
from outrider.decoding.protocol import Parts
from outrider.host.cores import CoreUsage, crowded, shares
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength
from outrider.trees.chain import ChainTree
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier

CONTEXT, FAR = 64, 512
"""Tokens before the steps of most rows, and before those that tell what a longer context costs."""
PERIOD = 16
"""The text repeats itself after so many tokens, so that drafters that look tokens up always propose some."""
LENGTHS, ALL_LENGTHS = (0, 4, 1, 8, 2, 16, 3), (0, 4, 8, 16, 1, 2, 3, 5, 6, 7, 12)
"""Draft lengths of a short and of a thorough probe, the most important first."""
BATCHES, ALL_BATCHES = (1, 4, 16, 64), (1, 2, 4, 8, 16, 32, 64)
"""Numbers of requests in a short and in a thorough probe, beside the largest one. With fewer kinds of steps there are
more repeats, and costs lie near lines between them."""
ALONE = (1, 4, 8, 16)
"""Draft lengths of steps in which one of several requests drafts."""
SAMPLED = (0, 8, 2)
"""Draft lengths of sampled steps in a short probe. Their forwards are those of greedy steps."""
WARM_UP, REPEATS, MANY_REPEATS = 1, 12, 48
"""Steps of each kind that are not timed, because they may compile or allocate; and the most that are timed, in a short
and in a thorough probe."""
SHORT, LONGER, THOROUGH = 1.5, 4.0, 20.0
"""Seconds of a short probe of a fast model and of a slow one, and of a thorough probe, about. A very slow model gets
fewer kinds of steps, and at least three repeats."""
PLAIN_STEPS = 64
"""As long as so many plain steps a short probe may take, up to `LONGER`."""
PLAIN_REPEATS = 3
"""Plain steps of a kind in a round: the costs of all drafts are compared with theirs."""
POLISH = 8
"""How often the costs of kinds and the slowness of rounds are told from each other."""
UNSTEADY = 1.5
"""How many times its fastest repeat the median repeat of most kinds takes on a busy machine."""


@dataclass(frozen=True, kw_only=True)
class DraftWay:
    """How drafts branch, and the rule that judges them."""

    tree: Tree
    verifier: Verifier


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """A kind of step: the fields are those of `StepCost`.

    Attributes:
        way: Tree and verifier; None: those of the parts.
    """

    requests: int
    length: int
    sampled: bool = False
    drafting: int | None = None
    way: DraftWay | None = None


@dataclass(frozen=True, kw_only=True)
class GivenLength(FixedLength):
    """Drafts of a given length, which may be 0."""

    def __post_init__(self) -> None:
        return


class StepProbe:
    """Requests that make steps of any kind, through the engine's own step.

    They begin with a periodic text. A request keeps what a step accepts, up to a number that changes from step to
    step. So a drafter catches up as after long and short acceptances. A drafter that looks tokens up would soon find
    none: its requests keep one token per step, which continues the periodic text. Requests begin when they are needed
    first. A request whose context has doubled goes back to its beginning.

    Args:
        parts: What makes the steps.
        context: Tokens of each request at first.

    Attributes:
        states: The requests.
        text: The period of their text.
    """

    def __init__(self, parts: Parts, context: int) -> None:
        # Of a drafter of several, the steps of the one that costs most.
        self._parts = replace(parts, drafter=parts.drafter.components[-1], experience=Experience())
        self._context = context
        self.text = [(place * 7919 + 11) % parts.target.vocab_size for place in range(PERIOD)]
        self.states: list[Running] = []
        self._num_steps = 0

    def step(self, kind: StepShape) -> StepCost | None:
        """Make a step; None if there is no room for it, or if it drafted less than it should."""
        while len(self.states) < kind.requests:
            self._begin()
        states = self.states[: kind.requests]
        for state in states:
            if len(state.tokens) >= 2 * self._context:
                self._go_back(state)
        parts = replace(self._parts, length=GivenLength(num_speculative_tokens=kind.length))
        if kind.way is not None:
            parts = replace(parts, tree=kind.way.tree, verifier=kind.way.verifier)
        if any(tokens_left(parts, state) - 1 < kind.length for state in states):
            return None
        drafting = kind.requests if kind.drafting is None else kind.drafting
        for i, state in enumerate(states):
            settings = Sampling(temperature=1.0 if kind.sampled else 0.0, seed=i)
            limit = None if i < drafting else 0
            state.request = replace(state.request, sampling=settings, max_draft_tokens=limit)
        looks_up, most = self._parts.drafter.rows == "point", kind.length + 1
        kept = {state.request.id: 1 if looks_up else 1 + (self._num_steps + i) % most for i, state in enumerate(states)}
        steps = parts.decoding.step(parts, states, keep=lambda state, tokens: kept[state.request.id])
        self._num_steps += 1
        for state in states if looks_up else ():
            # The newest token has not been read by any model.
            state.tokens[-1] = self.text[(len(state.tokens) - 1) % PERIOD]
        if any(step.num_draft_tokens < kind.length for step in steps[:drafting]):
            return None
        timing = steps[0].timing
        return StepCost(
            requests=kind.requests,
            length=kind.length,
            context=self._context,
            sampled=kind.sampled,
            drafting=kind.drafting,
            target=timing.target,
            drafter=timing.drafter,
            rest=timing.total - timing.target - timing.drafter,
        )

    def looking(self) -> float | None:
        """Seconds in which a drafter that looks tokens up finds the next draft of a request; None of other drafters."""
        drafter = self._parts.drafter
        if not drafter.looks_up:
            return None
        state, seconds = replace(self.states[0], tokens=list(self.states[0].tokens)), []
        state.drafter_state = drafter.open(state.request)
        for _ in range(WARM_UP + REPEATS):
            state.tokens.append(self.text[len(state.tokens) % PERIOD])
            began = time.perf_counter()
            drafter.look_up([state], [max(ALL_LENGTHS)])
            seconds.append(time.perf_counter() - began)
        drafter.close(state.drafter_state)
        return statistics.median(seconds[WARM_UP:])

    def close(self) -> None:
        """Release the slots."""
        while self.states:
            end(self._parts, self.states.pop())

    def _begin(self) -> None:
        """Begin one more request."""
        number = len(self.states)
        prompt = tuple(self.text[place % PERIOD] for place in range(self._context))
        request = Request(id=f"probe {number}", prompt=prompt, max_new_tokens=1 << 30, sampling=Sampling(seed=number))
        self.states.append(begin(self._parts, request))
        prefill(self._parts, self.states[-1])
        # A drafter that reads hidden states drafts from a request's second step on.
        self.states[-1].num_steps = 1

    def _go_back(self, state: Running) -> None:
        """Let a request be where it began. What its prompt left in the caches is used again."""
        target, drafter, num_read = self._parts.target, self._parts.drafter, self._context - 1
        target.truncate(state.slot, min(num_read, drafter.needs(state.drafter_state, num_read)))
        state.drafter_state = drafter.reuse(state.drafter_state, state.request, num_read)
        del state.tokens[self._context :]
        state.carried = None
        prefill(self._parts, state)


@dataclass(frozen=True, kw_only=True)
class Timed:
    """One step that was timed.

    Attributes:
        kind: What it was.
        round: In which round it was made.
        cost: What it took.
    """

    kind: StepShape
    round: int
    cost: StepCost


@dataclass(frozen=True, kw_only=True)
class Rounds:
    r"""Rounds of steps, each with steps of every kind of one number of requests.

    A machine is faster in some seconds than in others, for all kinds alike. So the logarithm of a step of kind k in
    round r is taken to be $c_k + s_r$ and an error: what the kind costs, and how slow the machine was. Both are found
    by medians in turns (Tukey's median polish), which single disturbed steps do not move.

    Attributes:
        steps: All steps. A kind may be missing in some rounds.
        slowness: $s_r$, of which the median is 0.
        errors: The error of each step.
    """

    steps: Sequence[Timed]
    slowness: Float[np.ndarray, " rounds"]
    errors: Float[np.ndarray, " steps"]

    @classmethod
    def of(cls, steps: Sequence[Timed]) -> "Rounds":
        """Tell the costs of kinds from the slowness of rounds."""
        logs = np.log([max(step.cost.seconds, 1e-9) for step in steps])
        kinds = _numbered([step.kind for step in steps])
        rounds = _numbered([step.round for step in steps])
        slowness, costs = np.zeros(rounds.max(initial=0) + 1), np.zeros(kinds.max(initial=0) + 1)
        for _ in range(POLISH if steps else 0):
            costs = _medians(logs - slowness[rounds], kinds)
            slowness = _medians(logs - costs[kinds], rounds)
            slowness -= np.median(slowness)
        return cls(steps=steps, slowness=slowness[rounds], errors=logs - slowness[rounds] - costs[kinds])

    @property
    def unsteady(self) -> float:
        """Standard deviation of the slowness."""
        return float(self.slowness.std()) if len(self.steps) else 0.0

    @property
    def unevenness(self) -> float:
        """How many times its fastest repeat the median repeat of most kinds takes."""
        seconds: dict[StepShape, list[float]] = {}
        for step in self.steps:
            seconds.setdefault(step.kind, []).append(step.cost.seconds)
        return statistics.median(statistics.median(each) / min(each) for each in seconds.values()) if seconds else 1.0

    def costs(self) -> dict[StepShape, StepCost]:
        """What each kind costs when the machine is as slow as in its median round: the median repeat."""
        by_kind: dict[StepShape, list[StepCost]] = {}
        for step, slowness in zip(self.steps, self.slowness.tolist(), strict=True):
            by_kind.setdefault(step.kind, []).append(step.cost.times(math.exp(-slowness)))
        return {kind: sorted(rows, key=lambda row: row.seconds)[(len(rows) - 1) // 2] for kind, rows in by_kind.items()}

    def doubt(self) -> float:
        r"""Relative standard error of what a draft costs over a plain step, for most kinds.

        The standard error of a median is $\sqrt{\pi/2}\,\sigma/\sqrt n$, and $\sigma$ is $\sqrt{\pi/2}$ times the
        mean absolute error.
        """
        errors: dict[StepShape, list[float]] = {}
        for step, error in zip(self.steps, self.errors.tolist(), strict=True):
            errors.setdefault(step.kind, []).append(abs(error))
        each = {
            kind: math.pi / 2 * statistics.mean(kind_errors) / math.sqrt(max(1, len(kind_errors) - 1))
            for kind, kind_errors in errors.items()
        }
        plain = {(kind.requests, kind.sampled): error for kind, error in each.items() if kind.length == 0}
        pairs = [
            math.hypot(error, plain[kind.requests, kind.sampled])
            for kind, error in each.items()
            if kind.length and (kind.requests, kind.sampled) in plain
        ]
        return statistics.median(pairs) if pairs else 0.0


def _numbered(values: Sequence[Hashable]) -> Int[np.ndarray, " n"]:
    """The same number for equal values, from 0 on."""
    numbers = {value: i for i, value in enumerate(dict.fromkeys(values))}
    return np.array([numbers[value] for value in values], dtype=np.int64)


def _medians(values: Float[np.ndarray, " n"], groups: Int[np.ndarray, " n"]) -> Float[np.ndarray, " groups"]:
    """The median of the values of each group."""
    return np.array([np.median(values[groups == group]) for group in range(groups.max() + 1)])


def measure(
    parts: Parts, *, max_requests: int, thorough: bool = False, seconds: float | None = None
) -> CostTable | None:
    """The costs of steps of these parts; None if the drafter proposed nothing, or if there is no room for drafts.

    Each round makes steps of every kind of one number of requests, in random order. How slow the machine was in a
    round is told from what each kind costs, see `Rounds`. Nothing else may run, and all slots must be free.

    Args:
        max_requests: Most requests of a step.
        thorough: Measure all lengths at both temperatures, which takes longer.
        seconds: About how long it may take; by default as long as `SHORT` and `THOROUGH` say.
    """
    deepest = parts.drafter.components[-1].max_depth
    longest = min(max(ALL_LENGTHS) if deepest is None else deepest, parts.target.max_context // 4)
    batches = sorted({b for b in (ALL_BATCHES if thorough else BATCHES) if b < max_requests} | {max_requests})
    before, context = CoreUsage.now(), min(CONTEXT, parts.target.max_context // 4)
    if min(context, longest) < 1:
        return None
    # What trees cost is told by chains.
    parts = replace(parts, tree=ChainTree())
    bench = StepProbe(parts, context)
    try:
        seconds = seconds or (THOROUGH if thorough else _short(bench))
        rounds = repeated(bench, _kinds(batches, longest, thorough), seconds, MANY_REPEATS if thorough else REPEATS)
        looking = bench.looking() if bench.states else None
    finally:
        bench.close()
    costs = rounds.costs()
    reach = max((kind.length for kind in costs if kind.requests == 1), default=0)
    if StepShape(requests=1, length=0) not in costs or reach == 0:
        return None
    ends = [StepShape(requests=1, length=0), StepShape(requests=1, length=reach)]
    rows = list(costs.values())
    # For each request, a longer context may cost less in a step of many.
    farther = [[replace(end, requests=b) for end in ends] for b in dict.fromkeys((1, batches[-1]))]
    for kinds in farther if thorough else farther[:1]:
        reading = kinds[0].requests * costs[ends[0]].target * FAR / 8
        if any(kind not in costs for kind in kinds) or parts.target.max_context < 2 * FAR or reading > seconds / 4:
            continue
        bench = StepProbe(parts, FAR)
        try:
            far = repeated(bench, kinds, seconds / 4, REPEATS)
        finally:
            bench.close()
        rows += far.costs().values()
    busy = crowded(shares(before, CoreUsage.now()), torch.get_num_threads()) or rounds.unevenness > UNSTEADY
    return CostTable(
        rows=tuple(rows),
        catch_up=_catch_up(parts, costs[ends[0]], costs[ends[1]]),
        looking=looking,
        doubt=rounds.doubt(),
        unsteady=rounds.unsteady,
        busy=busy,
        measured=time.time(),
    )


def _short(bench: StepProbe) -> float:
    """Seconds of a short probe."""
    plain = [bench.step(StepShape(requests=1, length=0)) for _ in range(WARM_UP + 1)][-1]
    return SHORT if plain is None else min(max(SHORT, PLAIN_STEPS * plain.seconds), LONGER)


def _kinds(batches: Sequence[int], longest: int, thorough: bool) -> list[StepShape]:
    """The kinds of steps, the most important first: a slow model has time for the first ones alone."""
    lengths = list(dict.fromkeys(min(n, longest) for n in (ALL_LENGTHS if thorough else LENGTHS)))
    sampled = lengths if thorough else list(dict.fromkeys(min(n, longest) for n in SAMPLED))
    kinds = []
    for b in batches:
        kinds += [StepShape(requests=b, length=n) for n in lengths]
        if thorough or b in (batches[0], batches[-1]):
            kinds += [StepShape(requests=b, length=n, sampled=True) for n in sampled]
        if b > 1:
            kinds += [StepShape(requests=b, length=n, drafting=1) for n in lengths if n in ALONE]
    return kinds


def repeated(bench: StepProbe, kinds: Sequence[StepShape], seconds: float, most: int) -> Rounds:
    """Rounds of steps of these kinds, at most so many, as far as there is time. At least three are made.

    A round holds the kinds of one number of requests, because their costs are compared with each other: a short round
    ends before the machine changes its speed. All numbers of requests get the same time, so few requests get more
    rounds. Where time is short, the first two kinds are measured, and of the others as many as there is time for.
    """
    began, spent = time.perf_counter(), 0.0
    todo: list[StepShape] = []
    for kind in kinds:
        # A plain step and a draft are always measured.
        if len(todo) > 1 and (spent > seconds or time.perf_counter() - began > seconds):
            break
        warm = [bench.step(kind) for _ in range(WARM_UP)]
        if (last := warm[-1]) is not None:
            spent += 3 * last.seconds
            todo.append(kind)
    order, timed, number = random.Random(0), list[Timed](), 0
    turns: dict[int, list[StepShape]] = {}
    for kind in todo:
        turns.setdefault(kind.requests, []).extend([kind] * (1 if kind.length else PLAIN_REPEATS))
    made, took = dict.fromkeys(turns, 0), dict.fromkeys(turns, 0.0)
    while True:
        late = time.perf_counter() - began > seconds
        left = [b for b in turns if made[b] < (3 if late else most)]
        if not left:
            break
        b, start = min(left, key=lambda b: (took[b], b)), time.perf_counter()
        for kind in order.sample(turns[b], len(turns[b])):
            if (cost := bench.step(kind)) is not None:
                timed.append(Timed(kind=kind, round=number, cost=cost))
        took[b], made[b], number = took[b] + time.perf_counter() - start, made[b] + 1, number + 1
    return Rounds.of(timed)


def _catch_up(parts: Parts, plain: StepCost, drafted: StepCost) -> float:
    """Seconds per token that a drafter reads late: one of its forwards grows with its tokens as the target's does."""
    if not parts.drafter.components[-1].waits:
        return 0.0
    per_token = max(0.0, drafted.target - plain.target) / drafted.length / plain.target
    return per_token * drafted.drafter / drafted.length
