"""The rows that a drafter's tokens are drawn from: its own sampling settings, and rows over a short list."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.coupled_dice import CoupledDice
from outrider.core.dice import Dice
from outrider.core.sampling import RowRule
from outrider.core.texts import Before
from outrider.core.types import Sampling, ShortList, Structure

AskBefore = Callable[[], Before]
"""Returns the text before each row."""
Rule = Callable[[Float[Tensor, "n width"], AskBefore], Float[Tensor, "n width"]]
"""Makes the distributions that children are drawn from, of raw logits and of the texts before the rows."""


def drafters_sampling(sampling: Sampling, structure: Structure) -> Sampling:
    """The drafter's sampling: the request's. For a branching drawn tree, a greedy request uses temperature 1."""
    if sampling.temperature > 0 or structure in ("chain", "deterministic"):
        return sampling
    return replace(sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def dice_over(few: ShortList | None, dice: Dice) -> Dice:
    """The dice for rows over the short list, if there is one. Dice whose noise belongs to tokens must know which these
    are; to others they are columns.
    """
    return dice if few is None or not hasattr(dice, "over") else cast(CoupledDice, dice).over(few)


def draft_rule(per_row: Sequence[Sampling], few: ShortList | None, like: Float[Tensor, "n width"]) -> Rule:
    """Makes the distributions that children are drawn from, over the short list if there is one.

    Penalties, biases and processors use the target's ids. With such settings, rows are made over the whole vocabulary.

    Args:
        per_row: The drafter's settings for each row.
        like: Raw logits as the rule will get them.

    Returns:
        A function of raw logits, and of a function that returns the text before each row.
    """
    if few is None or not any(s.reads_prefix or s.logit_bias or s.processors for s in per_row):
        return RowRule.of(per_row, like)
    return partial(_short_rows, few, per_row)


def _short_rows(
    few: ShortList, per_row: Sequence[Sampling], logits: Float[Tensor, "n width"], before: AskBefore
) -> Float[Tensor, "n width"]:
    wide = few.widened(logits, torch.finfo(logits.dtype).min)
    rows = RowRule.of(per_row, wide)(wide, before)[:, few.ids]
    total = rows.sum(-1, keepdim=True)
    # A processor may forbid all tokens of the list. Then the first of them is drafted, and is rejected.
    first = torch.nn.functional.one_hot(torch.zeros(len(rows), dtype=torch.long), rows.shape[1]).to(rows)
    return torch.where(total > 0, rows / total, first)
