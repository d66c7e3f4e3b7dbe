"""The law on a real pair: drawn outputs against the target's own probabilities, by a chi-square test."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float

from outrider.core.sampling import Prefix, to_rows
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.lm.protocol import Segment
from outrider.proof.partition import Begun, Partition, Rows, partition

P_BOUND = 1e-3
"""A correct law fails the test with this probability."""
LEAST_DEGREES = 10
"""With fewer degrees of freedom, a test distinguishes too few outputs to confirm a law."""
LEAST_DRAWS = 100
"""Fewest draws after one prompt; with fewer in all, fewer of the prompts are used."""
LONGEST = 6
"""Most tokens of an output that are looked at."""
TEMPERATURES = (0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
"""Temperatures to try if none is named: the first at which enough outputs can be distinguished is used."""
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
class Samples:
    """The result of the test of drawn outputs.

    Attributes:
        test: How the draws after all prompts fit the target's probabilities.
        temperatures: The temperature of each prompt's draws.
        length: How many tokens of an output were looked at.
        num_draft_tokens: Tokens that were drafted meanwhile.
        num_accepted_tokens: How many of these were accepted.
    """

    test: ChiSquare
    temperatures: tuple[float, ...]
    length: int
    num_draft_tokens: int
    num_accepted_tokens: int

    @property
    def verdict(self) -> Literal["fits", "differs", "inconclusive"]:
        """Whether the samples fit, differ, or are too few or too similar to tell."""
        if self.test.p_value <= P_BOUND:
            return "differs"
        return "inconclusive" if self.doubt else "fits"

    @property
    def doubt(self) -> str | None:
        """Why the test is weak; None if it is not."""
        if not self.num_draft_tokens:
            return "nothing was drafted"
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
    return _tested(float(statistic), len(observed) - 1, round(sum(observed)))


def sampled_law(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    num_draws: int,
    temperature: float | None = None,
    seed: int = 0,
    progress: Callable[[Output], None] | None = None,
) -> Samples:
    """Draw outputs after some prompts, as many after each, and compare them with the target's exact probabilities.

    The first tokens of an output come from all parts of a step, so that accepted, recovered and bonus tokens are among
    what is compared. Which outputs are told apart is decided by the target's law, before any is drawn.

    Args:
        temperature: None takes, for each prompt, one at which enough outputs can be told apart.
        progress: Called with each output.
    """
    statistic, degrees, drafted, accepted = 0.0, 0, 0, 0
    prompts = prompts[: max(1, num_draws // LEAST_DRAWS)]
    temperatures, length = [], min(_length(engine, prompt) for prompt in prompts)
    seeds = np.array_split(np.arange(seed, seed + num_draws), len(prompts))
    for prompt, own in zip(prompts, seeds, strict=True):
        engine.rest()
        sampling, classes = _plan(engine, prompt, len(own), length, temperature)
        temperatures.append(sampling.temperature)
        # One token more than is looked at, so that a bonus token can be among those that are.
        outputs = engine.generate(
            [list(prompt)] * len(own),
            max_new_tokens=length + 1,
            sampling=[Sampling(temperature=sampling.temperature, seed=each) for each in own.tolist()],
            ignore_eos=True,
            progress=progress,
        )
        counts = Counter(classes.of(output.tokens[:length]) for output in outputs)
        found = chi_square([counts[each] for each in classes.expected], list(classes.expected.values()))
        statistic += np.inf if counts[None] else found.statistic
        degrees += found.degrees
        drafted += sum(output.num_draft_tokens for output in outputs)
        accepted += sum(output.num_accepted_tokens for output in outputs)
    engine.rest()
    return Samples(
        test=_tested(statistic, degrees, num_draws),
        temperatures=tuple(temperatures),
        length=length,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
    )


def _tested(statistic: float, degrees: int, num_draws: int) -> ChiSquare:
    half = torch.tensor([degrees / 2.0, statistic / 2], dtype=torch.float64)
    tail = float(torch.special.gammaincc(half[0], half[1])) if degrees else float(statistic < np.inf)
    return ChiSquare(statistic=statistic, degrees=degrees, p_value=tail, num_draws=num_draws)


def _length(engine: Engine, prompt: Sequence[int]) -> int:
    """How many tokens to look at: as many as the first step can emit, as far as there is room."""
    parts = engine.parts
    room = parts.target.max_context - len(prompt) - 1
    return max(1, min(parts.length.limit(parts.length.open()) + 1, LONGEST, room))


def _plan(
    engine: Engine, prompt: Sequence[int], num_draws: int, length: int, temperature: float | None
) -> tuple[Sampling, Partition]:
    """The temperature to draw at, and which outputs are told apart there."""
    plans: list[tuple[Sampling, Partition]] = []
    for each in TEMPERATURES if temperature is None else (temperature,):
        sampling = Sampling(temperature=each)
        plans.append((sampling, partition(_rows(engine, prompt, sampling), num_draws, length, engine.max_slots)))
        if len(plans[-1][1].expected) >= ENOUGH:
            break
    return max(plans, key=lambda plan: len(plan[1].expected))


def _rows(engine: Engine, prompt: Sequence[int], sampling: Sampling) -> Rows:
    """The target's own distributions, from forwards over whole texts."""
    target = engine.parts.target

    def rows(begun: Sequence[Begun]) -> Float[np.ndarray, "begun vocab"]:
        found = []
        for first in range(0, len(begun), engine.max_slots):
            some = begun[first : first + engine.max_slots]
            slots = [target.open() for _ in some]
            texts = [torch.tensor([*prompt, *own]).to(target.device) for own in some]
            segments = [Segment(slot=s, tokens=text, logits="last") for s, text in zip(slots, texts, strict=True)]
            logits = target.extend(segments).logits
            for slot in slots:
                target.release(slot)
            prefixes = [Prefix(prompt=prompt, output=own) for own in some]
            owners, samplings = np.arange(len(some)), [sampling] * len(some)
            found.append(to_rows(logits, owners, samplings, prefixes.__getitem__).double().cpu().numpy())
        return np.concatenate(found)

    return rows
