"""How often draft tokens are accepted: counts by depth, and the tokens that drafts are expected to bring."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from outrider.core.types import Step

FADE = 0.5 ** (1 / 250)
"""Weight of earlier steps, per step: half after 250 steps, with drafts or without."""
PRIOR, RISE, WEIGHT = 0.6, 0.4, 8.0
"""Acceptance at depth 1 before any is seen; how much its logit rises from a depth to one that is e times as deep (0.45
in texts of the embedded pair at temperature 1); and as how many tested tokens of a depth the other depths count."""
COMMON, OWN = 1.2, 0.3
"""Variance of the logit of acceptance: of what all requests have in common, and of what each has of its own."""
LOWEST = 0.02
"""Nothing is promised with a lower probability, or with a higher one than 1 without it."""


@dataclass(frozen=True, kw_only=True)
class Counts:
    """How often drafts were found and their tokens accepted. Earlier steps count less.

    A token is tested if all before it were accepted. So the first rejected token of a draft is tested, and the tokens
    behind it are not. Of a tree, the children of an accepted node are tested together. A draft itself stands at depth
    0: it is tested where one was asked for, and accepted where the drafter found one. A model always does.

    Attributes:
        tested: By depth, from 0 on.
        accepted: How many of them were accepted.
        promised: How many of them the drafter promised, of those drafts whose tokens it promises.
        nodes: Nodes of all drafts.
        levels: Depths of all drafts, added up. Those of chains are their nodes.

    Example:
        >>> from outrider.core.types import Timing
        >>> tokens, counts = dict(num_draft_tokens=3, num_accepted_tokens=1, tokens=(5, 7)), Counts()
        >>> counts = counts.after([Step(request="r", num_requests=1, timing=Timing(), **tokens)])
        >>> counts.tested, counts.accepted
        ((1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 0.0, 0.0))
    """

    tested: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()
    promised: tuple[float, ...] = ()
    nodes: float = 0.0
    levels: float = 0.0

    def after(self, steps: Sequence[Step]) -> "Counts":
        """The counts after a step of some requests. What was counted before fades, whether these draft or not."""
        steps = [step for step in steps if step.room or step.num_draft_tokens]
        depths = [step.depth or step.num_draft_tokens for step in steps]
        longest = max(depths, default=-1)
        more = [0.0] * (longest + 1 - len(self.tested))
        tested, accepted = ([FADE * count for count in counts] + more for counts in (self.tested, self.accepted))
        promised = [FADE * count for count in self.promised]
        for step, deepest in zip(steps, depths, strict=True):
            # Behind a leaf nothing is tested, even if other branches go on.
            for depth in range(min(step.num_accepted_tokens + (not step.bonus), deepest) + 1):
                tested[depth] += 1
            for depth in range(step.num_accepted_tokens + 1 if step.num_draft_tokens else 0):
                accepted[depth] += 1
            for depth, promise in enumerate(step.promised[: step.num_accepted_tokens + 1], 1):
                promised += [0.0] * (depth + 1 - len(promised))
                promised[depth] += promise
        return Counts(
            tested=tuple(tested),
            accepted=tuple(accepted),
            promised=tuple(promised),
            nodes=FADE * self.nodes + sum([step.num_draft_tokens for step in steps]),
            levels=FADE * self.levels + sum(depths),
        )

    def at_most(self, most: float) -> "Counts":
        """The same rates, from at most so many drafts and tokens of a depth."""
        weights = [min(1.0, most / max(count, 1e-9)) for count in self.tested]
        tested, accepted, promised = (
            tuple(weight * count for weight, count in zip(weights, counts, strict=False))
            for counts in (self.tested, self.accepted, self.promised)
        )
        share = weights[0] if weights else 1.0
        sizes = {"nodes": share * self.nodes, "levels": share * self.levels}
        return Counts(tested=tested, accepted=accepted, promised=promised, **sizes)


@dataclass(frozen=True, kw_only=True)
class ExpectedTokens:
    """What drafts of some requests are worth, by their length from 0 on.

    Attributes:
        tokens: Expected tokens of a step.
        deviations: Their standard deviations: acceptance, and how often a draft is found, are not known for sure.
        hits: The probability that a draft is found.
        common: The share of their variances that comes from what requests have in common.
        unknown: The share of what is known of drafts that is the prior: 1 before any was asked for.
    """

    tokens: Float[np.ndarray, "requests lengths"]
    deviations: Float[np.ndarray, "requests lengths"]
    hits: Float[np.ndarray, " requests"]
    common: Float[np.ndarray, " requests"]
    unknown: Float[np.ndarray, " requests"]

    def within(self, rooms: Sequence[int]) -> "ExpectedTokens":
        """What is left of it where drafts are at most so long."""
        lengths = np.arange(self.tokens.shape[1])
        if min(rooms) >= lengths[-1]:
            return self
        at = np.minimum(lengths, np.array(rooms)[:, None])
        tokens, deviations = (np.take_along_axis(each, at, 1) for each in (self.tokens, self.deviations))
        return replace(self, tokens=tokens, deviations=deviations)


def expected_tokens(
    counts: Sequence[Counts], pools: Sequence[Counts] | None, usual_hits: Sequence[float], longest: int
) -> ExpectedTokens:
    r"""What drafts of some requests are worth by what was counted.

    The logit of acceptance at depth i is that of `prior_rates`, and a common and an own part, both normal around 0. The
    counts of a pool move all depths together, then each depth by its own counts, $a_i = (k_i + 8 a_i) / (n_i + 8)$. A
    request's own counts move its rates from there. A draft of n tokens is expected to bring
    $1 + h \sum_{j \le n} \prod_{i \le j} a_i$ tokens, if it is found with probability h.

    Args:
        counts: Of each request.
        pools: Counts of all requests like each; None: those of these alone. What others are known for is what they hold
            beside the request's own.
        usual_hits: How often a draft is found, before any was asked for.
        longest: Longest draft.

    Example:
        >>> new = expected_tokens([Counts()], None, [1.0], 2)
        >>> new.tokens.round(2).tolist(), new.deviations.round(2).tolist()
        ([[1.0, 1.6, 2.0]], [[0.0, 0.29, 0.65]])
    """
    own = _arrays(counts, longest)
    everyone = own.sum(1, keepdims=True) if pools is None else _arrays(pools, longest)
    (tested, accepted), (others_tested, others_accepted) = own, np.maximum(everyone - own, 0)
    # A pool that began later than a request may hold less than the request does.
    others_accepted = np.minimum(others_accepted, others_tested)
    rates, variance = _moved(prior_rates(longest)[None], others_tested[:, 1:], others_accepted[:, 1:], COMMON)
    rates = (others_accepted[:, 1:] + WEIGHT * rates) / (others_tested[:, 1:] + WEIGHT)
    common = variance / (OWN + variance)
    rates, variance = _moved(rates, tested[:, 1:], accepted[:, 1:], OWN + variance)
    hits, asked = np.array(usual_hits), others_tested[:, 0] + tested[:, 0] + WEIGHT
    for of_drafts, of_found in ((others_tested, others_accepted), (tested, accepted)):
        hits = (of_found[:, 0] + WEIGHT * hits) / (of_drafts[:, 0] + WEIGHT)
    return _worth(rates, variance, hits, hits * (1 - hits) / (asked + 1), common, WEIGHT / asked)


def promised_tokens(
    promises: Sequence[Sequence[float]], counts: Sequence[Counts], pools: Sequence[Counts] | None, longest: int
) -> ExpectedTokens:
    r"""What drafts that were found are worth, by what the drafter promises of each token and by what was counted.

    A token that is promised with probability $s_i$ is accepted, after those before it, with a probability whose logit
    is that of $s_i$ and the two parts of `expected_tokens`. Here the counts say how many tokens were accepted of those
    that were promised. A draft of n tokens is expected to bring $1 + \sum_{j \le n} \prod_{i \le j} a_i$ tokens.

    Args:
        promises: Of each token of each request's draft; none where no draft was found.
        counts: Of each request.
        pools: As of `expected_tokens`.
        longest: Longest draft.

    Example:
        >>> found = promised_tokens([[0.9, 0.5], []], [Counts(), Counts()], None, 3)
        >>> found.tokens.round(2).tolist()
        [[1.0, 1.9, 2.35, 2.35], [1.0, 1.0, 1.0, 1.0]]
    """
    kept, rates = kept_promises(counts, pools), np.zeros((len(promises), longest))
    for row, promise in zip(rates, promises, strict=True):
        row[: len(promise)] = np.clip(promise[:longest], LOWEST, 1 - LOWEST)
    rates = with_odds(rates, kept.odds[:, None])
    hits = np.array([float(len(promise) > 0) for promise in promises])
    return _worth(rates, kept.variance, hits, np.zeros(len(promises)), kept.common, kept.unknown)


@dataclass(frozen=True, kw_only=True)
class KeptPromises:
    """What promises were worth, for each of some requests.

    Attributes:
        odds: By what the odds of a promise are to be multiplied.
        variance: Of the logarithm of this number.
        common: The share of it that comes from what requests have in common.
        unknown: The share of what is known that is the prior.
    """

    odds: Float[np.ndarray, " requests"]
    variance: Float[np.ndarray, " requests"]
    common: Float[np.ndarray, " requests"]
    unknown: Float[np.ndarray, " requests"]


def kept_promises(counts: Sequence[Counts], pools: Sequence[Counts] | None) -> KeptPromises:
    """What promises were worth by what was counted. The arguments are those of `promised_tokens`.

    Example:
        >>> seen = Counts(tested=(40.0, 40.0), accepted=(40.0, 20.0), promised=(0.0, 32.0))
        >>> kept_promises([Counts(), seen], None).odds.round(2).tolist()
        [0.29, 0.28]
    """
    own = _totals(counts)
    everyone = own.sum(1, keepdims=True) if pools is None else _totals(pools)
    others = np.maximum(everyone - own, 0)
    before = _rates_of(others)
    ratio, variance = _ratio(before, others[0], np.minimum(others[1], others[0]), COMMON)
    common = variance / (OWN + variance)
    before = with_odds(_rates_of(own), ratio)
    own_ratio, variance = _ratio(before, own[0], own[1], OWN + variance)
    return KeptPromises(
        odds=ratio * own_ratio,
        variance=variance,
        common=common,
        unknown=WEIGHT / (others[0] + own[0] + WEIGHT),
    )


def width_of(counts: Sequence[Counts]) -> float:
    """Nodes at each depth of drafts, on average: 1 of chains, and before there were drafts."""
    levels = sum(each.levels for each in counts)
    return sum(each.nodes for each in counts) / levels if levels else 1.0


def _worth(
    rates: Float[np.ndarray, "requests depths"],
    variance: Float[np.ndarray, " requests"],
    hits: Float[np.ndarray, " requests"],
    hits_variance: Float[np.ndarray, " requests"],
    common: Float[np.ndarray, " requests"],
    unknown: Float[np.ndarray, " requests"],
) -> ExpectedTokens:
    """What drafts are worth whose tokens are accepted at these rates, if one is found.

    Args:
        variance: Of what all logits of a request's rates are moved by.
    """
    # A logit that grows moves ln a_i by 1 - a_i (delta method). The rate of hits varies as in a beta distribution.
    reached = np.cumprod(rates, axis=1)
    more = np.cumsum(reached, axis=1)
    slopes = np.cumsum(reached * np.cumsum(1 - rates, axis=1), axis=1)
    deviations = np.sqrt((hits**2 * variance)[:, None] * slopes**2 + hits_variance[:, None] * more**2)
    nothing = np.zeros((len(rates), 1))
    return ExpectedTokens(
        tokens=1 + np.hstack([nothing, hits[:, None] * more]),
        deviations=np.hstack([nothing, deviations]),
        hits=hits,
        common=common,
        unknown=unknown,
    )


def prior_rates(longest: int) -> Float[np.ndarray, " depths"]:
    r"""Acceptance by depth before any is seen: $\sigma(\operatorname{logit} 0.6 + 0.4 \ln i)$.

    It rises with the depth i, because drafts get far where a text is easy.

    Example:
        >>> prior_rates(4).round(2).tolist()
        [0.6, 0.66, 0.7, 0.72]
    """
    return np.array([1 / (1 + (1 - PRIOR) / PRIOR / depth**RISE) for depth in range(1, longest + 1)])


def copy_rate(match: int) -> float:
    """The acceptance of a copied token behind a match of so many tokens, before any is seen.

    Example:
        >>> copy_rate(2), copy_rate(6)
        (0.5, 0.75)
    """
    return match / (match + 2)


def _moved(
    rates: Float[np.ndarray, "#requests depths"],
    tested: Float[np.ndarray, "requests depths"],
    accepted: Float[np.ndarray, "requests depths"],
    variance: float | Float[np.ndarray, " requests"],
) -> tuple[Float[np.ndarray, "requests depths"], Float[np.ndarray, " requests"]]:
    """Rates whose logits are all moved by the same number, and the variance of this number that the counts leave."""
    num_tested = tested.sum(1)
    before = np.where(num_tested > 0, (tested * rates).sum(1) / np.maximum(num_tested, 1e-9), 0.5)
    ratio, left = _ratio(before, num_tested, accepted.sum(1), variance)
    return with_odds(rates, ratio[:, None]), left


def _ratio(
    before: Float[np.ndarray, " requests"],
    tested: Float[np.ndarray, " requests"],
    accepted: Float[np.ndarray, " requests"],
    variance: float | Float[np.ndarray, " requests"],
) -> tuple[Float[np.ndarray, " requests"], Float[np.ndarray, " requests"]]:
    """By what the counts multiply the odds of rates whose mean was `before`, and the variance that they leave to its
    logarithm. The mean has the law of a beta distribution, with the given variance of a logit.
    """
    weight = 1 / (variance * before * (1 - before))
    after = (accepted + weight * before) / (tested + weight)
    return after / (1 - after) * (1 - before) / before, 1 / ((tested + weight) * after * (1 - after))


def with_odds(rates: Float[np.ndarray, "..."], ratio: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Rates below 1 whose odds are multiplied.

    Example:
        >>> with_odds(np.array([0.5, 0.2]), np.array([1.0, 4.0])).tolist()
        [0.5, 0.5]
    """
    odds = rates / (1 - rates) * ratio
    return odds / (1 + odds)


def _totals(counts: Sequence[Counts]) -> Float[np.ndarray, "3 requests"]:
    """Draft tokens that were tested, accepted and promised."""
    kinds = ("tested", "accepted", "promised")
    return np.array([[sum(getattr(each, kind)[1:], 0.0) for each in counts] for kind in kinds])


def _rates_of(totals: Float[np.ndarray, "3 requests"]) -> Float[np.ndarray, " requests"]:
    """The mean promise of the tokens that were tested; a half where nothing was promised."""
    tested, _, promised = totals
    return np.clip(np.where(promised > 0, promised / np.maximum(tested, 1e-9), 0.5), LOWEST, 1 - LOWEST)


def _arrays(counts: Sequence[Counts], longest: int) -> Float[np.ndarray, "2 requests depths"]:
    """Tested and accepted up to a depth."""
    missing = (0.0,) * (longest + 1)
    kinds = [each.tested for each in counts], [each.accepted for each in counts]
    return np.array([[(values + missing)[: longest + 1] for values in kind] for kind in kinds])
