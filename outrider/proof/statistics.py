"""The law on a real pair: drawn outputs against the target's own probabilities, by a chi-square test and two tilts."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.progress import task
from outrider.core.types import Request, Sampling
from outrider.decoding.protocol import Cycle, Parts
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.proof.partition import Begun, Partition, Rows, partition
from outrider.proof.plain import is_exact, plain_logits, transformers_rows
from outrider.proof.watched import run_watched
from outrider.verifiers.protocol import Carrying, child_rows

P_BOUND = 1e-4
"""A correct law fails the tests of samples with about this probability, all of them together."""
LEAST_DEGREES = 10
"""With fewer degrees of freedom, a test distinguishes too few outputs to confirm a law."""
LEAST_DRAWS = 100
"""Fewest draws after one prompt; with fewer in all, fewer of the prompts are used."""
FACTORS = (2, 4, 8, 16, 32, 64)
"""How many times as many outputs are drawn where those that were asked for tell too little."""
AT_ONCE = 2
"""Draws between two looks at the clock, in units of what runs at once."""
DRAWING = 0.6
"""What part of the time outputs are drawn in. To judge them takes the rest: a forward over each, beside its plan."""
LONGEST = 6
"""Most tokens of an output that are looked at."""
SHORT = 3
"""The same where there is time for few outputs only: shorter ones are more."""
TEMPERATURES = (0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
"""Temperatures to try if none is named: the first at which enough outputs can be distinguished is used."""
SETTINGS = (
    Sampling(),
    Sampling(top_p=0.9),
    Sampling(repetition_penalty=1.3),
    Sampling(top_k=50, presence_penalty=0.5),
)
"""The settings of each prompt's draws, beside the temperature."""
UNBOUND = tuple(replace(each, top_p=1.0, top_k=0) for each in SETTINGS)
"""The same for targets that do not compute in float32: rounding moves tokens across the bounds of top-k and top-p."""
LOOSE = 1e-3
"""By what share the bounds of top-p are looser for drawn outputs: their forwards round otherwise than those that judge
them, and an output of a token at the bound is no fault. No number of draws that anybody makes tells the difference.
"""
LEAST_LIKELY = 1e-6
"""Tokens less likely than this are as likely as this for the tilt towards likely tokens."""
ENOUGH = 12
"""How many classes of outputs are enough for one prompt."""


@dataclass(frozen=True, kw_only=True)
class ChiSquare:
    """A goodness-of-fit test; a small p-value speaks against the law."""

    statistic: float
    degrees: int
    p_value: float
    num_draws: int


