"""The multi-token-prediction layers that many targets ship with (DeepSeek-AI 2024)."""

from dataclasses import dataclass

from outrider.drafters.head_path import running_head
from outrider.drafters.mtp_layers import MtpLayersDrafter
from outrider.drafters.protocol import check_longest
from outrider.heads.mtp import MtpHead
from outrider.heads.trunks.features import FeatureDrafter
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(FeatureDrafter):
    """Guess by the one multi-token-prediction layer of a target's checkpoint.

    The layer reads the target's normed last hidden state at a position and the token that follows, and guesses the
    token after that. For the second draft token and all later ones it runs again, on the features that it output
    itself, as in vLLM. transformers drafts one token per layer and no more.

    References:
        DeepSeek-AI 2024, DeepSeek-V3, section 2.2. https://arxiv.org/abs/2412.19437
    """


@dataclass(frozen=True, kw_only=True)
class MtpPath:
    """Multi-token-prediction layers before they are bound to a target: `mtp`, or `mtp:path=...`.

    Attributes:
        path: Directory or hub id of the checkpoint that has them; by default the target's own.
        max_context: Longest context; by default the target's.
    """

    path: str | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        check_longest(self.max_context)

    def bind(self, target_info: TargetInfo) -> MtpDrafter | MtpLayersDrafter:
        """Load the layers."""
        model, ends, reads = target_info.mtp(self.path), target_info.ends(), (target_info.num_layers,)
        longest = min(self.max_context or target_info.max_context, target_info.max_context)
        heads = [MtpHead(model, number, ends, target_info.vocab_size) for number in range(len(model.layers))]
        placed = [head.to(target_info.device, target_info.dtype).requires_grad_(False) for head in heads]
        first, *deeper = (running_head(head, target_info, max_context=longest) for head in placed)
        if deeper:
            return MtpLayersDrafter(lm=first, deeper=tuple(deeper), reads=reads)
        return MtpDrafter(lm=first, reads=reads)
