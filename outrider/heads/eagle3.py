r"""EAGLE-3: a decoder layer over three fused hidden states, trained on its own outputs (Li et al. 2025)."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.parts.layers import DecoderLayer, norm_of
from outrider.heads.trunks.features import FeatureHead
from outrider.lm.head import KVCache
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The sizes of an EAGLE-3 head, and the choices that its checkpoints differ in.

    Attributes:
        layer: The sizes of its layers.
        target_hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        draft_vocab_size: Width of the head's logits.
        taps: The hidden states that it reads, in order.
        norm_before_residual: Whether the residual of the first layer is the normed feature.
        norm_before_fc: Whether the tapped states are normed together, side by side.
        fc_norm: Whether each tapped state has a norm of its own.
        norm_output: Whether the normed output is the next feature; the head's logits are always made of the normed one.
        own_embedding: Whether it has an embedding of its own.
        own_output: Whether it has an output layer of its own; otherwise it takes the target's.
        qkv_bias: As for `Attention`.

    Raises:
        InputError: Both kinds of norms are asked for.
    """

    layer: PreTrainedConfig
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_output: bool = True
    qkv_bias: bool | None = None

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise InputError("norm_before_fc and fc_norm are two ways to norm the tapped states; choose one")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that a head reads if its checkpoint does not say so: what enters layers 2, L/2 and L-3."""
    return 2, num_layers // 2, num_layers - 3


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a new head reads: the default ones, or three others of a target with few layers.

    Example:
        >>> usual_taps(32), usual_taps(4), usual_taps(2)
        ((2, 16, 29), (1, 2, 3), (0, 1, 2))
    """
    low, middle, high = default_taps(num_layers)
    if low < middle < high:
        return low, middle, high
    if num_layers < 3:
        return tuple(max(0, num_layers - 2 + i) for i in range(3))
    return 1, max(2, num_layers // 2), max(3, num_layers - 1)


class FusedLayer(DecoderLayer):
    """The first layer: it attends to a token's embedding and a feature side by side. The residual is the feature.

    Args:
        config: The sizes.
        norm_before_residual: Whether the residual is the normed feature.
        qkv_bias: As for `Attention`.
    """

    def __init__(
        self, config: PreTrainedConfig, *, norm_before_residual: bool = False, qkv_bias: bool | None = None
    ) -> None:
        super().__init__(config, 0, input_size=2 * config.hidden_size, qkv_bias=qkv_bias)
        self.hidden_norm = norm_of(config)
        self.norm_before_residual = norm_before_residual

    def fused(
        self,
        embedded: Float[Tensor, "rows width hidden"],
        features: Float[Tensor, "rows width hidden"],
        rotary: Float[Tensor, "2 rows width dim"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        """The layer's output."""
        residual = self.hidden_norm(features) if self.norm_before_residual else features
        hidden: Tensor = residual + self.self_attn(self.pair(embedded, features), rotary, mask, cache)
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))

    def pair(
        self, embedded: Float[Tensor, "rows width hidden"], features: Float[Tensor, "rows width hidden"]
    ) -> Float[Tensor, "rows width both"]:
        """What the attention reads."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)


class Eagle3Head(FeatureHead):
    r"""With the tapped states $s_1, s_2, s_3$ of the target at $t$, $g_t = W_{fc} [s_1; s_2; s_3]$; the layer's
    output $u$ at the pair $(x_{t+1}, g_t)$ is the next feature, and the logits are those of $\mathrm{norm}(u)$.

    Args:
        config: The sizes.
        ends: The target's ends.
        ids: The tokens that the head guesses, ascending; None: all.

    References:
        Li et al. 2025. https://arxiv.org/abs/2503.01840
    """

    def __init__(self, config: Eagle3Config, ends: EmbeddingAndHead, ids: Int[Tensor, " width"] | None = None) -> None:
        layer = config.layer
        super().__init__(layer, ends, vocab_size=config.draft_vocab_size, own_embedding=config.own_embedding)
        self.sizes = config
        size, count = config.target_hidden_size, len(config.taps)
        self.fc = nn.Linear(count * size, layer.hidden_size, bias=False)
        self.input_norm = norm_of(layer, count * size) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm_of(layer, size) for _ in config.taps if config.fc_norm)
        first = FusedLayer(layer, norm_before_residual=config.norm_before_residual, qkv_bias=config.qkv_bias)
        others = [DecoderLayer(layer, i, qkv_bias=config.qkv_bias) for i in range(1, layer.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *others])
        self.norm = norm_of(layer)
        width = config.draft_vocab_size
        self.lm_head = nn.Linear(layer.hidden_size, width, bias=False) if config.own_output else None
        self.ids: Int[Tensor, " width"] | None
        self.register_buffer("ids", ids, persistent=False)

    def extra_repr(self) -> str:
        """The choices that no tensor shows."""
        names = ("taps", "norm_before_residual", "norm_output")
        return ", ".join(f"{name}={getattr(self.sizes, name)}" for name in names)

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        states = states.to(self.fc.weight.device, self.fc.weight.dtype)
        if self.fc_norm:
            parts = states.split(self.sizes.target_hidden_size, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return cast(Tensor, self.fc(self.input_norm(states)))

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        rotary = self.rotary(features, positions)
        first = cast(FusedLayer, self.layers[0])
        hidden = first.fused(self.embed(tokens, features), features, rotary, mask, cache)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rotary, mask, cache)
        return hidden

    def digest(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        cache: KVCache,
    ) -> None:
        first = cast(FusedLayer, self.layers[0])
        both = first.pair(self.embed(tokens, features), features)
        first.self_attn.keep(both, self.rotary(features, positions), cache)

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.norm(head_output) if self.sizes.norm_output else head_output

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        normed = self.norm(hidden)
        logits = self.target_logits(normed) if self.lm_head is None else cast(Tensor, self.lm_head(normed))
        return logits[..., : self.vocab_size]

    @torch.no_grad()
    def begin_from(self, output: Float[Tensor, "vocab hidden"] | None) -> None:
        """Let the head's own output layer begin as the target's.

        Args:
            output: The weight of that layer; None leaves random weights, as does one of another width.
        """
        if self.lm_head is None or output is None or output.shape[1] != self.lm_head.in_features:
            return
        chosen = output[: len(self.lm_head.weight)] if self.ids is None else output[self.ids.to(output.device)]
        self.lm_head.weight.copy_(chosen)
