"""Greedy identity on a real pair: the same tokens with and without a drafter, or the first difference and its gap."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.lm.protocol import Segment

TIE = 1e-5
"""In float32 a difference counts unless the two logits differ by less than this share of their row's range."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between two greedy outputs.

    Attributes:
        prompt: Index of the prompt.
        position: Index of the first output token that differs.
        plain: The token of plain decoding.
        drafted: The token of speculative decoding.
        gap: Difference of their two logits, in a forward over the common prefix.
        span: Largest less smallest logit of that row.
    """

    prompt: int
    position: int
    plain: int
    drafted: int
    gap: float
    span: float

    @property
    def tie(self) -> bool:
        """Whether the gap is within rounding."""
        return self.gap < TIE * self.span


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The number of compared greedy tokens, and the differences."""

    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether all tokens are equal up to ties."""
        return all(difference.tie for difference in self.differences)


def identity(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Identity:
    """Decode greedily with the engine's drafter and without it, and compare token by token."""
    greedy = Sampling(temperature=0.0, seed=0)
    drafted = engine.generate(prompts, max_new_tokens=max_new_tokens, sampling=greedy)
    undrafted = engine.plain()
    plain = undrafted.generate(prompts, max_new_tokens=max_new_tokens, sampling=greedy)
    undrafted.rest()
    found = []
    for i, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        pairs = zip(ours.tokens, theirs.tokens, strict=False)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            prefix = [*prompts[i], *theirs.tokens[:at]]
            found.append(_difference(engine, prefix, i, at, theirs.tokens[at], ours.tokens[at]))
    return Identity(num_tokens=sum(len(output.tokens) for output in plain), differences=tuple(found))


def _difference(
    engine: Engine, prefix: Sequence[int], prompt: int, position: int, plain: int, drafted: int
) -> Difference:
    target = engine.parts.target
    slot = target.open()
    segment = Segment(slot=slot, tokens=torch.tensor(list(prefix)).to(target.device), logits="last")
    row = target.extend([segment]).logits[0].float()
    target.release(slot)
    return Difference(
        prompt=prompt,
        position=position,
        plain=plain,
        drafted=drafted,
        gap=abs(float(row[plain] - row[drafted])),
        span=float(row.max() - row.min()),
    )
