r"""GRIFFIN: an EAGLE head whose fusion is guided by the token, and whose layer has an output of its own for the guess.

Hu et al. 2025, https://arxiv.org/abs/2502.11018
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.eagle import EagleFile, EagleHead
from outrider.heads.files import KIND
from outrider.heads.layers import DecoderLayer, GatedMLP, norm_of
from outrider.lm.head import KVCache

NAME = "griffin"


class FusionMLP(nn.Module):
    r"""$W_{down}\,\mathrm{SiLU}(W_{up} [N(r); N(e)])$: what the token adds to a fused vector. One norm for both.

    Args:
        config: The sizes.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, fused: Float[Tensor, "*batch hidden"], embedded: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch hidden"]:
        both = torch.cat([self.input_layernorm(fused), self.input_layernorm(embedded)], -1)
        return self.down_proj(silu(self.up_proj(both)))


class TokenGuidedFusion(nn.Module):
    r"""$r = W_{fc} [e; f]$, and then $r + \mathrm{mlp}(N(r), e)$.

    Args:
        config: The sizes.
        bias: Whether $W_{fc}$ has a bias.
    """

    def __init__(self, config: PreTrainedConfig, *, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = FusionMLP(config)

    def forward(self, both: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch hidden"]:
        fused = self.fc(both)
        return fused + self.mlp(self.post_attention_layernorm(fused), both[..., : fused.shape[-1]])


class TokenEnhancedLayer(DecoderLayer):
    """A decoder layer with two outputs, side by side: what guesses the next token, and the next feature."""

    def __init__(self, config: PreTrainedConfig, *, qkv_bias: bool | None = None) -> None:
        super().__init__(config, 0, input_norm=False, qkv_bias=qkv_bias)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, 2 * config.hidden_size)

    def forward(
        self,
        hidden: Float[Tensor, "rows width hidden"],
        rotary: Float[Tensor, "2 rows width dim"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width both"]:
        hidden = hidden + self.self_attn(hidden, rotary, mask, cache)
        return torch.cat([hidden, hidden], -1) + self.mlp(self.post_attention_layernorm(hidden))


class GriffinHead(EagleHead):
    """An EAGLE head of one layer that outputs two vectors: the first guesses the next token, the second is the
    feature of the next pair.

    References:
        Hu et al. 2025. https://arxiv.org/abs/2502.11018
    """

    def fusion(self, bias: bool) -> nn.Module:
        return TokenGuidedFusion(self.config, bias=bias)

    def layer(self, number: int, qkv_bias: bool | None) -> DecoderLayer:
        if number:
            raise InputError(f"a GRIFFIN head has one layer, got {self.config.num_hidden_layers}")
        return TokenEnhancedLayer(self.config, qkv_bias=qkv_bias)

    def record(self) -> dict[str, Any]:
        return super().record() | {"architectures": ["GriffinHead"], KIND: NAME}

    def next_feature(self, head_output: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch hidden"]:
        return head_output[..., self.feature_size :]

    def logits(self, hidden: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch width"]:
        return super().logits(hidden[..., : self.feature_size])


@dataclass(frozen=True, kw_only=True)
class GriffinFile(EagleFile):
    """A GRIFFIN checkpoint, ours or one of its authors, before it is bound to a target."""

    kind: ClassVar[type[EagleHead]] = GriffinHead


def is_griffin(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of GRIFFIN."""
    published = {"fc.fc.weight", "fc.mlp.up_proj.weight"} <= {name.removeprefix("model.") for name in names}
    return config.get(KIND) == NAME if KIND in config else published
