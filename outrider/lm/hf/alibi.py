"""Bloom's bias by distance (ALiBi; Press et al. 2022), moved into the mask, where trees can have it right.

Relied on in transformers (read and run in 5.23): `BloomModel.forward` calls its own method
`build_alibi_tensor(attention_mask, num_heads, dtype)`, which cannot read a 4-D mask, and adds the result
`[batch * heads, 1, keys]` and then the mask `[batch, 1 or heads, queries, keys]` to the scores.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

MODELS = ("bloom",)
"""The models whose bias can be moved."""


def slopes(model: PreTrainedModel) -> Float[Tensor, " heads"] | None:
    """What each head adds per position of a key, read off the model itself; None for a model without such a bias."""
    if model.config.model_type not in MODELS:
        return None
    ones = torch.ones(1, 2, dtype=torch.long, device=model.device)
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    return model.get_decoder().build_alibi_tensor(ones, heads, torch.float32)[:, 0, 1]


@contextmanager
def bias_in_mask(model: PreTrainedModel) -> Iterator[None]:
    """While the body runs, the model adds no bias of its own; other models are left alone."""
    if model.config.model_type not in MODELS:
        yield
        return
    decoder = model.get_decoder()
    decoder.build_alibi_tensor = _none
    try:
        yield
    finally:
        del decoder.build_alibi_tensor


def _none(
    attention_mask: Float[Tensor, "rows heads queries keys"], num_heads: int, dtype: torch.dtype
) -> Float[Tensor, "heads_of_rows 1 keys"]:
    rows, keys = attention_mask.shape[0], attention_mask.shape[-1]
    return torch.zeros(rows * num_heads, 1, keys, dtype=dtype, device=attention_mask.device)