@dataclass(frozen=True, kw_only=True)
class Tilt:
    """A test with one degree of freedom: whether tokens with some property come more often than they should.

    Attributes:
        z: The excess in standard deviations; normal where the law holds.
        num_tokens: How many drawn tokens it is about.
    """

    z: float
    num_tokens: int

    @property
    def p_value(self) -> float:
        """How likely an excess or a lack is at least as large."""
        return two_sided(self.z)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The result of the test of drawn outputs.

    Attributes:
        test: How the draws after all prompts fit the target's probabilities.
        likely: Whether likely tokens are preferred.
        liked: Whether tokens are preferred that the drafter likes more than the target does; None where no step shows
            it.
        temperatures: The temperature of each prompt's draws.
        length: How many tokens of an output were looked at.
        num_draft_tokens: Tokens that were drafted meanwhile.
        num_accepted_tokens: How many of these were accepted.
    """

    test: ChiSquare
    likely: Tilt
    liked: Tilt | None
    temperatures: tuple[float, ...]
    length: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def p_value(self) -> float:
        """The smallest p-value of the tests, corrected for their number."""
        p_values = [self.test.p_value, self.likely.p_value, *([] if self.liked is None else [self.liked.p_value])]
        return min(1.0, min(p_values) * len(p_values))

    @property
    def verdict(self) -> Literal["fits", "differs", "inconclusive"]:
        """Whether the samples fit, differ, or are too few or too similar to tell."""
        if self.p_value <= P_BOUND:
            return "differs"
        return "inconclusive" if self.doubt else "fits"

    @property
    def doubt(self) -> str | None:
        """Why the test is weak; None if it is not."""
        if not self.num_draft_tokens:
            return "nothing was drafted; give a drafter that drafts here, such as a draft model"
        if not self.num_accepted_tokens:
            return "no draft token was accepted; draw more, or at a lower temperature"
        if self.test.degrees < LEAST_DEGREES:
            few = f"{self.test.degrees} degrees of freedom tell too few outputs apart"
            return f"{few}; draw more, or at a higher temperature"
        return None


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> ChiSquare:
    r"""$\sum (o - e)^2 / e$ with its p-value, the upper tail for one degree of freedom less than categories.

    Example:
        >>> round(chi_square([48, 52], [50, 50]).p_value, 3)
        0.689
    """
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    return tested(float(statistic), len(observed) - 1, round(sum(observed)))


def two_sided(z: float) -> float:
    """How likely a standard normal number is at least as far from 0.

    Example:
        >>> round(two_sided(-1.96), 3)
        0.05
    """
    return math.erfc(abs(z) / math.sqrt(2))


def sampled_law(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_draws: int,
    temperature: float | None = None,
    seed: int = 0,
    until: Deadline | None = None,
) -> Samples:
    """Draw outputs after some prompts, as many after each, and compare them with the target's exact probabilities.

    The outputs of all prompts are drawn in the same batches, each prompt's under settings of its own, and compared with
    what transformers' forwards and processors say. The first tokens of an output come from all parts of a step, so that
    accepted, recovered and bonus tokens are among what is compared. Which outputs are told apart is decided by the
    target's law and the number of draws, never by what was drawn.

    Args:
        num_draws: How many outputs to draw.
        temperature: None takes, for each prompt, one at which enough outputs can be told apart.
        until: When the test ends, about; outputs are drawn in a part of the time. If there is time for few of them,
            they are shorter and follow fewer prompts, so that they tell more. If time is left, the draws tell too
            little and more would tell enough, more are drawn. None draws the number that was asked for.
    """
    drawing = (until or ENDLESS).part(DRAWING)
    length = min(_length(engine, prompt) for prompt in prompts)
    engine.rest()
    expected = num_draws
    if until is not None:
        short = min(SHORT, length)
        affordable = _affordable(engine, prompts[0], short, drawing)
        if affordable * (short + 1) / (length + 1) < min(num_draws, LEAST_DRAWS):
            length = short
        expected = max(1, int(min(num_draws, affordable * (short + 1) / (length + 1))))
    prompts = prompts[: max(1, expected // LEAST_DRAWS)]
    bases = SETTINGS if is_exact(engine.parts.target) else UNBOUND
    asked = [_Asked(engine, prompt) for prompt in prompts]
    with task("which outputs are told apart"):
        settings = [
            _plan(each, bases[i % len(bases)], expected // len(prompts), length, temperature).sampling
            for i, each in enumerate(asked)
        ]
    watcher = _Preferences(engine.parts)
    outputs: list[Output] = []
    # Draws of different prompts take turns, so that a batch has different settings.
    size = AT_ONCE * max(len(prompts), engine.max_slots)
    wanted = num_draws
    with task("drawn outputs", num_draws, "outputs") as bar:
        while True:
            count = min(size, wanted - len(outputs))
            requests = [
                Request(
                    id=f"draw {number}",
                    prompt=tuple(prompts[number % len(prompts)]),
                    # One token more than is looked at, so that a bonus token can be among those that are.
                    max_new_tokens=length + 1,
                    sampling=replace(settings[number % len(prompts)], seed=seed + number),
                )
                for number in range(len(outputs), len(outputs) + count)
            ]
            outputs += run_watched(engine, requests, watcher.look, lambda output: bar.advance())
            if len(outputs) == wanted or drawing.passed:
                samples = _judged(engine, asked, settings, outputs, watcher, length)
                more = 0
                if until is not None and not drawing.passed and samples.verdict == "inconclusive":
                    more = _enough(asked, settings, samples, length)
                if not more:
                    return samples
                wanted = more
                bar.reach(len(outputs), wanted)


def _affordable(engine: Engine, prompt: Sequence[int], length: int, drawing: Deadline) -> float:
    """About how many outputs of a length there is time to draw, by the time that a batch of them takes."""
    before = drawing.clock()
    requests = [
        Request(
            id=f"trial {number}",
            prompt=tuple(prompt),
            max_new_tokens=length + 1,
            sampling=Sampling(temperature=1.0, seed=number),
        )
        for number in range(engine.max_slots)
    ]
    run_watched(engine, requests, lambda cycle: None)
    seconds = (drawing.clock() - before) / len(requests)
    return drawing.left / seconds if seconds else math.inf


def _enough(asked: Sequence["_Asked"], settings: Sequence[Sampling], samples: Samples, length: int) -> int:
    """How many draws in all may tell what those that were made do not; 0 where no number of them would."""
    count = samples.test.num_draws
    if not samples.num_draft_tokens:
        return 0
    if samples.test.degrees >= LEAST_DEGREES:
        return 2 * count
    for factor in FACTORS:
        each = factor * count // len(asked)
        plans = (_plan(a, s, each, length, s.temperature) for a, s in zip(asked, settings, strict=True))
        if sum(len(plan.classes.expected_counts) - 1 for plan in plans) >= LEAST_DEGREES:
            return factor * count
    return 0


def _judged(
    engine: Engine,
    asked: Sequence["_Asked"],
    settings: Sequence[Sampling],
    outputs: Sequence[Output],
    watcher: "_Preferences",
    length: int,
) -> Samples:
    """The tests of some outputs. Output `n` is one of prompt `n` modulo the number of prompts."""
    statistic, degrees = 0.0, 0
    likely, liked = _Excess(), _Excess()
    for i, (own, sampling) in enumerate(zip(asked, settings, strict=True)):
        numbers = list(range(i, len(outputs), len(asked)))
        if not numbers:
            continue
        plan = _plan(own, sampling, len(numbers), length, sampling.temperature)
        counts = Counter(plan.classes.of(outputs[number].tokens[:length]) for number in numbers)
        result = chi_square(
            [counts[each] for each in plan.classes.expected_counts], list(plan.classes.expected_counts.values())
        )
        statistic += np.inf if counts[None] else result.statistic
        degrees += result.degrees
        for first in range(0, len(numbers), engine.max_slots):
            some = numbers[first : first + engine.max_slots]
            texts = [outputs[number].tokens[:length] for number in some]
            rows = _along(engine, own.prompt, texts, plan.sampling)
            for number, text, along in zip(some, texts, rows, strict=True):
                drawn = torch.tensor(text)
                likely.add(along, along.clamp_min(LEAST_LIKELY).log(), drawn)
                places, preferred = watcher.of(f"draw {number}", length)
                liked.add(along[places], preferred, drawn[places])
    return Samples(
        test=tested(statistic, degrees, len(outputs)),
        likely=likely.tilt,
        liked=liked.tilt if liked.num_tokens else None,
        temperatures=tuple(sampling.temperature for sampling in settings),
        length=length,
        num_draft_tokens=sum(output.num_draft_tokens for output in outputs),
        num_accepted_tokens=sum(output.num_accepted_tokens for output in outputs),
    )


class _Preferences:
    """Which tokens the draft's row at the root of a step likes more than the target's does; changes in place.

    The next token after a root is drawn from the target's row there, whatever was emitted before, if each step keeps
    the law by itself. A verifier that carries something from step to step keeps it over all steps only, so then only
    the first step counts. Where drafts lie ahead, a step does not begin anew at its root.
    """

    def __init__(self, parts: Parts) -> None:
        self._preferences: dict[str, list[tuple[int, Int[np.ndarray, " bytes"]]]] = {}
        self._vocab_size = parts.target.vocab_size
        self._first_only = isinstance(parts.verifier, Carrying)
        self._blind = parts.decoding.drafts_ahead

    def look(self, cycle: Cycle) -> None:
        """Note the preferences of one step."""
        draft, roots = cycle.draft, cycle.draft.offsets[:-1]
        inner = np.flatnonzero(draft.first_child[roots + 1] > draft.first_child[roots])
        if self._blind or not len(inner):
            return
        target_rows = cycle.rows[torch.from_numpy(roots[inner]).to(cycle.rows.device)]
        liked = np.packbits((child_rows(draft, roots[inner], target_rows) > target_rows).cpu().numpy(), axis=1)
        for bits, i in zip(liked, inner.tolist(), strict=True):
            state = cycle.states[i]
            if not (self._first_only and state.num_steps):
                self._preferences.setdefault(state.request.id, []).append((len(state.output), bits))

    def of(self, id: str, length: int) -> tuple[list[int], Float[Tensor, "places vocab"]]:
        """The places of a request's output at which steps begin, and 1 for each token that is liked there, else 0."""
        noted = [(place, bits) for place, bits in self._preferences.get(id, []) if place < length]
        if not noted:
            return [], torch.empty(0, self._vocab_size)
        liked = np.unpackbits(np.stack([bits for _, bits in noted]), axis=1, count=self._vocab_size)
        return [place for place, _ in noted], torch.from_numpy(liked).double()


