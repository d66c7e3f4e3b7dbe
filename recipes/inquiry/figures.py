"""Tokens per step and per second of ways to decode, from rows that count steps and rows that time them."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.report import Claim
from recipes.inquiry.papers import Paper
from recipes.inquiry.step_seconds import StepSeconds
from recipes.inquiry.trial import Method

Samples = Float[np.ndarray, " samples"]
Figure = Callable[[str], Samples]
"""A figure of a method, by its name."""
HEAD = ("method", "drafted per step", "block efficiency", "acceptance", "tokens/s")
EFFICIENCY, SPEED = "% of block efficiency", "% of tokens per second"
"""Units of gains."""


class Figures:
    r"""What counted rows say of methods, and with timed rows what they say of time.

    How many steps a text takes is mostly a matter of the text. The texts of all methods have the same law, and what a
    chain would take for each is known without noise. So a method's tokens per step are estimated as

    $$\frac{\text{tokens}}{\text{steps}} \cdot \frac{\text{a chain's steps on the same texts}}{\text{its tokens}} \cdot
    \frac{\text{the chain's tokens on all texts}}{\text{its steps}},$$

    so that texts which happen to be easy cancel. Of a chain of a fixed length the last factor is all. Every sum has the
    expectation of what it stands for, and the quotients are consistent.

    Args:
        methods: All that the rows are of; each has a control.
        rows: As `Bench.count` makes them.
        times: Seconds per step; None says nothing of time.
        lengths: Methods whose drafts differ in nothing but their length: they tell what one more draft token takes, so
            that timed steps that drafted more or fewer tokens than counted ones can be compared with them.

    Attributes:
        rows: What `sums` adds up: per prompt the mean over its seeds of each method, and of each chain on all texts.
    """

    def __init__(
        self,
        methods: Sequence[Method],
        rows: Sequence[Row],
        times: StepSeconds | None = None,
        lengths: Sequence[str] = (),
    ) -> None:
        self._methods = {method.name: method for method in methods}
        self.times = times
        self._slope = times.slope(lengths) if times is not None and lengths else None
        self.rows = _by_prompt(self._methods, rows)
        self.sums = Sums(self.rows)
        self.counting: dict[str, float] = defaultdict(float)
        for row in rows:
            self.counting[row["method"]] += row["seconds"]

    def efficiency(self, method: str, sums: Sums | None = None) -> Samples:
        """Tokens per step."""
        sums, way = sums or self.sums, self._methods[method]
        if way.chain is not None:
            return sums.ratio(_on_texts(way.chain.name, way.temperature), "tokens", "steps")
        own = sums.ratio(method, "tokens", "steps") / sums.ratio(method, "control_tokens", "control_steps")
        return own * sums.ratio(_on_texts(way.held_against.name, way.temperature), "tokens", "steps")

    def drafted(self, method: str, sums: Sums | None = None) -> Samples:
        """Draft tokens per step."""
        sums, chain = sums or self.sums, self._methods[method].chain
        if chain is not None:
            return np.full(len(sums.get(sums.methods[0], "steps")), float(chain.length))
        return sums.ratio(method, "drafted", "steps")

    def acceptance(self, method: str) -> Samples:
        """Accepted per draft token; without ends, each step emits one token more than it accepts."""
        return (self.efficiency(method) - 1) / self.drafted(method)

    def cells(self, method: str) -> list[str]:
        """A method's line in a table whose head is `HEAD`."""
        rates = (self.drafted, self.efficiency, self.acceptance)
        speed = IntervalEstimate.of(self.speed(method)).text(".1f") if self.timed(method) else "-"
        return [method, *(IntervalEstimate.of(of(method)).text() for of in rates), speed]

    def claim(
        self, paper: Paper, sentence: str, ours: IntervalEstimate, *, rests_on: Sequence[str] = (), **judged: Any
    ) -> Claim:
        """What `Paper.claim` says of a sentence, by these rows.

        Args:
            rests_on: Names of the methods that are compared.
            judged: Its further arguments.
        """
        seconds = self.cost(*rests_on)
        return paper.claim(
            sentence, ours, num_prompts=self.sums.num_prompts, seconds=seconds, rests_on=rests_on, **judged
        )

    def timed(self, method: str) -> bool:
        """Whether there are times of a method."""
        return self.times is not None and self.times.has(method)

    def speed(self, method: str) -> Samples:
        """Tokens per second of steps: tokens per step over seconds per step."""
        return self._speed(method, self.sums, self._times)

    def _speed(self, method: str, sums: Sums, times: StepSeconds) -> Samples:
        if self._slope is None:
            return self.efficiency(method, sums) / times.of(method)
        return self.efficiency(method, sums) / times.of(method, self.drafted(method, sums), self._slope)

    @property
    def _times(self) -> StepSeconds:
        if self.times is None:
            raise ValueError("no seconds are known; ask `timed` first")
        return self.times

    def best_efficiency(self, methods: Sequence[str]) -> Samples:
        """Tokens per step of the best of several methods, as somebody has it who must choose before."""
        return self._best(methods, lambda method, odd: self.efficiency(method, self.sums.half(odd)))

    def best_speed(self, methods: Sequence[str]) -> Samples:
        """Tokens per second of the best of several methods, as somebody has it who must choose before.

        What a step costs is known to who chooses, what it brings is not: the prompts are split, the times are not.
        """
        return self._best(methods, lambda method, odd: self._speed(method, self.sums.half(odd), self._times))

    def _best(self, methods: Sequence[str], figure: Callable[[str, bool], Samples]) -> Samples:
        """Each half of the prompts counts with the method that is best on the other half."""
        halves = {odd: np.array([figure(method, odd) for method in methods]) for odd in (True, False)}
        way = self._methods[methods[0]]
        texts = _on_texts(way.held_against.name, way.temperature)
        tokens, cost = np.zeros((2, halves[True].shape[1]))
        for odd, figures in halves.items():
            chosen = np.nan_to_num(halves[not odd], nan=-np.inf).argmax(0)
            own = self.sums.half(odd).get(texts, "tokens")
            tokens += own
            cost += np.where(own > 0, own / figures[chosen, np.arange(len(own))], 0.0)
        return tokens / cost

    def cost(self, *methods: str) -> float:
        """Seconds that the rows of some methods took; of chains, those of all texts."""
        run = [method for method in methods if method in self.counting] or list(self.counting)
        return sum(self.counting[method] for method in run) + (self.times.seconds if self.times else 0.0)


def _on_texts(chain: str, temperature: float) -> str:
    """What a chain on all texts of a temperature is called among the sums."""
    return f"{chain}, on texts of T={temperature:g}"


def _by_prompt(methods: dict[str, Method], rows: Sequence[Row]) -> list[Row]:
    """Means over the seeds of each prompt: a row for each method that ran, and one for each chain on all texts."""
    runs: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    texts: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    categories: dict[str, str] = {}
    for row in rows:
        for each in row["each"]:
            prompt, way = each["prompt"], methods[row["method"]]
            categories[prompt] = each["category"]
            steps, tokens = each["chains"][way.held_against.name]
            counts = [each["free_tokens"], each["free_steps"], each["free_drafted"], tokens, steps]
            runs[row["method"], prompt].append(counts)
            for name, pair in each["chains"].items():
                texts[_on_texts(name, way.temperature), prompt].append(pair)
    found: list[Row] = []
    for (method, prompt), lists in runs.items():
        means = np.mean(lists, axis=0).tolist()
        names = ("tokens", "steps", "drafted", "control_tokens", "control_steps")
        found.append({**_unit(method, prompt, categories), **dict(zip(names, means, strict=True))})
    for (name, prompt), pairs in texts.items():
        steps, tokens = np.mean(pairs, axis=0).tolist()
        found.append({**_unit(name, prompt, categories), "tokens": tokens, "steps": steps})
    return found


def _unit(method: str, prompt: str, categories: dict[str, str]) -> Row:
    return {"method": method, "prompt": prompt, "seed": 0, "category": categories[prompt]}
