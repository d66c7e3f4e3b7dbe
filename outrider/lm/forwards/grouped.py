"""Attention with grouped heads as they are: no copy of the keys and values for each head that reads them.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): an attention layer looks its function up in
`AttentionInterface` by its config's `_attn_implementation`, at every call; `module.num_key_value_groups` query heads
in a row read one key head; for `sdpa` transformers repeats the keys of a forward of two tokens or more that has a mask.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "outrider_grouped"


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """What transformers' `sdpa` computes. The query heads of one key head stand in its queries' place, one after
    another.

    Copies are made without asking whether they are needed: an exported graph would then serve widths of one kind only.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    shared = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == 1
    if groups == 1 or attention_mask is None or not shared or named.get("position_bias") is not None:
        result: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **named)
        return result
    rows, heads, width, dim = query.shape
    seen = torch.nn.functional.scaled_dot_product_attention(
        query.clone(memory_format=torch.contiguous_format).view(rows, heads // groups, groups * width, dim),
        key,
        value,
        attn_mask=torch.cat([attention_mask] * groups, dim=2),
        dropout_p=named.get("dropout", 0.0),
        scale=named.get("scaling"),
    )
    by_query = seen.unflatten(2, (groups, width)).permute(0, 3, 1, 2, 4)
    return by_query.clone(memory_format=torch.contiguous_format).view(rows, width, heads, value.shape[-1]), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def group(model: PreTrainedModel) -> None:
    """Let a model attend so, if it attends by `sdpa`."""
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation == "sdpa":
        text._attn_implementation = NAME
