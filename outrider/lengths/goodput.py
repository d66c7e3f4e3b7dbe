"""Goodput: the draft lengths with the most tokens per second, by measured costs; none where drafts lose time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Running, Step
from outrider.lengths.acceptance import (
    Counts,
    ExpectedTokens,
    expected_tokens,
    kept_promises,
    promised_tokens,
    width_of,
)
from outrider.lengths.costs import CHANCE, LEAST_DOUBT, Z_SCORE
from outrider.lengths.experience import Experience, LengthChoice, PolicyState
from outrider.lengths.sized_tree import SizedTree
from outrider.trees.protocol import Level, RankedTree

HOLD = 8
"""For how many steps a choice that is certain holds for the same requests."""
NEAR = 0.99
"""The share of the best rate at which a shorter draft is as good."""
FREE = 0.01
"""The share of a plain step that looking for drafts may take without a gain that is expected from all of them."""
AHEAD = 0.5
"""As how much of what a request may emit its output is taken to be long."""


@dataclass(frozen=True, kw_only=True)
class GoodputLength(CheckedOptions):
    r"""Draft the length $\gamma \ge 0$ with the most tokens per second, $\sum_r E_r(\gamma) / T(b, m, \gamma, L)$.

    T is what a step of b requests costs by the engine's `CostTable`, if m of them draft. $E_r$ is the expected number
    of tokens of request r (`expected_tokens`), from its own drafts so far and from those of all requests. For each
    length and each m, those requests draft that gain most. A drafter that looks tokens up may find no draft, and a step
    in which no request has one costs a plain step and the looking. What a drafter must read before a request's first
    draft is a cost too, spread over the request's output. A step in which nobody drafts is one of plain decoding: the
    drafter is not called, and a draft model does not read along.

    Where the drafter knows its drafts before the step, because it looks tokens up, these lengths say who looks for one;
    everyone does where looking takes less than a hundredth of a step. The lengths of the drafts that were found are
    then chosen by the same rule: their $E_r$ is that of the probabilities which the drafter promises
    (`promised_tokens`). So a text that repeats itself is copied, whatever became of drafts in other texts.

    With tree `dynamic`, these lengths say who drafts, at the width that trees had so far. `SizedTree` then chooses the
    nodes and the levels of each tree while it grows, by the same costs and by what the drafter's probabilities were
    worth.

    Drafts must be faster than plain steps by 1.645 standard errors of the table's costs, because no draft mends these
    errors. What is not known of acceptance, drafts tell. So they are made unless a gain has a probability below 5 %. A
    new pair drafts at once, and stops after a few drafts that fail. Counts fade, so that what is known of a
    drafter that rests becomes uncertain, and it is tried again: where it never gains, for half a percent of the time.
    The choice reads no clock. Lengths are chosen before drafting, from earlier steps, so the law is kept.

    A request that comes with a seed and a temperature above 0 repeats its text. The rule is the same, but in place of
    all requests it knows the step's other requests with a seed. If the costs are not kept, it drafts `fallback` tokens.

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

    most: int = option(16, least=1)
    fallback: int = option(5, least=0)

    def open(self) -> Counts:
        return Counts()

    def limit(self, state: object) -> int:
        return max(self.most, self.fallback)

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> Counts:
        if not isinstance(state, Counts):
            raise TypeError(f"goodput keeps Counts, got {type(state).__name__}")
        return state.after([step])

    def choose(self, experience: Experience, states: Sequence[Running], rooms: Sequence[int]) -> LengthChoice:
        costs, last = experience.costs, experience.state
        if costs is None:
            return LengthChoice(lengths=[min(room, self.fallback) for room in rooms], state=last)
        context = sum([len(state.tokens) for state in states]) // len(states)
        ids, limit = [state.request.id for state in states], self.limit(None)
        rooms = [min(room, limit) for room in rooms]
        if _holds(last, ids, rooms):
            return LengthChoice(lengths=last.lengths, state=replace(last, age=last.age + 1), context=context)
        lengths = [0] * len(states)
        gain, certain = last.gain, True
        # Those with a seed come last, so that they alone say how long the choice holds.
        for group in _groups(experience, states, range(len(states))):
            some, left = [states[i] for i in group.places], [rooms[i] for i in group.places]
            if not any(left):
                continue
            if group.blind:
                chosen: Sequence[int] = [self.fallback] * len(some)
            else:
                usual_hits = [getattr(state.drafter, "usual_hits", 1.0) for state in some]
                worth = expected_tokens(group.counts, group.pools, usual_hits, self.most)
                reading = [_catch_up_cost(state, costs.catch_up) for state in some]
                prices = _prices(experience, states, context, self.most, width_of(group.pools or group.counts))
                untried = group.pools is not None and not any(pool.tested for pool in group.pools)
                plan = _best(prices, worth.within(left), reading, untried)
                chosen, gain, certain = plan.lengths, plan.gain, plan.certain
            for i, length in zip(group.places, chosen, strict=True):
                lengths[i] = min(rooms[i], length)
        state = PolicyState(ids=ids, rooms=rooms, lengths=lengths, age=1 if certain else HOLD, gain=gain)
        return LengthChoice(lengths=lengths, state=state, context=context)

    def looks(self, experience: Experience, states: Sequence[Running], choice: LengthChoice) -> bool:
        if experience.costs is None:
            return False
        draws = any(state.request.sampling.temperature > 0 for state in states)
        missed = experience.costs.missed(len(states), sampled=draws, context=choice.context)
        return bool(missed[-1] <= (1 + FREE) * missed[0])

    def shorten(
        self,
        experience: Experience,
        states: Sequence[Running],
        choice: LengthChoice,
        promised: Sequence[Sequence[float] | None],
    ) -> LengthChoice:
        lengths = list(choice.lengths)
        found = {i: promise for i, promise in enumerate(promised) if promise is not None}
        for i, promise in found.items():
            lengths[i] = min(lengths[i], len(promise))
        if experience.costs is not None and any(found.values()):
            prices = _prices(experience, states, choice.context, self.most)
            for group in _groups(experience, states, found):
                promises = [found[i] for i in group.places]
                if any(promises) and not group.blind:
                    worth = promised_tokens(promises, group.counts, group.pools, self.most)
                    plan = _best(prices, worth, [0.0] * len(promises))
                    for i, promise, length in zip(group.places, promises, plan.lengths, strict=True):
                        lengths[i] = min(length, len(promise))
        return replace(choice, lengths=lengths, promised=[promise or () for promise in promised])

    def sized(
        self,
        experience: Experience,
        states: Sequence[Running],
        choice: LengthChoice,
        rooms: Sequence[int],
        tree: RankedTree,
    ) -> LengthChoice:
        costs, gain = experience.costs, choice.state.gain
        drafting = [i for i, length in enumerate(choice.lengths) if length]
        if costs is None or gain is None or not drafting:
            return replace(choice, tree=tree)
        lengths, odds, rates = list(choice.lengths), np.ones(len(states)), np.zeros(len(states))
        draws, context = any(state.request.sampling.temperature > 0 for state in states), choice.context
        verifying = costs.without_drafter.steps(len(states), sampled=draws, context=context, longest=tree.num_nodes)
        for group in _groups(experience, states, drafting):
            if group.blind:
                continue
            kept = kept_promises(group.counts, group.pools)
            for i, ratio in zip(group.places, kept.odds.tolist(), strict=True):
                lengths[i], odds[i] = min(rooms[i], self.most), ratio
                rates[i] = len(states) * (1 + max(gain, 0.0)) / verifying[0, 0]
        sized = SizedTree(
            tree=tree,
            odds=odds,
            rates=rates,
            verifying=(verifying[len(drafting)] - verifying[0]) / len(drafting),
            reading=partial(costs.readings, sampled=draws, context=context, longest=self.limit(None) + 1),
        )
        return replace(choice, lengths=lengths, tree=sized)

    def why_plain(self, experience: Experience) -> str:
        """Why the last steps drafted nothing: what drafts must gain, what they seem to, and what was seen of them."""
        costs, last, gain = experience.costs, experience.state, experience.state.gain
        if costs is None or gain is None:
            return "no step had room for a draft"
        pools = [pool for pool in (experience.greedy, experience.sampled) if pool.tested]
        tested, accepted = (sum(sum(getattr(pool, name)[1:]) for pool in pools) for name in ("tested", "accepted"))
        asked, found = (sum(getattr(pool, name)[0] for pool in pools) for name in ("tested", "accepted"))
        seen = "none was tested yet" if tested == 0 else f"{accepted / tested:.0%} of draft tokens were accepted so far"
        if found < 0.99 * asked:
            seen = f"the drafter found a draft in {found / asked:.0%} of the steps that looked for one"
        if gain > costs.margin:
            slow = "to read the text first would take the drafter longer than drafts gain"
            return f"{slow} ({seen})" if any(last.rooms) and not any(last.lengths) else seen
        unsure = costs.doubt > LEAST_DOUBT
        because = ", because the costs of this machine are uncertain," if unsure else ""
        advice = "; measure again with `outrider prepare`" if unsure else ""
        seems = f"gain {gain:.0%}" if gain > 0 else f"lose {-gain:.0%}"
        return f"drafts would have to gain {costs.margin:.0%}{because} and seem to {seems} ({seen}){advice}"


