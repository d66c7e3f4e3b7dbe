"""What rows say: figures with intervals, and ways compared on the same resamples."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from outrider.core.types import InputError

RESAMPLES = 2000
FEWEST = 8
"""With fewer prompts to resample than this, an interval says too little to judge by."""

Row = dict[str, Any]
"""One run, as a line of `rows.jsonl` has it."""


@dataclass(frozen=True, kw_only=True)
class IntervalEstimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Float[np.ndarray, " samples"]) -> "IntervalEstimate":
        """The first sample is the figure, the others are its bootstrap."""
        low, high = np.nanquantile(samples[1:], [0.025, 0.975])
        return cls(value=float(samples[0]), low=float(low), high=float(high))

    def text(self, form: str = ".2f") -> str:
        """As tables have it."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


class Sums:
    """Sums over all runs of each method, as they are and as they would be on resampled prompts and seeds.

    Prompts are resampled within their category, because measurements take as many of each category as of any other.
    Every resample draws one prompt less than a category has and scales the sums up, so that the resamples vary as much
    as fresh prompts would (Rao and Wu 1988); for each prompt it draws as many of its seeds as there are. A resample is
    the same for all methods: what two methods are compared by is paired. Entry 0 of every array is the plain sum.

    Args:
        crossed: Whether a seed is one drafter, the same for all prompts. Then each resample draws seeds once, for all
            its prompts, one less than there are (Owen 2007).

    Example:
        >>> rows = [{"method": "a", "prompt": p, "seed": 0, "tokens": 6, "steps": 2} for p in ("x", "y")]
        >>> IntervalEstimate.of(Sums(rows).ratio("a", "tokens", "steps"))
        IntervalEstimate(value=3.0, low=3.0, high=3.0)

    References:
        Rao and Wu 1988, resampling inference with complex survey data. https://doi.org/10.1080/01621459.1988.10478591
        Owen 2007, the pigeonhole bootstrap. https://doi.org/10.1214/07-AOAS122
    """

    def __init__(
        self, rows: Sequence[Row], resamples: int = RESAMPLES, seed: int = 0, *, crossed: bool = False
    ) -> None:
        cells: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
        for each in rows:
            cells[each["method"]][each["prompt"], each["seed"]] = each
        categories = {each["prompt"]: str(each.get("category", "")) for each in rows}
        prompts, seeds = sorted(categories), sorted({each["seed"] for each in rows})
        self.num_prompts = len(prompts)
        self._units = [(prompt, seed) for prompt in prompts for seed in seeds]
        if not rows or any(set(runs) != set(self._units) for runs in cells.values()):
            raise InputError("every method needs a run of every prompt with every seed; the rows are not complete")
        self.methods, self._cells = list(cells), cells
        draw = _crossed if crossed else _weights
        self._weights = draw(_strata([categories[prompt] for prompt in prompts]), len(seeds), resamples, seed)
        places = {prompt: i for i, prompt in enumerate(prompts)}
        self._odd = np.array([places[prompt] % 2 == 1 for prompt, _ in self._units])

    def half(self, odd: bool) -> "Sums":
        """The same resamples of every other prompt only."""
        halved = copy.copy(self)
        halved._weights = self._weights * (self._odd == odd)
        return halved

    def get(self, method: str, name: str) -> Float[np.ndarray, " samples"]:
        """Sum of a field."""
        runs = self._cells[method]
        return self._weights @ np.array([runs[unit][name] for unit in self._units], dtype=float)

    def ratio(self, method: str, over: str, under: str) -> Float[np.ndarray, " samples"]:
        """Sum of one field over the sum of another."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.get(method, over) / self.get(method, under)

    def efficiency(self, method: str) -> Float[np.ndarray, " samples"]:
        """Block efficiency, over the steps that the request's end does not cut."""
        return self.ratio(method, "free_tokens", "free_steps")

    def speed(self, method: str) -> Float[np.ndarray, " samples"]:
        """Tokens per second, prefill included."""
        return self.ratio(method, "tokens", "seconds")

    def best(self, over: str, under: str, methods: Sequence[str]) -> Float[np.ndarray, " samples"]:
        """Ratio of the best of several methods, as somebody has it who must choose before.

        Each half of the prompts counts with the method that has the largest ratio on the other half. The largest of
        many noisy figures would flatter them.
        """
        chosen_on = {odd: self.half(odd) for odd in (True, False)}
        lines = np.arange(len(self._weights))
        sums = np.zeros((2, len(lines)))
        for odd, half in chosen_on.items():
            ratios = np.array([half.ratio(method, over, under) for method in methods])
            best = np.nan_to_num(ratios, nan=-np.inf).argmax(0)
            other = chosen_on[not odd]
            sums += [np.array([other.get(method, name) for method in methods])[best, lines] for name in (over, under)]
        return sums[0] / sums[1]


def _strata(categories: Sequence[str]) -> Int[np.ndarray, " prompts"]:
    """A number for the category of each prompt; prompts that are alone in theirs share one."""
    names, numbers, counts = np.unique(np.array(categories), return_inverse=True, return_counts=True)
    return np.where(counts[numbers] > 1, numbers, len(names))


def _weights(
    strata: Int[np.ndarray, " prompts"], seeds: int, resamples: int, seed: int
) -> Float[np.ndarray, "samples runs"]:
    """How often each resample has each run, runs in the order of prompts; the first line is the runs as they are."""
    dice = np.random.default_rng(seed)
    lines = np.arange(resamples)[:, None, None]
    weights = np.zeros((resamples, len(strata), seeds))
    for stratum in np.unique(strata):
        prompts = np.flatnonzero(strata == stratum)
        count = max(1, len(prompts) - 1)
        drawn = prompts[dice.integers(0, len(prompts), (resamples, count, 1))]
        np.add.at(weights, (lines, drawn, dice.integers(0, seeds, (resamples, count, seeds))), len(prompts) / count)
    return np.vstack([np.ones(len(strata) * seeds), weights.reshape(resamples, -1)])


def _crossed(
    strata: Int[np.ndarray, " prompts"], seeds: int, resamples: int, seed: int
) -> Float[np.ndarray, "samples runs"]:
    """The same where all prompts of a resample have the same seeds."""
    prompts = _weights(strata, 1, resamples, seed)
    drafters = _weights(np.zeros(seeds, dtype=int), 1, resamples, seed + 1)
    return (prompts[:, :, None] * drafters[:, None, :]).reshape(resamples + 1, -1)
