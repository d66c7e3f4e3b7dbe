"""How often draft tokens are accepted, by their depth: over all requests of an engine, and of one request."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.lengths.hits import FADE, NO_HITS, Hits

PRIOR, WEIGHT = 0.6, 8.0
"""Acceptance at depth 1 before any is seen; and as how many tested tokens of a depth the other depths count."""
RISE = 0.4
"""How much the logit of acceptance rises from a depth to one that is e times as deep. It is 0.45 in texts of the
embedded pair at temperature 1."""
OWN_DECAY = 0.99
"""Weight of a request's earlier steps, per step, whether it drafted or not."""
VARIANCE, WIDE_VARIANCE = 0.3, 1.5
"""Variance of the logit of acceptance: between requests of the same texts, and around the prior. The latter holds the
former, so that what all requests have in common varies by the difference."""
NEWTON_STEPS, LONGEST_STEP = 4, 2.0
"""Iterations that find how far to move logits, and how far one of them may."""


@dataclass(kw_only=True)
class PooledAcceptance:
    r"""Acceptance by depth over all requests. Changes in place.

    $a_i = (k_i + 8 \bar a_i) / (n_i + 8)$, with $n_i$ tokens tested at depth i, $k_i$ of them accepted; both fade.
    $\bar a_i$ is `prior_rates`, with all logits moved as far as the counts of all depths make likeliest. A token is
    tested if all before it were accepted. So the first rejected token of a draft is tested, and the tokens behind it
    are not.

    Attributes:
        tested: n, from depth 1 on.
        accepted: k.
        hits: How often a draft was found.

    Example:
        >>> pooled = PooledAcceptance()
        >>> pooled.note([(3, 2), (3, 0)], asked=2)
        >>> pooled.tested, pooled.accepted
        ([2.0, 1.0, 1.0], [1.0, 1.0, 0.0])
    """

    tested: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    hits: Hits = NO_HITS

    @property
    def num_drafts(self) -> float:
        """How many drafts are remembered."""
        return max([self.hits.asked, *self.tested[:1]])

    def note(self, drafts: Sequence[tuple[int, int]], *, asked: int) -> None:
        """Count a step. Earlier ones fade, whether this one drafts or not.

        Args:
            drafts: For each request, the number of draft tokens and how many of them were accepted.
            asked: How many requests asked for a draft.
        """
        more = [0.0] * (max([drafted for drafted, _ in drafts], default=0) - len(self.tested))
        self.tested = [FADE * count for count in self.tested] + more
        self.accepted = [FADE * count for count in self.accepted] + more
        for drafted, accepted in drafts:
            for depth in range(min(accepted + 1, drafted)):
                self.tested[depth] += 1
            for depth in range(accepted):
                self.accepted[depth] += 1
        self.hits = self.hits.after(asked=asked, found=sum([drafted > 0 for drafted, _ in drafts]))

    def rates(self, longest: int) -> list[float]:
        """$a_1, a_2, \\ldots$ up to a depth."""
        return self.rates_and_variance(longest)[0]

    def rates_and_variance(self, longest: int) -> tuple[list[float], float]:
        """The rates up to a depth, and the variance of what moves the logits of all."""
        moved, variance = _moved_and_left(prior_rates(longest), self.tested, self.accepted, WIDE_VARIANCE)
        counts = zip(self.tested, self.accepted, moved, strict=False)
        rates = [(accepted + WEIGHT * rate) / (tested + WEIGHT) for tested, accepted, rate in counts]
        return rates + moved[len(rates) :], variance


@dataclass(frozen=True, kw_only=True)
class OwnAcceptance:
    r"""Acceptance of one request: the pooled one, moved by the request's own logit u.

    $a_{r,i} = \sigma(\operatorname{logit} a_i + u)$ with the u that maximises the likelihood of the request's decayed
    counts times a normal prior around 0. Without counts u is 0.

    Attributes:
        tested: Decayed number of tested tokens, from depth 1 on.
        accepted: How many of them were accepted.
        hits: How often a draft was found.

    Example:
        >>> own = OwnAcceptance()
        >>> for _ in range(30):
        ...     own = own.after(drafted=4, accepted=0)
        >>> [round(rate, 2) for rate in own.rates([0.6, 0.6], variance=1.0)]
        [0.1, 0.1]
    """

    tested: tuple[float, ...] = ()
    accepted: tuple[float, ...] = ()
    hits: Hits = NO_HITS

    @property
    def num_drafts(self) -> float:
        """How many drafts are remembered."""
        return max([self.hits.asked, *self.tested[:1]])

    def after(self, drafted: int, accepted: int, *, asked: bool = False) -> "OwnAcceptance":
        """The counts after a step.

        Args:
            asked: Whether a draft was asked for. It is where there is one.
        """
        asked = asked or drafted > 0
        if not asked and not self.hits.asked:
            return self
        count = max(len(self.tested), drafted)
        tested = [OWN_DECAY * old for old in self.tested] + [0.0] * (count - len(self.tested))
        kept = [OWN_DECAY * old for old in self.accepted] + [0.0] * (count - len(self.accepted))
        for depth in range(min(accepted + 1, drafted)):
            tested[depth] += 1
        for depth in range(accepted):
            kept[depth] += 1
        hits = self.hits.after(asked=int(asked), found=int(drafted > 0))
        return OwnAcceptance(tested=tuple(tested), accepted=tuple(kept), hits=hits)

    def rates(self, pooled: Sequence[float], variance: float) -> list[float]:
        """The request's acceptance by depth.

        Args:
            pooled: That of all requests.
            variance: Of the prior of u.
        """
        return self.rates_and_variance(pooled, variance)[0]

    def rates_and_variance(self, pooled: Sequence[float], variance: float) -> tuple[list[float], float]:
        """The request's acceptance by depth, and the variance of u that its counts leave."""
        return _moved_and_left(pooled, self.tested, self.accepted, variance)


