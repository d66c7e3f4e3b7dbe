"""Goodput: the draft lengths with the most tokens per second, by measured costs; none where drafts lose time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from outrider.core.types import InputError, Running, Step
from outrider.lengths.acceptance import (
    VARIANCE,
    OwnAcceptance,
    PooledAcceptance,
    rates_by_others,
    spreads_by_length,
    tokens_by_length,
)
from outrider.lengths.costs import CostTable, Steps
from outrider.lengths.experience import Experience, LengthChoice, PolicyState
from outrider.lengths.hits import NO_HITS, Hits
from outrider.trees.protocol import Level

UNLIKELY = -1.28
"""Drafts are made unless a gain has a probability below 0.1: it is less than 0 by more standard deviations."""
CREDIT = 1.5
"""What drafts may cost that are made to learn how often they are accepted, in plain steps: all that are remembered,
taken as if none was accepted. Since they fade, this is half a percent of the time."""
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
    request's first draft is part of the costs. Drafts are made unless a gain is unlikely (a probability below 0.1), by
    the uncertainty of the acceptance. So a new pair drafts at once, and stops after a few drafts that fail. Then a
    draft of one token now and then, for half a percent of the time, tells whether acceptance has changed. Lengths are
    chosen before drafting, from earlier steps. So the law is kept.

    A request that comes with a seed and a temperature above 0 repeats its text. Its length depends on the kept costs,
    the number of requests in the step, a fixed prior, its own acceptance, and that of the step's other requests with a
    seed. The rule is the same. If the costs are not kept, it drafts `fallback` tokens.

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
        return _acceptance_of(state).after(step.num_draft_tokens, step.num_accepted_tokens, asked=step.room > 0)

    def choose(self, experience: Experience, states: Sequence[Running], rooms: Sequence[int]) -> LengthChoice:
        costs, last = experience.costs, experience.state
        if costs is None:
            return LengthChoice(lengths=[min(room, self.fallback) for room in rooms], state=last)
        context = sum([len(state.tokens) for state in states]) // len(states)
        ids, limit = [state.request.id for state in states], self.limit(None)
        rooms = [min(room, limit) for room in rooms]
        if _holds(last, states, ids, rooms):
            return LengthChoice(lengths=last.lengths, state=replace(last, age=last.age + 1), context=context)
        draws = any(state.request.sampling.temperature > 0 for state in states)
        step_costs = _StepCosts(
            steps=costs.steps(len(states), sampled=draws, context=context, longest=self.most),
            missed=costs.missed(len(states), sampled=draws, context=context),
            catch_up=costs.catch_up,
            margin=margin_of(costs),
        )
        seeded = [i for i, state in enumerate(states) if state.request.repeats]
        others = [i for i, state in enumerate(states) if not state.request.repeats]
        lengths, length, certain, gain = [0] * len(states), last.length, True, last.gain
        if not costs.kept:
            for i in seeded:
                lengths[i] = min(rooms[i], self.fallback)
        elif seeded and any(rooms[i] for i in seeded):
            acceptances = [_acceptance_of(states[i].length_state) for i in seeded]
            beliefs = [
                _Belief(rates=rates, variance=variance, hits=NO_HITS)
                for rates, variance in rates_by_others(acceptances, self.most)
            ]
            num_drafts, drafting = (
                sum([each.num_drafts for each in acceptances]),
                any(each.tested for each in acceptances),
            )
            plan = self._plan(
                step_costs, [states[i] for i in seeded], [rooms[i] for i in seeded], beliefs, num_drafts, drafting
            )
            certain, gain = plan.certain, plan.gain
            for k in plan.who:
                lengths[seeded[k]] = min(rooms[seeded[k]], plan.length)
        if others and any(rooms[i] for i in others):
            known = {id(pool): _Belief.of(pool, self.most) for pool in (experience.greedy, experience.sampled)}
            beliefs = [known[id(experience.pooled(states[i].request))] for i in others]
            held = last.length if len(last.ids) == len(states) else 0
            num_drafts = experience.pooled(states[others[0]].request).num_drafts
            plan = self._plan(
                step_costs,
                [states[i] for i in others],
                [rooms[i] for i in others],
                beliefs,
                num_drafts,
                last.length > 0,
                held,
            )
            certain, length, gain = certain and plan.certain, 0 if plan.tries else plan.length, plan.gain
            for k in plan.who:
                lengths[others[k]] = min(rooms[others[k]], plan.length)
        state = PolicyState(ids=ids, rooms=rooms, lengths=lengths, age=1 if certain else HOLD, length=length, gain=gain)
        return LengthChoice(lengths=lengths, state=state, context=context)

    def _plan(
        self,
        costs: "_StepCosts",
        states: Sequence[Running],
        rooms: Sequence[int],
        beliefs: Sequence["_Belief"],
        num_drafts: float,
        drafting: bool,
        held: int = 0,
    ) -> "_Decision":
        """Which of some requests draft, and how long.

        Args:
            beliefs: What is known of each request besides its own drafts.
            num_drafts: How many drafts of these requests are remembered.
            drafting: Whether they have been drafting.
            held: The length that they have, which a little better one does not replace.
        """
        drafts = [_drafts(*each) for each in zip(states, beliefs, rooms, strict=True)]
        catch_up_costs = [_catch_up_cost(state, costs.catch_up, len(costs.steps) - 1) for state in states]
        plans = _plans(costs.steps, costs.missed, drafts, costs.margin * (KEEP if drafting else 1.0), catch_up_costs)
        plan = _best(plans)
        if 0 < held <= self.most:
            old = plans[held - 1]
            plan = old if plan.rate < BETTER * old.rate else plan
        plain, count = costs.steps[0][0], len(states)
        reading = costs.catch_up * sum(
            [len(state.tokens) for state in states if not _acceptance_of(state.length_state).tested]
        )
        spread = sum([drafts[k].spreads[plan.length] for k in plan.who]) / count
        gain = plan.rate - 1
        if plan.gain > 0 or (plan.gain > UNLIKELY * spread and reading <= CREDIT * plain):
            return _Decision(length=plan.length, who=plan.who, certain=plan.gain > -UNLIKELY * spread, gain=gain)
        if (num_drafts / count + 1) * (max(0.0, costs.steps[count][1] - plain) + reading) <= CREDIT * plain:
            return _Decision(length=1, who=range(count), tries=True, certain=False, gain=gain)
        return _Decision(length=0, who=(), certain=True, gain=gain)

    def why_plain(self, experience: Experience) -> str:
        """Why the last steps drafted nothing: what drafts must gain, what they seem to, and what was seen of them."""
        costs, gain = experience.costs, experience.state.gain
        if costs is None or gain is None:
            return "no step had room for a draft"
        pools = (experience.greedy, experience.sampled)
        tested, accepted = (
            sum(map(sum, counts)) for counts in zip(*((p.tested, p.accepted) for p in pools), strict=True)
        )
        seen = "none was tested yet" if tested < 1 else f"{accepted / tested:.0%} of draft tokens were accepted so far"
        num_requested, num_found = (
            sum(counts) for counts in zip(*((p.hits.asked, p.hits.found) for p in pools), strict=True)
        )
        if num_found < NEAR * num_requested:
            seen = f"the drafter found a draft in {num_found / num_requested:.0%} of the steps that looked for one"
        if experience.state.length:
            return seen
        unsure = CERTAIN * costs.doubt > MARGIN
        because = ", because the costs of this machine are uncertain," if unsure else ""
        advice = "; measure again with `outrider prepare`" if unsure else ""
        seems = f"gain {gain:.0%}" if gain > 0 else f"lose {-gain:.0%}"
        return f"drafts would have to gain {margin_of(costs):.0%}{because} and seem to {seems} ({seen}){advice}"


@dataclass(frozen=True, kw_only=True)
class _StepCosts:
    """What steps of the requests cost.

    Attributes:
        steps: Seconds by how many draft, and by length.
        missed: Seconds of a step in which no draft is found, by the number of requests that ask for one.
        catch_up: Seconds for each token that a drafter has to read first.
        margin: How much faster than a plain step drafts must seem.
    """

    steps: Steps
    missed: Sequence[float]
    catch_up: float
    margin: float


@dataclass(frozen=True, kw_only=True)
class _Decision:
    """Which of some requests draft, and how long.

    Attributes:
        length: Draft length; 0: none.
        who: The requests, by their places.
        tries: Whether the drafts are made to learn alone.
        certain: Whether the choice holds for more than a step.
        gain: How much faster than plain steps drafts seem, as a share.
    """

    length: int
    who: Sequence[int]
    tries: bool = False
    certain: bool
    gain: float


@dataclass(frozen=True, kw_only=True)
class _Belief:
    """What is known of a request besides its own drafts.

    Attributes:
        rates: Acceptance by depth.
        variance: Of what moves the logits of a request's rates away from these.
        common: Of what moves those of all requests.
        hits: Counts of drafts of all requests.
    """

    rates: Sequence[float]
    variance: float
    common: float = 0.0
    hits: Hits

    @classmethod
    def of(cls, pool: PooledAcceptance, longest: int) -> "_Belief":
        """By the acceptance of all requests."""
        rates, common = pool.rates_and_variance(longest)
        return cls(rates=rates, variance=VARIANCE, common=common, hits=pool.hits)


def _drafts(state: Running, belief: _Belief, room: int) -> "_Drafts":
    """What drafts of a request are worth; they are at most as long as there is room."""
    acceptance, usual = _acceptance_of(state.length_state), getattr(state.drafter, "usual_hits", 1.0)
    rates, left = acceptance.rates_and_variance(belief.rates, belief.variance)
    before = belief.hits.rate(usual)
    hits = acceptance.hits.rate(before)
    of_hits = (belief.hits if belief.hits is not NO_HITS else acceptance.hits).variance(usual)
    tokens = [1 + hits * (n - 1) for n in tokens_by_length(rates)]
    deviation = math.sqrt(left + belief.common)
    spreads = [
        math.sqrt((hits * deviation * slope) ** 2 + of_hits * ((n - 1) / hits) ** 2)
        for slope, n in zip(spreads_by_length(rates), tokens, strict=True)
    ]
    if room < len(rates):
        short = len(rates) - room
        tokens, spreads = ([*each[: room + 1], *[each[room]] * short] for each in (tokens, spreads))
    return _Drafts(tokens=tokens, spreads=spreads, hits=hits)


@dataclass(frozen=True, kw_only=True)
class _Drafts:
    """Drafts of one request.

    Attributes:
        tokens: Expected tokens of a step, by draft length.
        spreads: Their standard deviations, which come from those of acceptance and hits.
        hits: The probability that the drafter finds a draft.
    """

    tokens: Sequence[float]
    spreads: Sequence[float]
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
    steps: Steps, missed: Sequence[float], drafts: Sequence[_Drafts], margin: float, catch_up_costs: Sequence[float]
) -> list[_Plan]:
    """The best plan of each length. The step's other requests are taken to be like these.

    Args:
        missed: Seconds of a step in which no draft is found, by the number of requests that ask for one.
        catch_up_costs: Seconds for each token of a request, for what the drafter has to read first.
    """
    count, share = len(drafts), (len(steps) - 1) / len(drafts)
    plain, plans = steps[0][0], []
    # What a token of a request is worth, if its drafter has to read first: in the time for that, others are emitted.
    worth = [1 - seconds * count / plain for seconds in catch_up_costs]
    for length in range(1, len(drafts[0].tokens)):
        order = sorted(range(count), key=lambda r: -worth[r] * drafts[r].tokens[length]) if count > 1 else [0]
        emitted, reading, none, hits, best = float(count), 0.0, 1.0, 0.0, (0.0, 0, 0.0)
        for drafting, r in enumerate(order, 1):
            draft = drafts[r]
            emitted += draft.tokens[length] - 1
            reading += catch_up_costs[r] * draft.tokens[length]
            none *= 1 - draft.hits
            hits += draft.hits
            asking = math.ceil(drafting * share)
            seconds = steps[asking][length]
            if none:
                # As many find a draft as on average where one does at least.
                number = min(float(asking), hits * share / (1 - none)) if none < 1 else 1.0
                low, more = int(number), number % 1
                high = min(low + 1, asking)
                seconds += (1 - more) * (steps[low][length] - missed[low]) + more * (steps[high][length] - missed[high])
                seconds += missed[asking] - steps[asking][length]
            cost = (none * missed[asking] + (1 - none) * seconds + reading) / plain
            best = max(best, (emitted / count / cost, drafting, emitted / count - (1 + margin) * cost))
        rate, drafting, gain = best
        plans.append(_Plan(length=length, who=order[:drafting], rate=rate, gain=gain))
    return plans


def _best(plans: Sequence[_Plan]) -> _Plan:
    """The shortest plan with nearly the most tokens per second."""
    most = max(plan.rate for plan in plans)
    return next(plan for plan in plans if plan.rate >= NEAR * most)


def _holds(last: PolicyState, states: Sequence[Running], ids: Sequence[str], rooms: Sequence[int]) -> bool:
    """Whether the last choice still holds: for the same requests, as long as there is room for their drafts. One to
    draft nothing holds also if a few of many requests are new, because it says something of all texts.
    """
    if len(last.lengths) != len(ids) or last.age >= HOLD:
        return False
    if last.ids == ids:
        return all(map(_has_room, last.lengths, rooms, last.rooms))
    if any(last.lengths) or not any(last.rooms) or any(state.request.repeats for state in states):
        return False
    return len(set(ids).difference(last.ids)) <= NEWCOMERS * len(ids)


def _has_room(length: int, room: int, before: int) -> bool:
    """Whether a draft still fits that was chosen when there was more room, or as much."""
    return length <= room <= before


def _catch_up_cost(state: Running, catch_up: float, num_requests: int) -> float:
    """Seconds for each token that a request goes on, for what its drafter has to read before the first draft.

    In a step of many requests the next ones will find the drafter at work. So the tokens over which this is spread are
    not those of the rest of this one alone, but, in a step of b requests, at least 1 - 1/b of all that it may emit.
    """
    if _acceptance_of(state.length_state).tested:
        return 0.0
    most = state.request.max_new_tokens
    left = most - (len(state.tokens) - len(state.request.prompt))
    return catch_up * len(state.tokens) / max(1.0, AHEAD * max(left, most * (1 - 1 / num_requests)))


def _acceptance_of(state: object) -> OwnAcceptance:
    if not isinstance(state, OwnAcceptance):
        raise TypeError(f"goodput keeps an OwnAcceptance, got {type(state).__name__}")
    return state
