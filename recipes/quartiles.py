"""Medians of repeated runs, with their quartiles or extremes, and how tables have them."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from outrider.bench.evidence import IntervalEstimate


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return {"median": float(middle), "low": float(low), "high": float(high)}


def quartiles(found: Mapping[str, float], form: str = ".2f", scale: float = 1.0) -> str:
    """A spread as tables have it, times `scale`."""
    low, middle, high = (found[name] * scale for name in ("low", "median", "high"))
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def extremes(values: Sequence[float]) -> IntervalEstimate:
    """Median, lowest and highest."""
    return IntervalEstimate(value=statistics.median(values), low=min(values), high=max(values))