def prior_rates(longest: int) -> list[float]:
    r"""Acceptance by depth before any is seen: $\sigma(\operatorname{logit} 0.6 + 0.4 \ln i)$.

    It rises with the depth i, because drafts get far where a text is easy.

    Example:
        >>> [round(rate, 2) for rate in prior_rates(4)]
        [0.6, 0.66, 0.7, 0.72]
    """
    first = math.log(PRIOR / (1 - PRIOR))
    return [1 / (1 + math.exp(-first - RISE * math.log(depth))) for depth in range(1, longest + 1)]


def rates_by_others(acceptances: Sequence[OwnAcceptance], longest: int) -> list[tuple[list[float], float]]:
    r"""What is expected of each of some requests before its own drafts count, from those of the others.

    The logits of a request are those of the prior, moved by what all requests have in common and by what it has of its
    own. Both are normal.

    Args:
        acceptances: The acceptance of each request so far.
        longest: The depth up to which rates are wanted.

    Returns:
        For each request its acceptance by depth, and the variance of the logit around it: that of its own part, and
        what the others leave open of the common one.

    Example:
        >>> good = OwnAcceptance(tested=(40.0,), accepted=(36.0,))
        >>> _, (rates, variance) = rates_by_others([good, OwnAcceptance()], 1)
        >>> round(rates[0], 2), round(variance, 2)
        (0.87, 0.49)
    """
    prior = prior_rates(longest)
    if len(acceptances) == 1:
        return [(prior, WIDE_VARIANCE)]
    nothing, results = [0.0] * longest, []
    counts = (
        [[*acceptance.tested, *nothing][:longest] for acceptance in acceptances],
        [[*acceptance.accepted, *nothing][:longest] for acceptance in acceptances],
    )
    sums = [[sum(at_depth) for at_depth in zip(*each, strict=True)] for each in counts]
    for request_counts in zip(*counts, strict=True):
        tested, accepted = (
            [whole - part for whole, part in zip(*pair, strict=True)] for pair in zip(sums, request_counts, strict=True)
        )
        rates, left = _moved_and_left(prior, tested, accepted, WIDE_VARIANCE - VARIANCE)
        results.append((rates, VARIANCE + left))
    return results


def tokens_by_length(rates: Sequence[float]) -> list[float]:
    r"""Expected tokens of a step with a draft of n = 0, 1, ... tokens: $1 + \sum_{j \le n} \prod_{i \le j} a_i$.

    Example:
        >>> tokens_by_length([0.5, 0.5])
        [1.0, 1.5, 1.75]
    """
    tokens, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


def spreads_by_length(rates: Sequence[float]) -> list[float]:
    r"""How much the expected tokens of drafts of n = 0, 1, ... tokens grow with what moves the logits of all rates.

    With $w_j = \prod_{i \le j} a_i$ it is $\sum_{j \le n} w_j \sum_{i \le j} (1 - a_i)$, because a logit that grows
    moves $\ln a_i$ by $1 - a_i$. Times the standard deviation of what moves them it is that of the tokens (delta
    method).

    Example:
        >>> spreads_by_length([0.5, 0.5])
        [0.0, 0.25, 0.5]
    """
    spreads, reached, slope = [0.0], 1.0, 0.0
    for rate in rates:
        reached *= rate
        slope += 1 - rate
        spreads.append(spreads[-1] + reached * slope)
    return spreads


def _moved_and_left(
    rates: Sequence[float], tested: Sequence[float], accepted: Sequence[float], variance: float
) -> tuple[list[float], float]:
    """Rates whose logits are all moved by the likeliest number, which is around 0 with this variance at first; and the
    variance that the counts leave.
    """
    if not tested:
        return list(rates), variance
    logits = [math.log(rate / (1 - rate)) for rate in (min(max(p, 1e-4), 1 - 1e-4) for p in rates)]
    shift = 0.0
    for _ in range(NEWTON_STEPS):
        slope, curvature = -shift / variance, 1 / variance
        for logit, count, kept in zip(logits, tested, accepted, strict=False):
            rate = 1 / (1 + math.exp(-logit - shift))
            slope += kept - count * rate
            curvature += count * rate * (1 - rate)
        shift += min(max(slope / curvature, -LONGEST_STEP), LONGEST_STEP)
    return [1 / (1 + math.exp(-logit - shift)) for logit in logits], 1 / curvature