@dataclass(frozen=True, kw_only=True)
class _Prices:
    """What a step may cost.

    Attributes:
        steps: Seconds by how many requests draft, and by length.
        missed: Seconds of a step in which no draft is found, by how many requests ask for one.
        margin: How much faster than a plain step drafts must seem.
    """

    steps: Float[np.ndarray, "drafting lengths"]
    missed: Float[np.ndarray, " asking"]
    margin: float


def _prices(
    experience: Experience, states: Sequence[Running], context: int, longest: int, width: float = 1.0
) -> _Prices:
    """What a step of these requests may cost. Raises ValueError if costs are not known.

    Args:
        width: Nodes at each depth of a draft.
    """
    if experience.costs is None:
        raise ValueError("the costs of steps are not known")
    draws = any(state.request.sampling.temperature > 0 for state in states)
    if width == 1:
        steps = experience.costs.steps(len(states), sampled=draws, context=context, longest=longest)
    else:
        steps = experience.costs.trees(len(states), width, sampled=draws, context=context, longest=longest)
    return _Prices(
        steps=steps,
        missed=experience.costs.missed(len(states), sampled=draws, context=context),
        margin=experience.costs.margin,
    )


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Those requests of a step of which the same is known.

    Attributes:
        places: Their places among the requests of the step.
        counts: Their own counts.
        pools: Counts of all requests like each; None: those of the group.
        blind: Whether the costs are of no use to them, because another process would measure others.
    """

    places: Sequence[int]
    counts: Sequence[Counts]
    pools: Sequence[Counts] | None
    blind: bool


def _groups(experience: Experience, states: Sequence[Running], some: Iterable[int]) -> list[_Group]:
    """Some requests of a step, by their places. Those that repeat their texts by a seed come last, in a group of their
    own.
    """
    groups = []
    for repeats in (False, True):
        places = [i for i in some if states[i].request.repeats == repeats]
        pools = None if repeats else [experience.pooled(states[i].request) for i in places]
        blind = repeats and not (experience.costs is not None and experience.costs.kept)
        counts = [_counts_of(states[i]) for i in places]
        groups.append(_Group(places=places, counts=counts, pools=pools, blind=blind))
    return [group for group in groups if group.places]


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is best for some requests.

    Attributes:
        lengths: Their draft lengths.
        gain: How much faster than plain steps the best drafts seem, as a share, whether they are made or not; once the
            drafter has read what stands before them.
        certain: Whether nothing is drafted, or a gain of what is drafted has a probability of 95 %.
    """

    lengths: Sequence[int]
    gain: float
    certain: bool


