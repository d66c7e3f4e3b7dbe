"""The target's states and logits along a batch; logits are made once where several guesses compare with the same."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.learning.batch import FewRows, TrainBatch, on_device
from outrider.learning.divergences import CHUNK, worth_keeping
from outrider.learning.packing import along
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.taps import tapped


def states_along(
    below: PreTrainedModel, layers: nn.ModuleList | None, taps: Sequence[int], batch: TrainBatch, *, packed: bool
) -> dict[int, Float[Tensor, "rows length hidden"]]:
    """Hidden states of a model along the texts of a batch, by tap.

    Args:
        below: The model below its output layer.
        layers: Its layers.
        packed: Whether several texts stand in one row of the forward.
    """

    def forward(tokens: Int[Tensor, "rows length"], positions: Int[Tensor, "rows length"] | None) -> list[Tensor]:
        placed = {} if positions is None else {"position_ids": positions}
        with tapped(layers, taps) as seen:
            below(input_ids=tokens, use_cache=False, **placed)
            return [seen[tap] for tap in taps]

    states = along(forward, batch) if packed else forward(batch.tokens, None)
    return dict(zip(taps, states, strict=True))


def with_rows(batch: TrainBatch, embedding_and_head: EmbeddingAndHead, last: int, width: int) -> TrainBatch:
    """The batch with the target's logits, if they are few; otherwise the batch as it is.

    Args:
        batch: Rows with the target's last states.
        embedding_and_head: Those of the target.
        last: The tap of the last states.
        width: Of the logits.
    """
    captured = batch.logits_of_target is not None or batch.rows_of_target is not None
    if captured or not worth_keeping(batch.tokens.numel(), width):
        return batch
    with torch.no_grad():
        return replace(batch, logits_of_target=embedding_and_head.head(embedding_and_head.norm(batch.hidden[last])))


def with_few_rows(
    batch: TrainBatch, embedding_and_head: EmbeddingAndHead, last: int, width: int, ids: Int[Tensor, " few"]
) -> TrainBatch:
    """The batch with the target's logits of some tokens, where the next token is learnt, if they are few; otherwise
    the batch as it is. Logits of all tokens are in memory for one chunk of places at a time.

    Args:
        batch: As for `with_rows`, like the next two.
        ids: The tokens, ascending.
    """
    captured = batch.logits_of_target is not None or batch.rows_of_target is not None
    if captured or not worth_keeping(batch.tokens.numel(), len(ids)):
        return batch
    # The places are known on the host, so that nobody waits for a device.
    learnt = np.pad(batch.host.learnt[:, 1:], ((0, 0), (0, 1))).ravel()
    [places], counted = learnt.nonzero(), learnt.cumsum() - 1
    at, numbers = (on_device(each, batch.tokens.device) for each in (places, counted.clip(0)))
    logits, covered = [], []
    with torch.no_grad():
        for states in batch.hidden[last].flatten(0, 1).index_select(0, at).split(CHUNK):
            rows = embedding_and_head.head(embedding_and_head.norm(states))[..., :width]
            logits.append(rows.index_select(-1, ids))
            covered.append(torch.isin(rows.argmax(-1), ids))
    numbers = numbers.reshape(batch.tokens.shape)
    few = FewRows(logits=torch.cat(logits), covered=torch.cat(covered), numbers=numbers)
    return replace(batch, few_of_target=few)


def rows_at(
    logits: Float[Tensor, "rows length vocab"], rows: Int[Tensor, " n"], at: Int[Tensor, " n"]
) -> Float[Tensor, "n vocab"]:
    """`logits[rows, at]`, copied row by row: an index of two dimensions copies number by number on a CPU."""
    return logits.flatten(0, 1).index_select(0, rows * logits.shape[1] + at)
