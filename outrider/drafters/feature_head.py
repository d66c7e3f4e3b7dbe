"""What the drafters of EAGLE and its kin share: their head's module makes features, and feeds them back."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.drafters.head_path import HeadPath, running_head
from outrider.drafters.own_features import OwnFeatures
from outrider.heads.feature_head import FeatureHead
from outrider.heads.mtp import MtpHead
from outrider.lm.head import HeadLM
from outrider.lm.tabular import TabularFusion, TabularHead
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class FeatureHeadDrafter(OwnFeatures):
    """Guess by a `FeatureHead`. A subclass says what is special about its paper.

    Attributes:
        lm: The head.
        reads: The target's hidden states that it reads, in order.
    """

    lm: HeadLM | TabularHead
    reads: tuple[int, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.reads

    @property
    def module(self) -> FeatureHead | MtpHead | TabularFusion:
        """What computes: the head's module, or its packed twin."""
        return self.lm.module if isinstance(self.lm, TabularHead) else cast(FeatureHead | MtpHead, self.lm.running)

    @torch.inference_mode()
    def features(self, taps: Mapping[int, Float[Tensor, "n hidden"]]) -> Float[Tensor, "n dim"]:
        return self.module.fuse(super().features(taps))

    @torch.inference_mode()
    def next_feature(self, head_output: Float[Tensor, "n hidden"]) -> Float[Tensor, "n dim"]:
        return self.module.next_feature(head_output)

    def cast(self, target_info: TargetInfo) -> "FeatureHeadDrafter":
        if isinstance(self.lm, TabularHead):
            return self
        module = copy.deepcopy(cast(FeatureHead | MtpHead, self.lm.module)).to(target_info.dtype)
        ids = module.ends.ids
        module.ends = target_info.ends() if ids is None else target_info.ends().cut(ids)
        lm = HeadLM(module, max_slots=self.lm.max_slots, max_context=self.lm.max_context)
        return replace(self, lm=lm)

    def on_tables(self, vocab_size: int, seed: int) -> "FeatureHeadDrafter":
        return replace(self, lm=TabularHead(vocab_size, seed), reads=(0,), short_list=None)


def head_lm(path: HeadPath, module: FeatureHead, target_info: TargetInfo) -> HeadLM:
    """A head's module as a language model, where its path says."""
    device, dtype = path.place(target_info)
    placed = module.to(device, dtype).eval().requires_grad_(False)
    return running_head(placed, target_info, max_context=path.longest(target_info))
