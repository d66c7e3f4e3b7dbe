"""Goodput: the draft lengths with the most tokens per second, by measured costs; none where drafts lose time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from outrider.core.types import InputError, Running, Step
from outrider.lengths.acceptance import VARIANCE, OwnAcceptance, rates_by_others, tokens_by_length
from outrider.lengths.costs import CostTable, Steps
from outrider.lengths.experience import Choice, Experience, Habit
from outrider.trees.protocol import Level

LIKELY, UNLIKELY, HOPELESS = -0.253, -0.842, -2.0
"""The gain of drafts, in standard deviations: it is positive with a probability of 0.4, 0.2 and 0.02."""
DOUBTS = 6
"""Doubtful steps in a row after which drafting stops."""
GRACE = 0.4
"""A request with a seed that has drafted goes on where it would gain if its acceptance were better than it seems, by so
many standard deviations: the gain is positive with a probability of a third.
"""
HOLD, BETTER = 8, 1.01
"""For how many steps a choice to draft holds for the same requests, and how much faster another length must be."""
NEWCOMERS = 0.25
"""Largest share of new requests to which a choice to draft nothing extends."""
MARGIN, CERTAIN, NEAR = 0.07, 1.645, 0.99
"""How much faster than a plain step drafts must seem at least, because costs are off by a few percent; at least so many
standard errors of the costs, which holds with a probability of 95 %; and the share of the best rate at which a shorter
draft is as good."""
KEEP = 0.4
"""The share of that margin by which drafts that are being made must seem faster, so that they do not begin and end all
the time."""
AHEAD = 0.5
"""As how much of what a request may still emit its output is taken to go on."""
ALLOWANCE, LEAST_REST = 0.005, 16
"""Share of the time that drafts may cost while steps are plain, and fewest plain steps between two of them: so long
does a choice to draft nothing hold.
"""


@dataclass(frozen=True, kw_only=True)
class GoodputLength:
    r"""Draft the length $\gamma \ge 0$ with the most tokens per second, $\sum_r E_r(\gamma) / T(b, m, \gamma, L)$.

    T is what a step of b requests costs by the engine's `CostTable`, if m of them draft. $E_r$ is the expected number
    of tokens of request r, from its own acceptance so far and from that of all requests. A drafter that looks tokens up
    may find no draft. How often it finds one is learnt too: it counts in $E_r$, and in T, because a step in which no
    request has a draft is a plain one. For each length, the requests that gain most by it draft, as long as that raises
    the rate. So a request whose drafts fail stops while others go on. Its evidence fades, so that it tries again after
    some hundred steps. A step in which nobody drafts is one of plain decoding: the drafter is not called, and a draft
    model does not read along.

    The choice reads no clock. A gain is one of more than seven percent, and of more than 1.645 standard errors of the
    table's costs; once requests draft, 0.4 times as much is enough to go on. What a drafter must read before a
    request's first draft is part of the costs. Drafts begin when they are likely to gain (a probability above 0.4).
    They stop when that is unlikely (below 0.2 six times in a row). Meanwhile a draft of one token now and then, for
    half a percent of the time, tells whether acceptance has changed. Lengths are chosen before drafting, from earlier
    steps. So the law is kept.

    A request that comes with a seed and a temperature above 0 repeats its text. Its length depends on the kept costs,
    the number of requests in the step, a fixed prior, its own acceptance, and that of the step's other requests with a
    seed. It begins where drafts are expected to gain, and stops where the probability of a gain is below a third,
    because a few bad drafts say little. If the costs are not kept, it drafts `fallback` tokens.

    Attributes:
        most: Longest draft.
        fallback: Draft length where costs are not known.

    References:
        Liu et al. 2024, SmartSpec: optimizing speculative decoding for serving by goodput.
        https://arxiv.org/abs/2406.14066
    """

    constant: ClassVar[bool] = False
    known_ahead: ClassVar[bool] = True
    lossy = None

    most: int = 8
    fallback: int = 5

    def __post_init__(self) -> None:
        if self.most < 1 or self.fallback < 0:
            raise InputError(f"most must be >= 1 and fallback >= 0, got {self.most} and {self.fallback}")

    def open(self) -> OwnAcceptance:
        return OwnAcceptance()

    def limit(self, state: object) -> int:
        return max(self.most, self.fallback)

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> OwnAcceptance:
        return _own(state).after(step.num_draft_tokens, step.num_accepted_tokens, asked=step.room > 0)

    def choose(self, experience: Experience, states: Sequence[Running], rooms: Sequence[int]) -> Choice:
        costs, habit = experience.costs, experience.habit
        if costs is None:
            return Choice(lengths=[min(room, self.fallback) for room in rooms], habit=habit)
        context = sum([len(state.tokens) for state in states]) // len(states)
        ids, limit = [state.request.id for state in states], self.limit(None)
        rooms = [min(room, limit) for room in rooms]
        if _holds(habit, states, ids, rooms):
            older = replace(habit, age=habit.age + 1, rested=habit.rested + 1 if habit.resting else 0)
            return Choice(lengths=habit.lengths, habit=older, context=context)
        draws = any(state.request.sampling.temperature > 0 for state in states)
        steps = costs.steps(len(states), sampled=draws, context=context, longest=self.most)
        missed = costs.missed(len(states), sampled=draws, context=context)
        seeded = [i for i, state in enumerate(states) if state.request.repeats]
        others = [i for i, state in enumerate(states) if not state.request.repeats]
        lengths = [0] * len(states)
        if seeded and not costs.kept:
            for i in seeded:
                lengths[i] = min(rooms[i], self.fallback)
        elif seeded:
            late = [_late(states[i], costs, len(states)) for i in seeded]
            expected = rates_by_others([_own(states[i].length_state) for i in seeded], self.most)
            likeliest, likely = (
                [
                    self._drafts(states[i], rates, _usual(states[i]), variance, rooms[i], above)
                    for i, (rates, variance) in zip(seeded, expected, strict=True)
                ]
                for above in (0.0, GRACE)
            )
            plan = _best(_plans(steps, missed, likely, margin_of(costs), late))
            if plan.gain > 0:
                length = _best(_plans(steps, missed, likeliest, margin_of(costs), late)).length
                _let_draft(lengths, [seeded[k] for k in plan.who], rooms, length)
        if others and any(rooms[i] for i in others):
            habit, who, length = self._pooled(experience, states, rooms, others, steps, missed, costs, context)
            _let_draft(lengths, who, rooms, length)
        # A doubtful choice, and a try while resting, are for one step. They say nothing of requests with a seed.
        once = habit.doubts > 0 or (habit.resting and any(lengths[i] for i in others))
        holds = not (others and once)
        habit = replace(habit, ids=ids, rooms=rooms, lengths=lengths, age=1 if holds else LEAST_REST)
        return Choice(lengths=lengths, habit=habit, context=context)

    def _pooled(
        self,
        experience: Experience,
        states: Sequence[Running],
        rooms: Sequence[int],
        indices: Sequence[int],
        steps: Steps,
        missed: Sequence[float],
        costs: CostTable,
        context: int,
    ) -> tuple[Habit, Sequence[int], int]:
        """The new habit, the requests that draft, and how long; of requests without a seed."""
        habit, num_requests = experience.habit, len(states)
        rates = {id(p): p.rates(self.most) for p in (experience.greedy, experience.sampled)}
        drafts = []
        for i in indices:
            own = experience.pooled(states[i].request)
            drafts.append(self._drafts(states[i], rates[id(own)], own.hits.rate(_usual(states[i])), VARIANCE, rooms[i]))
        margin = margin_of(costs) * (1.0 if habit.resting else KEEP)
        plans = _plans(steps, missed, drafts, margin, [_late(states[i], costs, num_requests) for i in indices])
        plan = _best(plans)
        if not habit.resting and len(habit.ids) == num_requests and 0 < habit.length <= self.most:
            old = plans[habit.length - 1]
            plan = old if plan.rate < BETTER * old.rate else plan
        pooled = experience.pooled(states[indices[0]].request)
        spread = pooled.spread(plan.length, _usual(states[indices[0]]))
        sure = plan.gain / max(spread * len(plan.who) / len(indices), 1e-9)
        doubts = habit.doubts + 1 if sure <= UNLIKELY else 0
        if habit.resting:
            stops = sure < LIKELY
        else:
            stops = doubts >= DOUBTS or sure <= HOPELESS
        if not stops:
            return Habit(length=plan.length, doubts=doubts, resting=False), [indices[k] for k in plan.who], plan.length
        tries = habit.resting and habit.rested >= _rest(steps, costs, num_requests, context)
        rested = 0 if tries else habit.rested + 1 if habit.resting else 1
        return Habit(length=habit.length, resting=True, rested=rested), indices, int(tries)

    def _drafts(
        self,
        state: Running,
        pooled: Sequence[float],
        hits: float,
        variance: float,
        room: int,
        above: float = 0.0,
    ) -> "_Drafts":
        """What drafts of a request are worth; they are at most as long as there is room."""
        own = _own(state.length_state)
        found = tokens_by_length(own.rates(pooled, variance, above))
        if room < len(found):
            found = found[: room + 1] + [found[room]] * (len(found) - 1 - room)
        rate = own.hits.rate(hits)
        return _Drafts(tokens=found if rate == 1 else [1 + rate * (n - 1) for n in found], hits=rate)


@dataclass(frozen=True, kw_only=True)
class _Drafts:
    """Drafts of one request.

    Attributes:
        tokens: Expected tokens of a step, by draft length.
        hits: The probability that the drafter finds a draft.
    """

    tokens: Sequence[float]
    hits: float


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Drafts of one length.

    Attributes:
        length: The length.
        who: Which requests draft: those with the largest gain.
        rate: Tokens per cost, of a plain step's tokens per cost.
        gain: Expected tokens per request less what they must be, for drafts to be faster than plain steps by a margin.
    """

    length: int
    who: Sequence[int]
    rate: float
    gain: float


