"""Attention by torch's kernels without what they can do without: masks of chains, a copy of the keys and values for
each head that reads them, and padding in all that is not attention.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): an attention layer looks its function up in
`AttentionInterface` by its config's `_attn_implementation`, at every call; `module.num_key_value_groups` query heads
in a row read one key head; for `sdpa` transformers repeats the keys of a forward of two tokens or more that has a mask.
A 4-D mask reaches the function as it is; where there is none and `AttentionMaskInterface` does not know the name of the
function, none is made.

Relied on in torch (read and run in 2.13): on CPUs `_scaled_dot_product_flash_attention_for_cpu` also returns the
logarithm of each query's sum of weights. It is private. On GPUs `causal_lower_right` makes no mask in bfloat16 and
float16, for heads of up to 256 numbers.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from outrider.lm.forwards.attend import attend, attends
from outrider.lm.slots.layout import Layout
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear

NAME, LEAN, ALONE = "outrider_grouped", "outrider_lean", "outrider_attend"
FLASH_DIM = 256
"""Largest head that the kernels without masks take on GPUs."""


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """What transformers' `sdpa` computes, without a copy of keys and values where all heads share a mask.

    Where nodes are `laid_out`, queries and results are those of the nodes, one after another.
    """
    return _of_nodes(_grouped, module, query, key, value, attention_mask, **named)


def invariant_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """The same by `attend`: the bits of a node's result do not depend on what else is computed."""
    return _of_nodes(_invariant, module, query, key, value, attention_mask, **named)


