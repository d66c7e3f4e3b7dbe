"""EAGLE-1: continue the target's last features (Li et al. 2024). With the tree `dynamic` it is EAGLE-2."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from outrider.core.types import ShortList
from outrider.drafters.feature_head import FeatureHeadDrafter, head_lm
from outrider.drafters.head_path import HeadPath
from outrider.drafters.token_map import check_listed, checked_ids, read_token_map
from outrider.heads.eagle import EagleFile, is_eagle
from outrider.heads.feature_head import without_copies
from outrider.heads.files import TargetShape, read_config, read_tensors
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class EagleDrafter(FeatureHeadDrafter):
    """Guess by a head that reads the target's normed last hidden state, and predicts the next one.

    References:
        Li et al. 2024, EAGLE. https://arxiv.org/abs/2401.15077
        Li et al. 2024, EAGLE-2. https://arxiv.org/abs/2406.16858
    """

    trainer: ClassVar[str | None] = "eagle"
    exports: ClassVar[tuple[str, ...]] = ("eagle",)


@dataclass(frozen=True, kw_only=True)
class EagleKinPath(HeadPath):
    """A head on the trunk of EAGLE-1, before it is bound to a target. A subclass names its files and its drafter.

    Attributes:
        token_map: A file of the tokens that it may propose, the most frequent first: `read_token_map` says which
            kinds there are. Its output layer, the target's, is cut to these. By default it may propose all tokens.
        vocabulary: How many tokens of the file to take; by default all.

    References:
        Zhao et al. 2025, FR-Spec: the output layer of the most frequent tokens. https://arxiv.org/abs/2502.14856
    """

    file: ClassVar[type[EagleFile]] = EagleFile

    token_map: str | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listed(self.token_map, self.vocabulary)

    def read(self, target_info: TargetInfo) -> dict[str, Any]:
        """Load the head. Returns the fields of its drafter."""
        config = read_config(self.path, revision=self.revision)
        file = self.file.of(self.path, config, read_tensors(self.path, revision=self.revision))
        self.check_target(TargetShape.of(config, self.path), file.config.hidden_size, target_info)
        self.check_vocabulary(file.config.vocab_size, target_info)
        tensors = without_copies(dict(file.tensors), target_info.embed, target_info.device)
        ends, width, few = target_info.ends(), target_info.vocab_size, None
        if self.token_map is not None:
            ids = checked_ids(read_token_map(self.token_map, self.vocabulary), width, self.token_map)
            few = ShortList.of(torch.tensor(ids, device=target_info.device), width)
            ends, width = ends.cut(ids), len(ids)
        lm = head_lm(self, replace(file, tensors=tensors).head(ends, width), target_info)
        return {"lm": lm, "reads": (target_info.num_layers,), "short_list": few}


@dataclass(frozen=True, kw_only=True)
class EaglePath(EagleKinPath):
    """An EAGLE-1 head before it is bound to a target: `eagle:path=...`."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_eagle(config, names)

    def bind(self, target_info: TargetInfo) -> EagleDrafter:
        """Load the head."""
        return EagleDrafter(**self.read(target_info))