def margin_of(costs: CostTable) -> float:
    """How much faster than a plain step drafts must seem by these costs.

    Example:
        >>> costs = CostTable.of_formula(lambda requests, length: requests + length)
        >>> margin_of(costs), margin_of(replace(costs, doubt=0.1))
        (0.07, 0.1645)
    """
    return max(MARGIN, CERTAIN * costs.doubt)


def _plans(
    steps: Steps, missed: Sequence[float], drafts: Sequence[_Drafts], margin: float, late: Sequence[float]
) -> list[_Plan]:
    """The best plan of each length. The step's other requests are taken to be like these.

    Args:
        missed: Seconds of a step in which no draft is found, by the number of requests that ask for one.
        late: Seconds for each token of a request, for what the drafter has to read first.
    """
    count, share = len(drafts), (len(steps) - 1) / len(drafts)
    plain, plans = steps[0][0], []
    # What a token of a request is worth, if its drafter has to read first: in the time for that, others are emitted.
    worth = [1 - seconds * count / plain for seconds in late]
    for length in range(1, len(drafts[0].tokens)):
        order = sorted(range(count), key=lambda r: -worth[r] * drafts[r].tokens[length]) if count > 1 else [0]
        emitted, reading, none, hits, best = float(count), 0.0, 1.0, 0.0, (0.0, 0, 0.0)
        for drafting, r in enumerate(order, 1):
            own = drafts[r]
            emitted += own.tokens[length] - 1
            reading += late[r] * own.tokens[length]
            none *= 1 - own.hits
            hits += own.hits
            asking = math.ceil(drafting * share)
            found = steps[asking][length]
            if none:
                # As many find a draft as on average where one does at least.
                number = min(float(asking), hits * share / (1 - none)) if none < 1 else 1.0
                low, more = int(number), number % 1
                high = min(low + 1, asking)
                found += (1 - more) * (steps[low][length] - missed[low]) + more * (steps[high][length] - missed[high])
                found += missed[asking] - steps[asking][length]
            cost = (none * missed[asking] + (1 - none) * found + reading) / plain
            best = max(best, (emitted / count / cost, drafting, emitted / count - (1 + margin) * cost))
        rate, drafting, gain = best
        plans.append(_Plan(length=length, who=order[:drafting], rate=rate, gain=gain))
    return plans


