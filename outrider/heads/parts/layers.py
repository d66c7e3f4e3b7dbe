"""Layers that heads are made of: the parts of a Llama or Qwen 3 decoder layer, under the names of their checkpoints.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23): `LlamaRotaryEmbedding(config)(states, positions)` gives
cosines and sines for every rotary scheme that a config can name, and `apply_rotary_pos_emb` turns queries and keys.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from outrider.lm.head import attend
from outrider.lm.slots.head_inputs import HeadInputs, KVCache


class Rotary(nn.Module):
    """Cosines and sines of positions, by the rotary scheme of a config."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.table = LlamaRotaryEmbedding(config)

    def forward(
        self, states: Float[Tensor, "rows width hidden"], positions: Int[Tensor, "rows width"]
    ) -> Float[Tensor, "2 rows width dim"]:
        return torch.stack(self.table(states, positions))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        """Frequencies stay in float32 where the module is cast to a lower dtype: far positions need them exact."""
        before = dict(self.table.named_buffers())
        super()._apply(fn, recurse)
        for name, exact in before.items():
            moved = getattr(self.table, name)
            if moved.dtype.itemsize < exact.dtype.itemsize <= 4:
                setattr(self.table, name, exact.to(moved.device))
        return self


class Attention(nn.Module):
    """Self-attention with grouped heads over the cache of a head.

    Args:
        config: Names `hidden_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim` and `rms_norm_eps`.
        layer: Number of the layer in the cache.
        input_size: Width of what queries, keys and values are made of; by default the hidden size.
        normed: Whether queries and keys are normed per head, as in Qwen 3.
        qkv_bias: Whether queries, keys and values alone have a bias, as in Qwen 2; None: what `attention_bias` says of
            all four.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layer: int,
        *,
        input_size: int | None = None,
        normed: bool = False,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        width, self.layer = input_size or config.hidden_size, layer
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        heads, shared = config.num_attention_heads, config.num_key_value_heads
        output_bias = bool(getattr(config, "attention_bias", False)) if qkv_bias is None else False
        bias = output_bias if qkv_bias is None else qkv_bias
        self.q_proj = nn.Linear(width, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, shared * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, shared * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=output_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if normed else nn.Identity()
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps) if normed else nn.Identity()

    def forward(
        self, states: Float[Tensor, "rows width all"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width hidden"]:
        queries, keys = self._heads(self.q_proj(states), self.q_norm), self._heads(self.k_proj(states), self.k_norm)
        queries, keys = apply_rotary_pos_emb(queries, keys, rotary[0], rotary[1])
        all_keys, all_values = inputs.cache.update(keys, self._heads(self.v_proj(states)), self.layer)
        # A KV cache may attend itself, because it knows which keys no query sees.
        read = getattr(inputs.cache, "attend", attend)
        attended = read(queries, all_keys, all_values, inputs.mask)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def keep(
        self, states: Float[Tensor, "rows width features"], rotary: Float[Tensor, "2 rows width dim"], cache: KVCache
    ) -> None:
        """Store the keys and values of states that ask for nothing themselves."""
        self.store(self.k_proj(states), self.v_proj(states), rotary, cache)

    def store(
        self,
        keys: Float[Tensor, "rows width all"],
        values: Float[Tensor, "rows width all"],
        rotary: Float[Tensor, "2 rows width dim"],
        cache: KVCache,
    ) -> None:
        """Store keys, which are normed and turned here, and values."""
        heads = self._heads(keys, self.k_norm)
        turned, _ = apply_rotary_pos_emb(heads, heads, rotary[0], rotary[1])
        cache.update(turned, self._heads(values), self.layer)

    def _heads(
        self, states: Float[Tensor, "rows width all"], norm: nn.Module | None = None
    ) -> Float[Tensor, "rows heads width dim"]:
        # Normed before they are turned: norms of turned states lie in memory in a way that depends on the width.
        heads = states.unflatten(-1, (-1, self.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)


class GatedMLP(nn.Module):
    """A feed-forward layer with a gate (SwiGLU)."""

    def __init__(self, hidden_size: int, intermediate_size: int, output_size: int | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, output_size or hidden_size, bias=False)

    def forward(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch output"]:
        return self.down_proj(silu(self.gate_proj(states)) * self.up_proj(states))


class DecoderLayer(nn.Module):
    """A decoder layer of Llama or Qwen 3.

    Args:
        config: As for `Attention`, with `intermediate_size`.
        layer: Number of the layer in the cache.
        input_norm: Whether the attention's input is normed.
        qkv_bias: As for `Attention`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        layer: int,
        *,
        input_size: int | None = None,
        input_norm: bool = True,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__()
        normed = config.model_type == "qwen3"
        self.self_attn = Attention(config, layer, input_size=input_size, normed=normed, qkv_bias=qkv_bias)
        self.mlp: nn.Module = GatedMLP(config.hidden_size, config.intermediate_size)
        self.input_layernorm = norm_of(config) if input_norm else nn.Identity()
        self.post_attention_layernorm = norm_of(config)

    def forward(
        self, hidden: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width hidden"]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), rotary, inputs)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


def norm_of(config: PreTrainedConfig, size: int | None = None) -> nn.RMSNorm:
    """The norm of a config's layers.

    Args:
        size: Its width; by default the hidden size.
    """
    return nn.RMSNorm(size or config.hidden_size, eps=config.rms_norm_eps)