@dataclass(kw_only=True)
class _Excess:
    """How far drawn tokens' scores lie above their means, and the variance of that; changes in place."""

    num_tokens: int = 0
    above: float = 0.0
    variance: float = 0.0

    def add(self, rows: Float[Tensor, "n vocab"], scores: Float[Tensor, "n vocab"], tokens: Int[Tensor, " n"]) -> None:
        """Add some tokens, given the rows that they should have been drawn from and the scores of all tokens."""
        means = (rows * scores).sum(1, keepdim=True)
        self.variance += float((rows * (scores - means) ** 2).sum())
        self.above += float((scores - means).gather(1, tokens[:, None]).sum())
        self.num_tokens += len(tokens)

    @property
    def tilt(self) -> Tilt:
        """The test. Where no variance is left, nothing can be told."""
        z = self.above / math.sqrt(self.variance) if self.variance > 0 else 0.0
        return Tilt(z=z, num_tokens=self.num_tokens)


def tested(statistic: float, degrees: int, num_draws: int) -> ChiSquare:
    """The test whose statistic has a chi-square distribution with so many degrees of freedom where the law holds."""
    half = torch.tensor([degrees / 2.0, statistic / 2], dtype=torch.float64)
    tail = float(torch.special.gammaincc(half[0], half[1])) if degrees else float(statistic < np.inf)
    return ChiSquare(statistic=statistic, degrees=degrees, p_value=tail, num_draws=num_draws)