def _best(prices: _Prices, worth: ExpectedTokens, reading: Sequence[float], untried: bool = False) -> _Plan:
    """The lengths of some requests with the most tokens per second. The step's others are taken to be like these.

    Args:
        reading: Seconds for each token of a request, for what its drafter has to read first.
        untried: Whether no request like these ever asked the drafter for a draft.
    """
    steps, missed, margin = prices.steps, prices.missed, prices.margin
    plain, all_requests, (count, num_lengths) = steps[0, 0], len(steps) - 1, worth.tokens.shape
    late = np.array(reading)[:, None] / plain * worth.tokens
    # For each length, those come first who gain most: in the time for reading, others emit tokens.
    order = np.argsort(count * late - worth.tokens, axis=0, kind="stable")
    tokens, deviations, late = (np.take_along_axis(each, order, 0) for each in (worth.tokens, worth.deviations, late))
    emitted, late = 1 + np.cumsum(tokens - 1, axis=0) / count, np.cumsum(late, axis=0)
    # What requests have in common adds up, and what each has of its own adds up in squares.
    common, own = np.sqrt(worth.common[order]) * deviations, (1 - worth.common[order]) * deviations**2
    hope = Z_SCORE * np.sqrt(np.cumsum(common, axis=0) ** 2 + np.cumsum(own, axis=0)) / count
    # Where a draft is found at all, as many requests have one as on average then. Other steps are plain, with looking.
    hits, share = worth.hits[order], all_requests / count
    asking = np.ceil(share * np.arange(1, count + 1)).astype(int)[:, None]
    found = 1 - np.cumprod(1 - hits, axis=0)
    drafting = np.minimum(np.cumsum(hits, axis=0) * share / np.maximum(found, 1e-9), asking)
    low, lengths = np.minimum(drafting.astype(int), all_requests - 1), np.arange(num_lengths)
    more = steps - missed[:, None]
    more = more[low, lengths] + (drafting - low) * (more[low + 1, lengths] - more[low, lengths])
    cost = (missed[asking] + found * more) / plain + late
    gain = emitted - (1 + margin) * cost
    # As far as drafts are not known, errors of the costs are no reason not to try; nor what drafts read first, for
    # drafts that go on. Those that end soon read it for a part of the output. A pair that nobody tried is tried once
    # where errors of the costs may hide a gain: what its first drafts tell is worth more than they can lose.
    hoped_margin, ending = margin * (1 - float(worth.unknown.mean())), 1 / CHANCE - 1
    if untried:
        hoped_margin, ending = -margin, 0.0
    hoped = emitted + hope - (1 + hoped_margin) * (cost + ending * late)
    possible = np.maximum(gain, hoped) > 0
    possible[:, 0] = False
    rates = np.where(possible, emitted / cost, 0.0)
    length = int(np.argmax(rates.max(0) >= NEAR * rates.max()))
    number = int(np.argmax(rates[:, length]))
    chosen = [0] * count
    for r in order[: number + 1, length].tolist() if possible.any() else ():
        chosen[r] = length
    certain = not possible.any() or bool(gain[number, length] > hope[number, length])
    return _Plan(lengths=chosen, gain=float((emitted / (cost - late))[:, 1:].max()) - 1, certain=certain)


def _holds(last: PolicyState, ids: Sequence[str], rooms: Sequence[int]) -> bool:
    """Whether the last choice still holds: for the same requests, while its drafts fit and no room is larger."""
    return (
        last.ids == ids
        and last.age < HOLD
        and all(length <= room <= before for length, room, before in zip(last.lengths, rooms, last.rooms, strict=True))
    )


def _catch_up_cost(state: Running, catch_up: float) -> float:
    """Seconds for each token that a request emits, for what its drafter has to read before the first draft."""
    if _counts_of(state).tested:
        return 0.0
    return catch_up * len(state.tokens) / max(1.0, AHEAD * state.request.max_new_tokens)


def _counts_of(state: Running) -> Counts:
    counts = state.length_state
    if not isinstance(counts, Counts):
        raise TypeError(f"goodput keeps Counts, got {type(counts).__name__}")
    return counts
