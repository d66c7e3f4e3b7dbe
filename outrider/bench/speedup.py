"""How much faster one way to decode is than another, from runs in turns that were repeated."""

import statistics
from collections import defaultdict
from collections.abc import Sequence

from outrider.bench.evidence import IntervalEstimate, Row, Sums


def per_prompt(rows: Sequence[Row]) -> dict[str, tuple[float, float]]:
    """Tokens and seconds of each prompt of one way, from all its rounds.

    Seconds are the median over the rounds; where sampled rounds differ in length, the median seconds per token, times
    the mean number of tokens.
    """
    runs: dict[str, list[Row]] = defaultdict(list)
    for each in rows:
        runs[each["prompt"]].append(each)
    totals = {}
    for prompt, rounds in runs.items():
        tokens = statistics.mean(run["tokens"] for run in rounds)
        totals[prompt] = (tokens, tokens * statistics.median(run["seconds"] / run["tokens"] for run in rounds))
    return totals


def rate(rows: Sequence[Row]) -> float:
    """Tokens per second of one way: sum of tokens over sum of each prompt's median seconds."""
    pairs = per_prompt(rows).values()
    return sum(tokens for tokens, _ in pairs) / sum(seconds for _, seconds in pairs)


def speedup(rows: Sequence[Row], plain: Sequence[Row], prompts: Sequence[str]) -> IntervalEstimate | None:
    """Speedup of rows over plain on some prompts, resampled; None without prompts."""
    if not prompts:
        return None
    category = {each["prompt"]: each.get("category", "") for each in rows}
    table = [
        {"method": name, "prompt": p, "category": category[p], "seed": 0, "tokens": tokens, "seconds": seconds}
        for name, totals in (("ours", per_prompt(rows)), ("plain", per_prompt(plain)))
        for p in prompts
        for tokens, seconds in [totals[p]]
    ]
    sums = Sums(table)
    return IntervalEstimate.of(sums.speed("ours") / sums.speed("plain"))
