"""Greedy identity on a real pair: the same tokens with and without a drafter, or the first difference and its gap."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.progress import task
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import succeeded
from outrider.lm.protocol import Segment
from outrider.proof.plain import is_exact

TIE = 1e-5
"""In float32 a difference counts unless the two logits differ by less than this share of their row's range."""
LEAST_TOKENS = 4
"""Fewest tokens of a text that are decoded, however long that takes."""
COARSE_TIE = 0.1
"""The same for a target that computes in less, or by quantised weights."""


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
        bound: The share of the span below which a gap is within rounding.
    """

    prompt: int
    position: int
    plain: int
    drafted: int
    gap: float
    span: float
    bound: float = TIE

    @property
    def tie(self) -> bool:
        """Whether the gap is within rounding."""
        return self.gap < self.bound * self.span


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The number of compared greedy tokens, and the differences."""

    num_tokens: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether all tokens are equal up to ties."""
        return all(difference.tie for difference in self.differences)


def identity(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, until: Deadline = ENDLESS
) -> Identity:
    """Decode greedily with the engine's drafter and without it, and compare token by token.

    Args:
        until: Texts that are not whole then are compared as far as both are decoded.
    """
    undrafted = engine.plain()
    plain = _greedy(undrafted, prompts, max_new_tokens, until.part(0.5), "greedy texts without drafts")
    longest = max(map(len, plain))
    drafted = _greedy(engine, prompts, longest, until, "greedy texts with drafts")
    differences, compared = [], 0
    for i, (ours, theirs) in enumerate(zip(drafted, plain, strict=True)):
        pairs = list(zip(ours, theirs, strict=False))
        compared += len(pairs)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if at is not None:
            differences.append(_difference(engine, [*prompts[i], *theirs[:at]], i, at, theirs[at], ours[at]))
    return Identity(num_tokens=compared, differences=tuple(differences))


def _greedy(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, until: Deadline, what: str
) -> list[list[int]]:
    """The tokens of greedy texts, as far as they are decoded until a deadline; a few at least.

    Args:
        what: What is done, for people.
    """
    greedy, least = Sampling(temperature=0.0, seed=0), min(LEAST_TOKENS, max_new_tokens)
    texts: dict[str, list[int]] = {}
    going: set[str] = set()
    try:
        for prompt in prompts:
            id = engine.add(prompt, max_new_tokens=max_new_tokens, sampling=greedy)
            texts[id] = []
            going.add(id)
        with task(what, len(prompts) * max_new_tokens, "tokens") as progress:
            while going and not (until.passed and all(len(texts[id]) >= least for id in going)):
                for update in map(succeeded, engine.step()):
                    texts[update.id] += update.tokens
                    progress.advance(len(update.tokens))
                    if update.output is not None:
                        going.remove(update.id)
    finally:
        for id in going:
            engine.cancel(id)
        engine.rest()
    return list(texts.values())


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
        bound=TIE if is_exact(target) else COARSE_TIE,
    )
