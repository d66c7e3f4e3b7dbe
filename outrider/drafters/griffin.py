"""GRIFFIN: EAGLE with a fusion that the token guides, and a guess apart from the feature (Hu et al. 2025)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.drafters.eagle import EagleKinPath
from outrider.drafters.feature_head import FeatureHeadDrafter
from outrider.heads.eagle import EagleFile
from outrider.heads.griffin import GriffinFile, is_griffin
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class GriffinDrafter(FeatureHeadDrafter):
    """Guess by a head that outputs two vectors: one for its guess, one as the next feature.

    References:
        Hu et al. 2025. https://arxiv.org/abs/2502.11018
    """

    trainer: ClassVar[str | None] = "griffin"


@dataclass(frozen=True, kw_only=True)
class GriffinPath(EagleKinPath):
    """A GRIFFIN head before it is bound to a target: `griffin:path=...`."""

    file: ClassVar[type[EagleFile]] = GriffinFile

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_griffin(config, names)

    def bind(self, target_info: TargetInfo) -> GriffinDrafter:
        """Load the head."""
        return GriffinDrafter(**self.read(target_info))
