"""Draws without replacement as an exponential race: the probability that all of them fall into a set of tokens."""

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

DEGREE = 8
"""Degree of the power series that represents the small tokens."""

SMALL = 0.25
"""A token is small if its expected number of arrivals before the end of the race is below this."""

CHUNK = 1 << 18
"""Most entries of an intermediate array."""


@dataclass(frozen=True, kw_only=True)
class Race:
    r"""Each token x arrives at an independent exponential time of rate $q(x)$; the first n to arrive are the draws.

    The tokens have a fixed order. Let H be the first k of them and $c = 1 - q(H)$. Some draw lies outside of H exactly
    if fewer than n tokens of H arrive before the first token from outside, which arrives at rate $c$:

    $$1 - Q(H) = \int_0^\infty c\, e^{-cT}\, P(N_H(T) < n)\, dT.$$

    The integrand mixes exponentials of rates from 1 down to $r$, the mass outside of the n-1 likeliest tokens. With
    $T = \exp(s - e^{-s})$ the trapezoidal rule converges exponentially at every such scale at once (the double
    exponential rule), and the number of points grows with $\log 1/r$ only.

    $N_H$ counts two kinds of tokens. For the few *heavy* tokens, the law of the number of arrivals is updated exactly,
    token by token, by $R_j \leftarrow R_j e^{-qT} + R_{j-1} (1 - e^{-qT})$. Of the *small* tokens, j have arrived with
    probability $e^{-T q(small)} e_j(y)$, where $y = e^{qT} - 1$. The elementary symmetric polynomials $e_j$ follow by
    Newton's identities from the power sums of y. The power series of y gives these sums from prefix sums of
    $q, q^2, \ldots$ Every term is positive and no term is a difference of nearly equal numbers, so peaked rows lose no
    digits.

    Attributes:
        n: Number of draws.
        end: Time after which the rest of the integral is negligible.
        times: Points T of the rule.
        weights: Their weights.
        outside: $c$ after each prefix, the empty one first.
        arrived: Law of the number of arrivals among the first heavy tokens, for each number of them.
        num_heavy: Number of heavy tokens in each prefix.
        moments: Prefix sums of $(q \cdot end)^d$ over the small tokens, d = 1, 2, ...

    Example:
        >>> Race.of(np.array([0.5, 0.25, 0.25]), n=2).escape(np.array([1, 2])).round(6).tolist()
        [1.0, 0.583333]

    References:
        The double exponential rule: Takahasi and Mori 1974. https://doi.org/10.2977/prims/1195192451
    """

    n: int
    end: float
    times: Float[np.ndarray, " points"]
    weights: Float[np.ndarray, " points"]
    outside: Float[np.ndarray, " prefixes"]
    arrived: Float[np.ndarray, "heavy n points"]
    num_heavy: Int[np.ndarray, " prefixes"]
    moments: Float[np.ndarray, "degree prefixes"]

    @classmethod
    def of(cls, q: Float[np.ndarray, " tokens"], n: int) -> "Race":
        """Prepare n draws from positive probabilities in their order; there must be more than n tokens."""
        rest = np.partition(q, len(q) - n)[: len(q) - n + 1].sum()
        end = float((40 + 4 * n) / rest)
        step = 0.4 / math.sqrt(n)
        s = np.arange(-3.5, math.log(end) + step, step)
        times = np.exp(s - np.exp(-s))
        heavy = q * end > SMALL
        arrived = np.zeros((heavy.sum() + 1, n, len(times)))
        arrived[0, 0] = 1
        for k, rate in enumerate(q[heavy]):
            arrived[k + 1] = arrived[k] * np.exp(-rate * times)
            arrived[k + 1, 1:] -= arrived[k, :-1] * np.expm1(-rate * times)
        moments = np.zeros((DEGREE, len(q) + 1))
        small = np.where(heavy, 0, q * end)
        power = small.copy()
        for d in range(DEGREE):
            np.cumsum(power, out=moments[d, 1:])
            power *= small
        return cls(
            n=n,
            end=end,
            times=times,
            weights=step * times * (1 + np.exp(-s)),
            outside=outside(q),
            arrived=arrived,
            num_heavy=np.concatenate([[0], np.cumsum(heavy)]),
            moments=moments,
        )

    def escape(self, prefixes: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        """Probability that some draw falls outside of the first k tokens, for each k of `prefixes`."""
        size = max(1, CHUNK // (self.n * len(self.times)))
        parts = [self._escape(prefixes[i : i + size]) for i in range(0, len(prefixes), size)]
        return np.concatenate([np.zeros(0), *parts])

    def _escape(self, prefixes: Int[np.ndarray, " some"]) -> Float[np.ndarray, " some"]:
        moments, arrived = self.moments[:, prefixes].T, self.arrived[self.num_heavy[prefixes]]
        powers = (self.times / self.end) ** np.arange(1, DEGREE + 1)[:, None]
        power_sums = [moments @ (series[:, None] * powers) for series in _series(self.n - 1)]
        e = [np.ones((len(prefixes), len(self.times)))]
        for j in range(1, self.n):
            newton = np.zeros_like(e[0])
            for i in range(1, j + 1):
                newton += (-1) ** (i - 1) * e[j - i] * power_sums[i - 1]
            e.append(newton / j)
        few, at_most = np.zeros_like(e[0]), np.zeros_like(e[0])
        for j in range(self.n):
            at_most += e[j]
            few += arrived[:, self.n - 1 - j] * at_most
        outside = self.outside[prefixes]
        few *= np.exp(-(outside + moments[:, 0] / self.end)[:, None] * self.times)
        return outside * (few @ self.weights)


def outside(q: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, " prefixes"]:
    """Mass outside each prefix, the empty prefix first. It is summed from the last token backwards, so that small
    masses keep their digits.
    """
    return np.concatenate([np.cumsum(q[::-1])[::-1], [0.0]])


def _series(most: int) -> Float[np.ndarray, "most degree"]:
    r"""Coefficients of $x, x^2, \ldots$ in $(e^x - 1)^i$, for i = 1 to `most`."""
    once = np.array([0.0, *(1 / math.factorial(d) for d in range(1, DEGREE + 1))])
    rows = [once]
    for _ in range(1, most):
        rows.append(np.convolve(rows[-1], once)[: DEGREE + 1])
    return np.array(rows)[:most, 1:]