def _length(engine: Engine, prompt: Sequence[int]) -> int:
    """How many tokens to look at: as many as the first step can emit, as far as there is room."""
    parts = engine.parts
    room = parts.target.max_context - len(prompt) - 1
    return max(1, min(parts.length.limit(parts.length.open()) + 1, LONGEST, room))


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How to draw after one prompt, and which outputs are told apart."""

    sampling: Sampling
    classes: Partition


class _Asked:
    """A prompt, and the target's logits after beginnings of its outputs: each beginning is read once, whichever
    temperatures are tried and however often the draws are judged.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int]) -> None:
        self.prompt, self.at_once = list(prompt), engine.max_slots
        self._target = engine.parts.target
        self._logits: dict[Begun, Float[Tensor, " vocab"]] = {}

    def rows(self, sampling: Sampling) -> Rows:
        """The target's own distributions after some beginnings."""

        def rows(begun: Sequence[Begun]) -> Float[np.ndarray, "begun vocab"]:
            self._read([each for each in dict.fromkeys(begun) if each not in self._logits])
            found = []
            for each in begun:
                text = [[*self.prompt, *each]]
                found.append(transformers_rows(self._logits[each][None], text, len(self.prompt), sampling, LOOSE)[0])
            return torch.stack(found).cpu().numpy()

        return rows

    def _read(self, begun: Sequence[Begun]) -> None:
        """Keep the logits after some beginnings; those of one length are read together."""
        for _, alike in groupby(sorted(begun, key=len), key=len):
            some = list(alike)
            for first in range(0, len(some), self.at_once):
                part = some[first : first + self.at_once]
                texts = [[*self.prompt, *each] for each in part]
                # A view would keep the logits of all positions.
                self._logits |= zip(part, plain_logits(self._target, texts, 1)[:, 0].clone(), strict=True)


def _plan(asked: _Asked, base: Sampling, num_draws: int, length: int, temperature: float | None) -> _Plan:
    """The temperature to draw at, beside some other settings, and which outputs are told apart there."""
    plans: list[_Plan] = []
    for each in TEMPERATURES if temperature is None else (temperature,):
        sampling = replace(base, temperature=each)
        classes = partition(asked.rows(sampling), num_draws, length, asked.at_once)
        plans.append(_Plan(sampling=sampling, classes=classes))
        if len(plans[-1].classes.expected_counts) >= ENOUGH:
            break
    return max(plans, key=lambda plan: len(plan.classes.expected_counts))


def _along(
    engine: Engine, prompt: Sequence[int], outputs: Sequence[Sequence[int]], sampling: Sampling
) -> Float[Tensor, "outputs length vocab"]:
    """The distributions that each token of some outputs of one length should have been drawn from."""
    length = len(outputs[0])
    texts = [[*prompt, *output[:-1]] for output in outputs]
    logits = plain_logits(engine.parts.target, texts, length)
    rows = [
        transformers_rows(logits[:, k], [text[: len(prompt) + k] for text in texts], len(prompt), sampling, LOOSE)
        for k in range(length)
    ]
    return torch.stack(rows, 1).cpu()
