"""What rows say: figures with intervals, methods compared on the same resamples, published sentences judged."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from outrider import InputError
from recipes.speed import Row

RESAMPLES = 2000
FEWEST = 8
"""With fewer prompts to resample than this, an interval says too little to judge a claim by."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Float[np.ndarray, " samples"]) -> "Estimate":
        """The first sample is the figure, the others are its bootstrap."""
        low, high = np.nanquantile(samples[1:], [0.025, 0.975])
        return cls(value=float(samples[0]), low=float(low), high=float(high))

    def text(self, form: str = ".2f") -> str:
        """As tables have it."""
        return f"{self.value:{form}} [{self.low:{form}}, {self.high:{form}}]"


class Sums:
    """Sums over all runs of each method, as they are and as they would be on resampled prompts and seeds.

    Every resample draws as many prompts as there are and for each as many of its seeds, both with replacement, and is
    the same for all methods: what two methods are compared by is paired. Entry 0 of every array is the plain sum.

    Example:
        >>> rows = [{"method": "a", "prompt": p, "seed": 0, "tokens": 6, "steps": 2} for p in ("x", "y")]
        >>> Estimate.of(Sums(rows).ratio("a", "tokens", "steps"))
        Estimate(value=3.0, low=3.0, high=3.0)
    """

    def __init__(self, rows: Sequence[Row], resamples: int = RESAMPLES) -> None:
        cells: dict[str, dict[tuple[str, int], Row]] = defaultdict(dict)
        for each in rows:
            cells[each["method"]][each["prompt"], each["seed"]] = each
        prompts = sorted({each["prompt"] for each in rows})
        seeds = sorted({each["seed"] for each in rows})
        self.num_prompts = len(prompts)
        self._units = [(prompt, seed) for prompt in prompts for seed in seeds]
        if not rows or any(set(own) != set(self._units) for own in cells.values()):
            raise InputError("every method needs a run of every prompt with every seed; the rows are not complete")
        self.methods, self._cells = list(cells), cells
        self._weights = _weights(len(prompts), len(seeds), resamples)

    def get(self, method: str, name: str) -> Float[np.ndarray, " samples"]:
        """Sum of a field."""
        own = self._cells[method]
        return self._weights @ np.array([own[unit][name] for unit in self._units], dtype=float)

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
        top, bottom = (
            np.array([[self._cells[method][unit][name] for unit in self._units] for method in methods], dtype=float)
            for name in (over, under)
        )
        places = {prompt: i for i, prompt in enumerate(sorted({prompt for prompt, _ in self._units}))}
        odd = np.array([places[prompt] % 2 == 1 for prompt, _ in self._units])
        lines = np.arange(len(self._weights))
        sums = np.zeros((2, len(lines)))
        for own in (odd, ~odd):
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = (self._weights[:, ~own] @ top[:, ~own].T) / (self._weights[:, ~own] @ bottom[:, ~own].T)
            chosen = np.nan_to_num(ratios, nan=-np.inf).argmax(1)
            sums += [(self._weights[:, own] @ figures[:, own].T)[lines, chosen] for figures in (top, bottom)]
        return sums[0] / sums[1]


def _weights(prompts: int, seeds: int, resamples: int) -> Float[np.ndarray, "samples runs"]:
    """How often each resample has each run, runs in the order of prompts; the first line is the runs as they are."""
    dice = np.random.default_rng(0)
    drawn = dice.integers(0, prompts, (resamples, prompts, 1)) * seeds
    drawn = drawn + dice.integers(0, seeds, (resamples, prompts, seeds))
    flat = drawn.reshape(resamples, -1) + np.arange(resamples)[:, None] * prompts * seeds
    counts = np.bincount(flat.ravel(), minlength=resamples * prompts * seeds).reshape(resamples, -1)
    return np.vstack([np.ones(prompts * seeds), counts])


def gain(ours: Float[np.ndarray, " samples"], theirs: Float[np.ndarray, " samples"]) -> Estimate:
    """By how many percent the first is above the second."""
    return Estimate.of(100 * (ours / theirs - 1))


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published sentence, and what we found.

    Attributes:
        claim: A sentence that is true or false of a pair; without figures of ours, so that it names the claim.
        paper_value: The paper's figure, in the unit, or its words.
        interval: Our 95 % interval.
        holds: True if the whole interval is on the sentence's side, False if it is on the other, None if neither.
        note: How ours was taken, where that is not plain.
    """

    claim: str
    paper: str
    url: str
    paper_value: float | str | None
    our_value: float
    interval: tuple[float, float]
    unit: str
    holds: bool | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where claims come from."""

    name: str
    url: str

    def claim(
        self,
        claim: str,
        ours: Estimate,
        *,
        over: "Sums",
        published: float | str | None,
        unit: str,
        least: float | None = None,
        most: float | None = None,
        note: str = "",
    ) -> Claim:
        """Judge a sentence that says that a figure, taken from `over`, is above `least` or below `most`."""
        holds: bool | None
        if over.num_prompts < FEWEST:
            holds, note = None, "; ".join(filter(None, (note, f"too few to judge: {over.num_prompts} of {FEWEST}")))
        elif least is not None:
            holds = True if ours.low > least else False if ours.high < least else None
        else:
            holds = None if most is None else True if ours.high < most else False if ours.low > most else None
        return Claim(
            claim=claim,
            paper=self.name,
            url=self.url,
            paper_value=published,
            our_value=ours.value,
            interval=(ours.low, ours.high),
            unit=unit,
            holds=holds,
            note=note,
        )
