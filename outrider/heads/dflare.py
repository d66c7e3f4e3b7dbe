r"""DFlare: DFlash with a mixture of the target's layers for each of its own, and projections of the context.

Tencent 2026, https://github.com/Tencent/AngelSlim
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.drafters.exports import Exports
from outrider.heads.parts.block_formats import BlockConfig, Method
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockDrafter, BlockHead, BlockObjective, BlockOptions, TrainedBlocks
from outrider.learning.options import size
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

START = 2.0
"""The weight, before the softmax, of the tap that a layer reads most at the start of training."""


@dataclass(frozen=True, kw_only=True)
class DFlareOptions(BlockOptions):
    """Train a DFlare head: DFlash with a mixture of the target's layers for each layer of the head."""

    layers: int = size(7, least=1)


class DFlareHead(BlockHead):
    r"""A head in which layer d reads $c_d = \mathrm{RMSNorm}_d(\sum_i \mathrm{softmax}(w_d)_i\, o_i)$.

    At the start every layer reads mostly the tap that lies as deep in the target as the layer in the head. Where
    `config.separate_context_kv`, keys and values of the context have projections of their own.

    References:
        https://github.com/Tencent/AngelSlim
    """

    method: ClassVar[Method] = "dflare"
    num_taps: ClassVar[int] = 9

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__(config, embedding_and_head, vocab_size)
        count, taps = len(self.layers), len(config.taps)
        start = torch.zeros(count, taps)
        start[torch.arange(count), torch.arange(count) * taps // count] = START
        self.fusion_weights = nn.Parameter(start)
        width, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.fusion_norms = nn.ModuleList(nn.RMSNorm(width, eps=eps) for _ in range(count))

    @classmethod
    def sizes(cls, options: Any) -> dict[str, Any]:
        return {"separate_context_kv": True}

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
