r"""JetSpec: a DFlash head whose blocks are causal, trained on the target's whole rows.

JetSpec 2026, https://arxiv.org/abs/2606.18394
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outrider.drafters.exports import Exports
from outrider.heads.dflash import DFlashHead, is_plain
from outrider.heads.parts.block_config import AttentionSpan, BlockConfig
from outrider.heads.parts.block_layouts import kind_of, words_on_causality
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockDrafter, BlockObjective, BlockOptions, TrainedBlocks
from outrider.learning.options import loss, size
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


@dataclass(frozen=True, kw_only=True)
class JetSpecOptions(BlockOptions):
    """Train a JetSpec head: DFlash whose guesses see no later position of their block, on the target's whole rows.

    Attributes:
        block_size: Positions of a block, the anchor's included. A block guesses one token less than it has positions.
        weighting: How much a guess counts: even, all the same; decay, by its depth; or survival, by how likely the
            guesses before it are accepted (D-PACE).
    """

    block_size: int = size(16, least=2)
    weighting: str = loss("even")


class JetSpecHead(DFlashHead):
    r"""A DFlash head in which a position of a block sees no later position of the block, in any layer.

    So the guesses of the first positions do not depend on how long the block is. Its files are those of DFlash with
    `causal_head`, `causal` or `is_causal`.

    References:
        JetSpec 2026. https://arxiv.org/abs/2606.18394
    """

    name: ClassVar[str] = "jetspec"
    speculators: ClassVar[str | None] = None

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        sights = config.sights or (AttentionSpan(),) * config.layers.num_hidden_layers
        causal = tuple(AttentionSpan(window=sight.window, causal=True) for sight in sights)
        super().__init__(replace(config, sights=causal), embedding_and_head, vocab_size)

    @classmethod
    def published(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Whether a DFlash file says that all its layers are causal."""
        if kind_of(config) is not None:
            return bool(kind_of(config) == cls.name)
        return is_plain(config) and words_on_causality(config) == {True}

    def written_inner(self) -> dict[str, Any]:
        # Its authors read this key, and vLLM those that all heads have.
        return {"causal_head": True, **super().written_inner()}


SPEC = HeadSpec(
    name="jetspec",
    head=JetSpecHead,
    drafter=BlockDrafter,
    published=JetSpecHead.published,
    trained=TrainedBlocks,
    options=JetSpecOptions,
    objective=BlockObjective,
    exports=Exports(vllm="dflash", instead="dflash"),
)
