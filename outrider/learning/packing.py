"""Several texts in one row of a model's forward, one behind another, without padding between short texts.

Positions begin at 0 in each text, and no token sees another text. So the states are those of texts that stand alone,
and neither a loss nor a drafter's layers know of the packing.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): without a mask and a cache, a model takes positions that
begin again for the beginning of another text. `check_apart` tries it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.inputs import InputError
from outrider.learning.batch import PADDING, TrainBatch, on_device

_TRIED = (3, 2, 4)
"""Lengths of the texts on which a model is tried."""
_ABSOLUTE, _RELATIVE = 1e-3, 5e-2


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Where the tokens of a batch stand in rows that hold several texts.

    Attributes:
        source: For each place of the packed rows, its place in the padded ones, counted from the begin of the batch.
        positions: Of each place of the packed rows in its text. What fills a row up is a text of its own.
        filled: Whether a packed place holds a token.
        back: For each place of the padded rows, its packed place; 0 in the padding.
    """

    source: Int[np.ndarray, "packed width"]
    positions: Int[np.ndarray, "packed width"]
    filled: Bool[np.ndarray, "packed width"]
    back: Int[np.ndarray, "rows length"]

    @classmethod
    def of(cls, lengths: Sequence[int]) -> "Packing":
        """The packing of texts in rows as long as the longest of them. Long texts are placed first.

        Example:
            >>> Packing.of([2, 4, 2]).source.tolist()
            [[4, 5, 6, 7], [0, 1, 8, 9]]
        """
        width = max(lengths)
        rows: list[list[int]] = []
        room: list[int] = []
        for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
            fits = next((row for row, left in enumerate(room) if left >= lengths[number]), len(rows))
            if fits == len(rows):
                rows.append([])
                room.append(width)
            rows[fits].append(number)
            room[fits] -= lengths[number]
        source = np.zeros((len(rows), width), dtype=np.int64)
        positions, filled = source.copy(), np.zeros_like(source, dtype=bool)
        back = np.zeros((len(lengths), width), dtype=np.int64)
        for row, texts in enumerate(rows):
            begin = 0
            for number in texts:
                there = slice(begin, begin + lengths[number])
                within = np.arange(lengths[number])
                source[row, there], positions[row, there], filled[row, there] = number * width + within, within, True
                back[number, : lengths[number]] = row * width + begin + within
                begin = there.stop
            positions[row, begin:] = np.arange(width - begin)
        return cls(source=source, positions=positions, filled=filled, back=back)


def along(
    forward: Callable[[Int[Tensor, "rows length"], Int[Tensor, "rows length"]], Sequence[Tensor]], batch: TrainBatch
) -> list[Float[Tensor, "rows length hidden"]]:
    """The states that a forward makes along packed texts, as rows of the batch. In the padding they mean nothing.

    Args:
        forward: Makes states from tokens and their positions.
    """
    device, (rows, length) = batch.tokens.device, batch.tokens.shape
    packing = Packing.of(batch.host.lengths.tolist())
    width = packing.back.shape[1]
    # Rows may be wider than their longest text.
    source = packing.source // width * length + packing.source % width
    source_on, positions, filled, back = (
        on_device(each, device) for each in (source, packing.positions, packing.filled, packing.back)
    )
    tokens = torch.where(filled, batch.tokens.flatten()[source_on], PADDING)
    outputs = []
    for states in forward(tokens, positions):
        unpacked = states.flatten(0, 1).index_select(0, back.flatten()).unflatten(0, (rows, width))
        outputs.append(torch.nn.functional.pad(unpacked, (0, 0, 0, length - width)))
    return outputs


@torch.no_grad()
def check_apart(model: PreTrainedModel, what: str) -> None:
    """Raise InputError if a model lets texts of one row see each other, found by trying.

    Args:
        what: What the model is, for the message.
    """
    device, below = model.device, model.base_model
    bounds = np.cumsum((0, *_TRIED))
    tokens = torch.arange(3, 3 + bounds[-1], device=device)[None] % model.get_input_embeddings().weight.shape[0]
    positions = torch.cat([torch.arange(n, device=device) for n in _TRIED])[None]
    try:
        together = below(input_ids=tokens, position_ids=positions, use_cache=False)[0][0]
        alone = torch.cat(
            [below(input_ids=tokens[:, i:j], use_cache=False)[0][0] for i, j in pairwise(bounds.tolist())]
        )
        independent = bool(torch.isfinite(alone).all()) and torch.allclose(
            together, alone, rtol=_RELATIVE, atol=_ABSOLUTE
        )
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        independent = False
    if not independent:
        raise InputError(
            f"{what}, a {model.config.model_type}, cannot read several texts in one row as it reads each alone; leave "
            "out --pack"
        )