def _best(plans: Sequence[_Plan]) -> _Plan:
    """The shortest plan with nearly the most tokens per second."""
    most = max(plan.rate for plan in plans)
    return next(plan for plan in plans if plan.rate >= NEAR * most)


def _holds(habit: Habit, states: Sequence[Running], ids: Sequence[str], rooms: Sequence[int]) -> bool:
    """Whether the last choice still holds: for the same requests, as long as there is room for their drafts. One to
    draft nothing holds also if a few of many requests are new, because it says something of all texts.
    """
    if len(habit.lengths) != len(ids) or habit.age >= (HOLD if any(habit.lengths) else LEAST_REST):
        return False
    if habit.ids == ids:
        return all(map(_has_room, habit.lengths, rooms, habit.rooms))
    if any(habit.lengths) or not any(habit.rooms) or any(state.request.repeats for state in states):
        return False
    return len(set(ids).difference(habit.ids)) <= NEWCOMERS * len(ids)


def _has_room(length: int, room: int, before: int) -> bool:
    """Whether a draft still fits that was chosen when there was more room, or as much."""
    return length <= room <= before


def _let_draft(lengths: list[int], who: Sequence[int], rooms: Sequence[int], length: int) -> None:
    """Set the lengths of some requests, as far as they have room."""
    for i in who:
        lengths[i] = min(rooms[i], length)


def _late(state: Running, costs: CostTable, num_requests: int) -> float:
    """Seconds for each token that a request goes on, for what its drafter has to read before the first draft.

    In a step of many requests the next ones will find the drafter at work. So the tokens over which this is spread are
    not those of the rest of this one alone, but, in a step of b requests, at least 1 - 1/b of all that it may emit.
    """
    if _own(state.length_state).tested:
        return 0.0
    most = state.request.max_new_tokens
    left = most - (len(state.tokens) - len(state.request.prompt))
    return costs.catch_up * len(state.tokens) / max(1.0, AHEAD * max(left, most * (1 - 1 / num_requests)))


def _rest(steps: Steps, costs: CostTable, num_requests: int, context: int) -> float:
    """Plain steps between two drafts of one token, so that these take their share of the time: what they cost more
    than plain steps, and what a drafter must read that did not read along.
    """
    plain, drafted = steps[0][0], steps[num_requests][1]
    extra = max(0.0, drafted - plain) + costs.catch_up * num_requests * context
    return max(LEAST_REST, extra / (ALLOWANCE * plain))


def _usual(state: Running) -> float:
    """How likely the drafter of a request finds a draft, before that is known."""
    return getattr(state.drafter, "usual_hits", 1.0)


def _own(state: object) -> OwnAcceptance:
    if not isinstance(state, OwnAcceptance):
        raise TypeError(f"goodput keeps an OwnAcceptance, got {type(state).__name__}")
    return state
