"""The law on a real pair: drawn sequences against the target's own probabilities, by a chi-square test."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float

from outrider.engine.engine import Engine
from outrider.lm.protocol import Segment
from outrider.sampling import Prefix, to_rows
from outrider.types import Sampling

LEAST_EXPECTED = 5.0
"""Sequences expected less often than this share one category."""


@dataclass(frozen=True, kw_only=True)
class ChiSquare:
    """A goodness-of-fit test; a small p-value speaks against the law."""

    statistic: float
    degrees: int
    p_value: float
    num_draws: int


def chi_square(observed: Sequence[float], expected: Sequence[float]) -> ChiSquare:
    r"""$\sum (o - e)^2 / e$ with its p-value, the upper tail for one degree of freedom less than categories.

    Example:
        >>> round(chi_square([48, 52], [50, 50]).p_value, 3)
        0.689
    """
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = len(observed) - 1
    tail = torch.special.gammaincc(torch.tensor(degrees / 2.0).double(), torch.tensor(statistic / 2).double())
    return ChiSquare(
        statistic=float(statistic),
        degrees=degrees,
        p_value=float(tail) if degrees else 1.0,
        num_draws=round(sum(observed)),
    )


def sampled_law(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    num_draws: int,
    length: int = 3,
    progress: Callable[[int], None] | None = None,
) -> ChiSquare:
    """Draw the first `length` tokens after a prompt many times, and compare with the target's exact probabilities.

    The first token of an output may come from any part of a step, so sequences of several tokens look at accepted,
    recovered and bonus tokens alike. Each step drafts as deep as the output is long.
    """
    counts: Counter[tuple[int, ...]] = Counter()
    batch = max(1, engine.max_slots)
    seed = sampling.seed or 0
    for first in range(0, num_draws, batch):
        settings = [replace(sampling, seed=seed + k) for k in range(first, min(first + batch, num_draws))]
        # One token more than is looked at, so that a bonus token can be among those that are.
        outputs = engine.generate(
            [list(prompt)] * len(settings), max_new_tokens=length + 1, sampling=settings, ignore_eos=True
        )
        counts.update(tuple(output.tokens[:length]) for output in outputs)
        if progress is not None:
            progress(len(settings))
    engine.rest()
    likely = _likely_sequences(engine, prompt, sampling, length, LEAST_EXPECTED / num_draws)
    observed = [counts[sequence] for sequence in likely]
    expected = [mass * num_draws for mass in likely.values()]
    rest = num_draws - sum(expected)
    if rest > LEAST_EXPECTED:
        observed.append(num_draws - sum(observed))
        expected.append(rest)
    return chi_square(observed, expected)


def _likely_sequences(
    engine: Engine, prompt: Sequence[int], sampling: Sampling, length: int, least: float
) -> dict[tuple[int, ...], float]:
    """Sequences of `length` tokens at least as probable as `least`, with their probabilities."""
    level: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = {}
        for sequence, mass in level.items():
            row = _row(engine, prompt, sequence, sampling)
            for token in np.flatnonzero(row * mass >= least).tolist():
                longer[(*sequence, token)] = mass * float(row[token])
        level = longer
    return level


def _row(
    engine: Engine, prompt: Sequence[int], output: Sequence[int], sampling: Sampling
) -> Float[np.ndarray, " vocab"]:
    target = engine.parts.target
    slot = target.open()
    tokens = torch.tensor([*prompt, *output]).to(target.device)
    logits = target.extend([Segment(slot=slot, tokens=tokens, logits="last")]).logits
    target.release(slot)
    prefix = Prefix(prompt=prompt, output=output)
    return to_rows(logits, np.zeros(1, dtype=np.int64), [sampling], lambda _: prefix)[0].double().cpu().numpy()
