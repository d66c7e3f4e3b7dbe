"""Faster, slower, or no difference found: speedups over plain decoding with their intervals, judged in one sentence."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outrider.bench.evidence import FEWEST, IntervalEstimate, Row
from outrider.bench.side_by_side.served import Served
from outrider.bench.side_by_side.session import Measurement
from outrider.bench.speedup import rate, speedup

FASTER, SLOWER = 1.02, 0.98
"""A way is faster only if its whole 95 % interval lies above the first, slower only if it lies below the second."""
BLOCKS, BLOCK_SECONDS = 20, 60.0
"""A load whose requests come at times is resampled in blocks of a minute, or in so many blocks if it is shorter."""

Word = Literal["faster", "slower", "no difference found", "too few to judge"]


@dataclass(frozen=True, kw_only=True)
class SpeedupVerdict:
    """How fast a way is beside the fastest in this process that drafts nothing.

    Attributes:
        baseline: The way that it is compared with.
        speedup: Seconds of the baseline over its own, for the same requests.
        num_units: How many prompts, groups or blocks of time were resampled.
    """

    way: str
    load: str
    baseline: str
    speedup: IntervalEstimate
    num_units: int

    @property
    def word(self) -> Word:
        """What the interval says."""
        if self.num_units < FEWEST:
            return "too few to judge"
        if self.speedup.low > FASTER:
            return "faster"
        return "slower" if self.speedup.high < SLOWER else "no difference found"

    @property
    def smallest(self) -> float:
        """The smallest speedup that an interval as wide as this one would have shown.

        Example:
            >>> of = dict(way="a", load="b", baseline="c", num_units=9)
            >>> round(SpeedupVerdict(speedup=IntervalEstimate(value=1.0, low=0.9, high=1.1), **of).smallest, 3)
            1.133
        """
        return FASTER * self.speedup.value / self.speedup.low

    def sentence(self) -> str:
        """The verdict for people."""
        plain = f"{self.baseline}, the fastest way in this process that drafts nothing"
        ratio = f"{self.speedup.text()} times as fast as {plain}"
        seen = f"this run could have seen a difference of {100 * (self.smallest - 1):.0f} % or more"
        match self.word:
            case "faster" | "slower":
                return f"{self.way} is {self.word} than plain decoding: {ratio}."
            case "no difference found":
                return f"No difference found between {self.way} and plain decoding: {ratio}; {seen}."
            case _:
                return f"Too few runs to judge {self.way}: {ratio}, over {self.num_units} of at least {FEWEST}."


def units(rows: Sequence[Row]) -> list[Row]:
    """What is resampled: of a closed loop its groups; of requests that come at times, blocks of time.

    Seconds of a group are those of its run. Seconds of a block are the latencies of its requests, because a run at a
    given rate takes as long however fast the engine is.
    """
    resampled: list[Row] = []
    for row in rows:
        served = [Served.read(each) for each in row["served"]]
        if row["load"].startswith("concurrency"):
            resampled.append(row)
            continue
        last = max((each.arrived for each in served), default=0.0)
        length = min(BLOCK_SECONDS, last / BLOCKS) or BLOCK_SECONDS
        blocks: dict[int, list[Served]] = defaultdict(list)
        for each in served:
            blocks[int(each.arrived / length)].append(each)
        for number, requests in blocks.items():
            seconds = sum(each.ended - each.arrived for each in requests)
            tokens = sum(each.num_tokens for each in requests)
            block = {"prompt": f"block {number}", "category": "", "tokens": tokens, "seconds": seconds}
            resampled.append({**row, **block})
    return [row for row in resampled if row["tokens"] > 0]


def of_way(rows: Sequence[Row], way: str, load: str) -> list[Row]:
    """The rows of a way under a load."""
    return [row for row in rows if (row["method"], row["load"]) == (way, load)]


def common(*ways: Sequence[Row]) -> list[str]:
    """What all ways did, by name."""
    shared = set.intersection(*({row["prompt"] for row in rows} for rows in ways)) if ways else set()
    return sorted(shared)


def baseline_of(measurement: Measurement, load: str) -> str | None:
    """The fastest way that drafts nothing and runs in this process; None if there is none."""
    rates = {}
    for way in measurement.ways:
        rows = units(of_way(measurement.rows, way, load))
        if rows and way not in measurement.drafting and way not in measurement.outside:
            rates[way] = rate(rows)
    return max(rates, key=rates.__getitem__) if rates else None


def verdict_of(measurement: Measurement, way: str, load: str, category: str | None = None) -> SpeedupVerdict | None:
    """The verdict on a way under a load; None where one of both did nothing.

    Args:
        category: Of these requests alone.
    """
    plain = baseline_of(measurement, load)
    if plain is None:
        return None
    ours, theirs = (units(of_way(measurement.rows, name, load)) for name in (way, plain))
    if category is not None:
        ours, theirs = ([row for row in rows if row["category"] == category] for rows in (ours, theirs))
    prompts = common(ours, theirs)
    ours, theirs = ([row for row in rows if row["prompt"] in prompts] for rows in (ours, theirs))
    estimate = speedup(ours, theirs, prompts)
    if estimate is None or not math.isfinite(estimate.value):
        return None
    return SpeedupVerdict(way=way, load=load, baseline=plain, speedup=estimate, num_units=len(prompts))


def chief(measurement: Measurement) -> SpeedupVerdict | None:
    """The verdict on the fastest configuration of Outrider that drafts, under the first load that has one."""
    ours = {each.name for each in measurement.plan.configurations}
    for load in measurement.plan.loads:
        verdicts = [
            verdict_of(measurement, way, load.name) for way in measurement.ways if way in measurement.drafting & ours
        ]
        known = [each for each in verdicts if each is not None]
        if known:
            return max(known, key=lambda each: each.speedup.value)
    return None


def headline(measurement: Measurement) -> str:
    """The sentence that opens every report."""
    best = chief(measurement)
    if best is None:
        return "Nothing was measured that drafts; see what was stopped or left out."
    others = [
        verdict_of(measurement, way, best.load) for way in measurement.ways if way not in (best.way, best.baseline)
    ]
    known = [each for each in others if each is not None]
    if not known:
        return best.sentence()
    fastest, count = max(known, key=lambda each: each.speedup.value), len(known) + 2
    if fastest.speedup.value <= best.speedup.value:
        return f"{best.sentence()} It is the fastest of {count} ways."
    theirs = f"{fastest.speedup.text()} times as fast as {fastest.baseline}"
    return f"{best.sentence()} The fastest of {count} ways is {fastest.way}: {theirs}."
