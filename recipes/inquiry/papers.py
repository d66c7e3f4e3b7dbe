"""Published sentences, judged by an estimate and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from outrider.bench.evidence import FEWEST, IntervalEstimate
from outrider.bench.report import Claim

FOREVER = 1e6
"""Hours that stand for all longer times."""


@dataclass(frozen=True, kw_only=True)
class Paper:
    """Where claims come from."""

    name: str
    url: str

    def claim(
        self,
        claim: str,
        ours: IntervalEstimate,
        *,
        num_prompts: int,
        published: float | str | None,
        unit: str,
        least: float | None = None,
        most: float | None = None,
        note: str = "",
        seconds: float | None = None,
        rests_on: Sequence[str] = (),
    ) -> Claim:
        """Judge a sentence that says that a figure is above `least` or below `most`.

        Args:
            num_prompts: How many prompts the figure is taken from.
            seconds: How long the runs took that the figure is taken from.
            rests_on: Names of the methods that are compared.
        """
        holds: bool | None = None
        hours: float | None = None
        bound = most if least is None else least
        enough = num_prompts >= FEWEST
        if not enough:
            note = "; ".join(filter(None, (note, f"too few to judge: {num_prompts} of {FEWEST}")))
        elif bound is not None and not ours.low <= bound <= ours.high:
            holds = (ours.low > bound) == (least is not None)
        elif bound is not None and seconds is not None:
            hours = hours_left(ours, bound, seconds)
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
            hours=hours,
            rests_on=tuple(rests_on),
            num_prompts=num_prompts,
            clear=holds is not None and bound is not None and times_away(ours, bound) > 2,
        )


def times_away(ours: IntervalEstimate, bound: float) -> float:
    """How far a figure is from a bound, in times of how far its interval reaches towards it."""
    reach = ours.value - ours.low if ours.value > bound else ours.high - ours.value
    return abs(ours.value - bound) / reach if reach > 0 else FOREVER


def hours_left(ours: IntervalEstimate, bound: float, seconds: float) -> float:
    r"""Hours of further measuring until an interval leaves its bound out, if the figure stays what it is.

    An interval narrows with the square root of the time spent: where the figure is d away from the bound and its
    interval reaches h > d towards it, $(h / d)^2$ times the time is needed.

    Example:
        >>> hours_left(IntervalEstimate(value=1.0, low=-1.0, high=3.0), 0.0, 3600.0)
        3.0
    """
    away = times_away(ours, bound)
    return min(FOREVER, seconds / 3600 * max(0.0, away**-2 - 1)) if away > 0 else FOREVER


def gain(ours: Float[np.ndarray, " samples"], theirs: Float[np.ndarray, " samples"]) -> IntervalEstimate:
    """By how many percent the first is above the second."""
    return IntervalEstimate.of(100 * (ours / theirs - 1))
