"""The target's logits along a batch, made once where several guesses compare with the same ones."""

from dataclasses import replace

import torch

from outrider.lm.ends import Ends
from outrider.training.batches import Batch
from outrider.training.divergences import worth_keeping


def with_rows(batch: Batch, ends: Ends, last: int, width: int) -> Batch:
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
