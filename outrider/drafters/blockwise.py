"""Blockwise heads: every depth of a draft by a feed-forward and the target's own output layer (Stern et al. 2018)."""

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from torch import nn

from outrider.drafters.state_heads import StateHeadsDrafter, randomise
from outrider.heads.blockwise import BlockwiseConfig, BlockwiseHeads
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class BlockwiseDrafter(StateHeadsDrafter):
    """Guess with blockwise heads.

    References:
        Stern et al. 2018. https://arxiv.org/abs/1811.03115
    """

    trainer: ClassVar[str | None] = "blockwise"

    heads: BlockwiseHeads

    def cast(self, target_info: TargetInfo) -> "BlockwiseDrafter":
        made = cast(BlockwiseDrafter, super().cast(target_info))
        made.heads.ends = target_info.ends()
        return made

    def on_tables(self, vocab_size: int, seed: int) -> "BlockwiseDrafter":
        dice = torch.Generator().manual_seed(seed)
        output = torch.randn(TABLE_FEATURES, vocab_size, dtype=torch.float64, generator=dice)
        config = BlockwiseConfig(
            hidden_size=TABLE_FEATURES,
            vocab_size=vocab_size,
            num_heads=self.max_depth,
            intermediate_size=TABLE_FEATURES,
        )
        ends = EmbeddingAndHead(embed=nn.Identity(), norm=nn.Identity(), head=lambda hidden: hidden @ output)
        heads = BlockwiseHeads(config, ends).double().eval()
        randomise(heads, seed)
        return replace(self, heads=heads, running=None, tap=0, vocab_size=vocab_size, norm=nn.Identity())
