"""Seconds per step of each method, from timed runs."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from outrider.bench.evidence import RESAMPLES, Row
from outrider.bench.folder import read_record, read_rows
from outrider.core.types import InputError

FEWEST_STEPS = 4
"""Runs of fewer steps are left out."""
ROUNDS = 8
"""How often what methods usually take, and how slow the machine was at each job, are told from each other."""

Samples = Float[np.ndarray, " samples"]


class StepSeconds:
    """Seconds of a step, per request.

    All methods do a job, a prompt with a seed, within moments. How much slower than usual the machine was then is the
    median, over the methods, of what a method took over what it usually takes; each run is divided by that. Of the
    quotients of a method the median over jobs is taken, which a disturbed run does not move. It is also what the method
    usually takes, so that the two are worked out in turns (Tukey's median polish).

    Jobs are resampled, the same for all methods. Entry 0 of every array is the figure itself.

    Args:
        rows: As `Bench.measure` makes them.
        made: Under what they came about.

    Attributes:
        seconds: How long all runs took.

    Example:
        >>> head = {"seconds": 1.0, "requests": 1, "steps": 10, "drafted": 50, "prompt": "p"}
        >>> rows = [{**head, "method": m, "seed": i, "profile": {"target": s}} for i, m, s in (
        ...     (0, "a", 1.0), (0, "b", 2.0), (1, "a", 3.0), (1, "b", 6.0))]
        >>> times = StepSeconds(rows, {})
        >>> float((times.of("b") / times.of("a"))[0])
        2.0
    """

    def __init__(self, rows: Sequence[Row], made: Mapping[str, Any], resamples: int = RESAMPLES) -> None:
        self.made = made
        self.seconds = float(sum(row["seconds"] for row in rows))
        enough = [row for row in rows if row["steps"] >= FEWEST_STEPS * row["requests"]]
        if not enough:
            raise InputError(f"no timed run has {FEWEST_STEPS} steps; give longer outputs")
        jobs = sorted({(row["prompt"], row["seed"]) for row in enough})
        self.methods = sorted({row["method"] for row in enough})
        places = {job: i for i, job in enumerate(jobs)}, {method: i for i, method in enumerate(self.methods)}
        raw, self._drafted = np.full((2, len(jobs), len(self.methods)), np.nan)
        for row in enough:
            at = places[0][row["prompt"], row["seed"]], places[1][row["method"]]
            raw[at], self._drafted[at] = _of_steps(row), (row["drafted"] or 0) / row["steps"]
        self._seconds = raw
        for _ in range(ROUNDS):
            slower = np.nanmedian(raw / np.nanmedian(self._seconds, axis=0), axis=1)
            self._seconds = raw / slower[:, None]
        drawn = np.random.default_rng(1).integers(0, len(jobs), (resamples, len(jobs)))
        self._drawn = np.vstack([np.arange(len(jobs)), drawn])

    @classmethod
    def read(cls, folder: Path, requests: int | None = None) -> "StepSeconds":
        """From the folder of a timed run.

        Args:
            requests: Take the runs of so many requests at once alone.
        """
        rows = [row for row in read_rows(folder / "rows.jsonl") if row.get("phase") != "pilot"]
        rows = [row for row in rows if requests in (None, row["requests"])]
        if not rows:
            raise InputError(f"{folder} has no rows of timed runs; make them with --clock")
        return cls(rows, read_record(folder)["circumstances"])

    def has(self, method: str) -> bool:
        """Whether a method was timed."""
        return method in self.methods

    def of(self, method: str, drafted: Samples | None = None, slope: float = 0.0) -> Samples:
        """Seconds of a method's step.

        Args:
            drafted: Draft tokens of the step; None is as many as the runs had.
            slope: Seconds that one more takes.
        """
        own = self.methods.index(method)
        seconds = self._seconds[:, own][self._drawn]
        if drafted is not None:
            seconds = seconds + slope * (drafted[:, None] - self._drafted[:, own][self._drawn])
        with warnings.catch_warnings():
            # A resample may have no job that a method made enough steps in; it has no figure.
            warnings.simplefilter("ignore", RuntimeWarning)
            return np.nanmedian(seconds, axis=1)

    def slope(self, methods: Sequence[str]) -> float:
        """Seconds that one more draft token takes, over the runs of methods that differ in their length."""
        own = [self.methods.index(method) for method in methods]
        seconds, drafted = self._seconds[:, own].ravel(), self._drafted[:, own].ravel()
        there = ~np.isnan(seconds)
        return float(stats.theilslopes(seconds[there], drafted[there]).slope)


def _of_steps(row: Row) -> float:
    """Seconds of a step in a run, without its first step if known, because that step may prefill the prompt."""
    if "stepping" in row:
        return float(row["stepping"] / row.get("later_steps", row["steps"] - row["requests"]))
    return float(sum(row["profile"].values()) / row["steps"])
