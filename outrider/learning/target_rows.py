"""The target's logits along a batch, made once where several guesses compare with the same ones."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.learning.batch import Batch
from outrider.learning.divergences import worth_keeping
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


def with_rows(batch: Batch, ends: EmbeddingAndHead, last: int, width: int) -> Batch:
    """The batch with the target's logits, if they are few; otherwise the batch as it is.

    Args:
        batch: Rows with the target's last states.
        ends: The target's ends.
        last: The tap of the last states.
        width: Of the logits.
    """
    captured = batch.logits_of_target is not None or batch.rows_of_target is not None
    if captured or not worth_keeping(batch.tokens.numel(), width):
        return batch
    with torch.no_grad():
        return replace(batch, logits_of_target=ends.head(ends.norm(batch.hidden[last])))


def rows_at(
    logits: Float[Tensor, "rows length vocab"], rows: Int[Tensor, " n"], at: Int[Tensor, " n"]
) -> Float[Tensor, "n vocab"]:
    """`logits[rows, at]`, copied row by row: an index of two dimensions copies number by number on a CPU."""
    return logits.flatten(0, 1).index_select(0, rows * logits.shape[1] + at)