def _of_nodes(
    read: Callable[..., Tensor], module: nn.Module, query: Tensor, *others: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """What queries read; those of nodes, one after another, where they are `laid_out`."""
    layout = getattr(_NODES, "layout", None)
    if layout is None:
        return read(module, query, *others, **named), None
    return layout.back(read(module, layout.rows(query), *others, **named)), None


_NODES = threading.local()


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """In the body, `grouped_attention` reads nodes that stand one after another."""
    _NODES.layout = layout
    try:
        yield
    finally:
        _NODES.layout = None


def _invariant(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> Float[Tensor, "rows width heads dim"]:
    if named.get("dropout") or named.get("position_bias") is not None:
        return _grouped(module, query, key, value, attention_mask, **named)
    return attend(query, key, value, attention_mask, named.get("scaling"))


def _grouped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> Float[Tensor, "rows width heads dim"]:
    groups = getattr(module, "num_key_value_groups", 1)
    shared = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == 1
    if groups == 1 or attention_mask is None or not shared or named.get("position_bias") is not None:
        plain: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **named)[0]
        return plain
    seen = read_grouped(
        query, key, value, attention_mask, dropout=named.get("dropout", 0.0), scale=named.get("scaling")
    )
    return seen.transpose(1, 2).clone(memory_format=torch.contiguous_format)


def read_grouped(
    queries: Float[Tensor, "rows heads width dim"],
    keys: Float[Tensor, "rows shared keys dim"],
    values: Float[Tensor, "rows shared keys value_dim"],
    mask: Tensor,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Float[Tensor, "rows heads width value_dim"]:
    """What queries read from the keys that they see, by a mask `[rows, 1, width, keys]` that all heads share.

    The query heads of one key head stand in its queries' place, one after another. Copies are made without asking
    whether they are needed: an exported graph would then serve widths of one kind only.
    """
    rows, heads, width, dim = queries.shape
    groups = heads // keys.shape[1]
    seen = scaled_dot_product_attention(
        queries.clone(memory_format=torch.contiguous_format).view(rows, heads // groups, groups * width, dim),
        keys,
        values,
        attn_mask=torch.cat([mask] * groups, dim=2),
        dropout_p=dropout,
        scale=scale,
    )
    return seen.unflatten(2, (groups, width)).flatten(1, 2)


def lean_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
) -> tuple[Tensor, None]:
    """What transformers' `sdpa` computes; without a mask, the queries are the last ones of the keys, and each sees the
    keys up to its own.
    """
    if attention_mask is None:
        seen = read_chain(query, key, value, scale=named.get("scaling"))
        return seen.transpose(1, 2).contiguous(), None
    # Copies cost a CPU less than they cost a GPU, and other roundings would be other tokens.
    read = sdpa_attention_forward if query.device.type == "cpu" else grouped_attention
    result: tuple[Tensor, None] = read(module, query, key, value, attention_mask, **named)
    return result


def read_chain(
    queries: Float[Tensor, "rows heads width dim"],
    keys: Float[Tensor, "rows shared keys dim"],
    values: Float[Tensor, "rows shared keys dim"],
    *,
    scale: float | None = None,
) -> Float[Tensor, "rows heads width dim"]:
    r"""What the queries of a chain read. They are the last `width` ones of the keys; no mask is made.

    torch's kernels on CPUs know a triangle whose corner is the first key. So the keys before the chain and its own are
    read apart, with the sums of weights $s$ and $t$, and the results joined as $(s a + t b) / (s + t)$.

    Example:
        >>> keys = torch.randn(1, 2, 5, 8)
        >>> alone, all_ = read_chain(keys[:, :, 4:], keys, keys), read_chain(keys, keys, keys)
        >>> torch.allclose(alone, all_[:, :, 4:], atol=1e-6)
        True
    """
    width, before = queries.shape[2], keys.shape[2] - queries.shape[2]
    grouped = queries.shape[1] != keys.shape[1]
    if before == 0:
        return scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=grouped)
    if queries.device.type != "cpu":
        corner: Any = causal_lower_right(width, keys.shape[2])
        return scaled_dot_product_attention(queries, keys, values, attn_mask=corner, scale=scale, enable_gqa=grouped)
    read = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    shared = queries.shape[1] // keys.shape[1]
    chain_keys, chain_values = (each[:, :, before:].repeat_interleave(shared, 1) for each in (keys, values))
    chain_output, chain_sum = read(queries, chain_keys, chain_values, 0.0, True, scale=scale)
    # Without a mask, the queries of all heads that share a key head are alike.
    together = queries.reshape(queries.shape[0], keys.shape[1], shared * width, -1)
    earlier_output, earlier_sum = read(together, keys[:, :, :before], values[:, :, :before], 0.0, False, scale=scale)
    share = torch.sigmoid(chain_sum - earlier_sum.reshape(chain_sum.shape))[..., None]
    joined = torch.lerp(earlier_output.reshape(chain_output.shape).to(share.dtype), chain_output.to(share.dtype), share)
    return joined.to(queries.dtype)


def reads_chains(device: torch.device, dtype: torch.dtype, sizes: Sequence[tuple[int, int]]) -> bool:
    """Whether `read_chain` makes no mask for such keys and values.

    Args:
        sizes: The sizes of a key and of a value, per layer.
    """
    if any(key != value for key, value in sizes):
        return False
    if device.type == "cpu":
        return True
    half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and half and all(key <= FLASH_DIM for key, _ in sizes)


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
AttentionInterface.register(LEAN, lean_attention)
AttentionInterface.register(ALONE, invariant_attention)


def is_invariant(model: PreTrainedModel) -> bool:
    """Whether the bits of a token's results do not depend on what else a model's forwards compute: where its weights
    are packed, so that its products promise the same.
    """
    packed = any(isinstance(part, BlockLinear | BlockEmbedding) for part in model.modules())
    return packed and attends(model.device, model.dtype)


def group(model: PreTrainedModel) -> None:
    """Let a model attend by `grouped_attention` or `invariant_attention`, if it attends by `sdpa` and looks its
    function up.
    """
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation == "sdpa" and model._supports_attention_backend:
        text._attn_implementation = ALONE if is_invariant(model) else NAME


_LOCK = threading.Lock()
_INSIDE: Counter[int] = Counter()


@contextmanager
def lean(text: PreTrainedConfig, name: str = LEAN) -> Iterator[None]:
    """A model that attends by `sdpa` attends by `lean_attention` as long as any thread is in the body.

    Args:
        text: The config of the part of the model that generates text.
        name: What it attends by instead: LEAN, or ALONE for `invariant_attention`.
    """
    with _LOCK:
        _INSIDE[id(text)] += 1
        text._attn_implementation = name
    try:
        yield
    finally:
        with _LOCK:
            _INSIDE[id(text)] -= 1
            if not _INSIDE[id(text)]:
                del _INSIDE[id(text)]
                text._attn_implementation = "sdpa"
