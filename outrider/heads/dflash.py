r"""DFlash: a head that guesses a whole block of tokens in one forward, from the target's hidden states.

DFlash 2026, https://arxiv.org/abs/2602.06036
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor, nn

from outrider.drafters.exports import Exports
from outrider.heads.parts.block_formats import BlockConfig, Method
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockDrafter, BlockHead, BlockObjective, BlockOptions, TrainedBlocks
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """Train a DFlash head: it guesses a block of tokens in one forward, each without the others."""


class DFlashHead(BlockHead):
    r"""A head whose context has the feature $c = \mathrm{RMSNorm}(W_{fc} [o_1; \ldots; o_n])$ at each position.

    Every layer makes its keys and values of $c$ with the projections that it also has for the block.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    method: ClassVar[Method] = "dflash"

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__(config, embedding_and_head, vocab_size)
        self.fc = nn.Linear(self.feature_size, config.layers.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.layers.hidden_size, eps=config.layers.rms_norm_eps)

    def contexts(self, features: Float[Tensor, "*batch dim"]) -> Sequence[Float[Tensor, "*batch hidden"]]:
        return [self.hidden_norm(self.fc(features))] * len(self.layers)


SPEC = HeadSpec(
    name="dflash",
    head=DFlashHead,
    drafter=BlockDrafter,
    published=DFlashHead.published,
    trained=TrainedBlocks,
    options=DFlashOptions,
    objective=BlockObjective,
    exports=Exports(vllm="dflash", sglang="DFLASH", llama="draft-dflash", instead="eagle3"),
)
