r"""DFlare: DFlash with a mixture of the target's layers for each of its own, and projections of the context.

Tencent 2026, https://github.com/Tencent/AngelSlim
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.drafters.exports import Exports
from outrider.heads.parts.block_config import BlockConfig, CheckpointHints
from outrider.heads.parts.layers import Attention
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import (
    BlockDrafter,
    BlockHead,
    BlockLayer,
    BlockObjective,
    BlockOptions,
    TrainedBlocks,
)
from outrider.learning.options import size
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.head_inputs import KVCache

START = 2.0
"""The weight, before the softmax, of the tap that a layer reads most at the start of training."""


@dataclass(frozen=True, kw_only=True)
class DFlareOptions(BlockOptions):
    """Train a DFlare head: DFlash with a mixture of the target's layers for each layer of the head."""

    layers: int = size(7, least=1)


class ContextAttention(Attention):
    """Attention whose keys and values of the context have projections of their own."""

    def __init__(self, config: PreTrainedConfig, layer: int) -> None:
        super().__init__(config, layer, normed=True)
        bias = self.k_proj.bias is not None
        self.k_proj_target = nn.Linear(config.hidden_size, self.k_proj.out_features, bias=bias)
        self.v_proj_target = nn.Linear(config.hidden_size, self.v_proj.out_features, bias=bias)

    def keep(
        self, states: Float[Tensor, "rows width features"], rotary: Float[Tensor, "2 rows width dim"], cache: KVCache
    ) -> None:
        self.store(self.k_proj_target(states), self.v_proj_target(states), rotary, cache)


class ContextLayer(BlockLayer):
    """A decoder layer with such an attention."""

    def attention(self, config: PreTrainedConfig, number: int) -> Attention:
        return ContextAttention(config, number)


class DFlareHead(BlockHead):
    r"""A head in which layer d reads $c_d = \mathrm{RMSNorm}_d(\sum_i \mathrm{softmax}(w_d)_i\, o_i)$.

    At the start every layer reads mostly the tap that lies as deep in the target as the layer in the head. Keys and
    values of the context have projections of their own, unless the config's `extra` is False.

    References:
        https://github.com/Tencent/AngelSlim
    """

    name: ClassVar[str] = "dflare"
    architectures: ClassVar[Sequence[str]] = ("QwenDFlareDraftModel",)
    speculators: ClassVar[str | None] = "DFlareSpeculator"
    num_taps: ClassVar[int] = 9

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__(replace(config, extra=config.extra is not False), embedding_and_head, vocab_size)
        count, taps = len(self.layers), len(config.taps)
        start = torch.zeros(count, taps)
        start[torch.arange(count), torch.arange(count) * taps // count] = START
        self.fusion_weights = nn.Parameter(start)
        width, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.fusion_norms = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(count))

    def layer(self, config: BlockConfig, number: int) -> BlockLayer:
        return (ContextLayer if config.extra else BlockLayer)(config.layers, number)

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        separate = bool(config.get("use_heterogeneous_kv", True))
        return replace(super().read_config(config, path, hints), extra=separate)

    def written_keys(self) -> dict[str, Any]:
        return {"use_heterogeneous_kv": self.config.extra}

    @classmethod
    def rename(cls, tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
        named = super().rename(tensors, config)
        if "layer_fusion_weights" in named:
            # The authors' layout has one norm for all layers.
            norm = named.pop("hidden_norm.weight", None)
            named["fusion_weights"] = named.pop("layer_fusion_weights")
            if norm is not None:
                count = config.layers.num_hidden_layers
                named |= {f"fusion_norms.{i}.weight": norm.clone() for i in range(count)}
        return named

    def contexts(self, features: Float[Tensor, "*batch dim"]) -> Sequence[Float[Tensor, "*batch hidden"]]:
        taps = features.unflatten(-1, (len(self.config.taps), -1))
        mixed = torch.einsum("...th,dt->...dh", taps, self.fusion_weights.softmax(-1))
        return [norm(mixed[..., i, :]) for i, norm in enumerate(self.fusion_norms)]


SPEC = HeadSpec(
    name="dflare",
    head=DFlareHead,
    drafter=BlockDrafter,
    published=DFlareHead.published,
    trained=TrainedBlocks,
    options=DFlareOptions,
    objective=BlockObjective,
    exports=Exports(instead="dflash"),
)
