"""EAGLE-3: continue fused hidden states of three of the target's layers (Li et al. 2025)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from outrider.core.types import ShortList
from outrider.drafters.head_path import HeadPath
from outrider.heads.checkpoint import read_config, read_tensors
from outrider.heads.eagle3_files import Answers, Eagle3File, is_eagle3
from outrider.heads.parts.layer_config import without_copies
from outrider.heads.trunks.features import FeatureDrafter, head_lm
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class Eagle3Drafter(FeatureDrafter):
    """Guess by a head that reads three hidden states of the target, and predicts a feature of its own making.

    References:
        Li et al. 2025, EAGLE-3. https://arxiv.org/abs/2503.01840
    """

    trainer: ClassVar[str | None] = "eagle3"
    exports: ClassVar[tuple[str, ...]] = ("eagle3",)


@dataclass(frozen=True, kw_only=True)
class AskingPath(HeadPath):
    """A head whose files may leave questions open, before it is bound to a target.

    Attributes:
        norm_before_residual: Whether the residual of the first layer is the normed feature, where the config does not
            say it.
        norm_output: Whether the normed output is the next feature; it goes before the config.
        taps: The target's hidden states that the head reads, such as 2x16x29; tap k enters layer k. They go before
            the config.
    """

    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    taps: tuple[int, ...] | None = None

    @property
    def answers(self) -> Answers:
        """What the user says where the files leave it open."""
        return Answers(norm_before_residual=self.norm_before_residual, norm_output=self.norm_output, taps=self.taps)


@dataclass(frozen=True, kw_only=True)
class Eagle3Path(AskingPath):
    """An EAGLE-3 head before it is bound to a target: `eagle3:path=...`. Its fields are those of `AskingPath`."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_eagle3(config, names)

    def bind(self, target_info: TargetInfo) -> Eagle3Drafter:
        """Load the head."""
        config = read_config(self.path, revision=self.revision)
        file = Eagle3File.of(self.path, config, read_tensors(self.path, revision=self.revision))
        self.check_target(file.target, file.target_hidden_size, target_info)
        self.check_vocabulary(int(file.layer.vocab_size), target_info)
        file = replace(file, tensors=without_copies(dict(file.tensors), target_info.embed, target_info.device))
        head = file.head(
            target_info.ends(),
            num_layers=target_info.num_layers,
            vocab_size=target_info.vocab_size,
            answers=self.answers,
        )
        lm = head_lm(self, head, target_info)
        ids = None if head.ids is None else ShortList.of(head.ids.to(lm.device), target_info.vocab_size)
        return Eagle3Drafter(lm=lm, reads=head.sizes.taps, short_list=ids)
