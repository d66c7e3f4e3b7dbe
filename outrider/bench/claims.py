"""Published sentences, judged by an estimate and its interval."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.evidence import IntervalEstimate

FEWEST = 8
"""With fewer prompts to resample than this, an interval says too little to judge a claim by."""
FOREVER = 1e6
"""Hours that stand for all longer times."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A published sentence, and what we found.

    Attributes:
        claim: A sentence that is true or false of a pair; without figures of ours, so that it names the claim.
        paper_value: The paper's figure, in the unit, or its words.
        interval: Our 95 % interval.
        holds: True if the whole interval is on the sentence's side, False if it is on the other, None if neither.
        note: How ours was taken, where that is not plain.
        hours: Where it is undecided, how much longer this machine would have to measure before the interval would
            leave the bound out, if the figure stayed what it is; None where that is not known.
        rests_on: Names of the methods that are compared.
        clear: Whether an interval twice as wide would leave the bound out too.
        num_prompts: How many prompts ours is taken from.
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
    hours: float | None = None
    rests_on: tuple[str, ...] = ()
    clear: bool = False
    num_prompts: int = 0


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
