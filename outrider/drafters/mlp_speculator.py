"""MLP speculators: a recurrent state that reads one draft token after another (Wertheimer et al. 2024)."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn

from outrider.drafters.head_path import HeadPath
from outrider.drafters.sequential import SequentialDrafter, placed
from outrider.heads.mlp_speculator import (
    MLPSpeculator,
    MLPSpeculatorConfig,
    is_mlp_speculator,
    read_mlp_speculator,
)
from outrider.heads.sequential import randomise
from outrider.lm.hf.checkpoint import TargetShape, read_config
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorDrafter(SequentialDrafter):
    """Guess by an `MLPSpeculator`, which reads the target's normed last hidden state.

    Attributes:
        norm: The target's final norm.

    References:
        Wertheimer et al. 2024. https://arxiv.org/abs/2404.19124
    """

    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())

    def features(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n hidden"]:
        return self.norm(hidden)

    def cast(self, target_info: TargetInfo) -> "MLPSpeculatorDrafter":
        return replace(super().cast(target_info), norm=target_info.norm)

    def on_tables(self, vocab_size: int, seed: int) -> "MLPSpeculatorDrafter":
        config = MLPSpeculatorConfig(
            vocab_size=vocab_size, emb_dim=TABLE_FEATURES, inner_dim=4, n_predict=self.max_depth, scale_input=True
        )
        head = MLPSpeculator(config).double().eval()
        randomise(head, seed)
        return MLPSpeculatorDrafter(head=head, tap=0, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorPath(HeadPath):
    """An MLP speculator before it is bound to a target: `mlp_speculator:path=...`."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_mlp_speculator(config)

    def bind(self, target_info: TargetInfo) -> MLPSpeculatorDrafter:
        """Load the head."""
        config = read_config(self.path, revision=self.revision)
        read = read_mlp_speculator(self.path, revision=self.revision)
        self.check_target(TargetShape.of(config, self.path), read.hidden_size, target_info)
        self.check_vocabulary(read.config.vocab_size, target_info)
        head, running = placed(self, read, target_info)
        return MLPSpeculatorDrafter(
            head=head,
            running=running,
            tap=target_info.num_layers,
            vocab_size=target_info.vocab_size,
            norm=target_info.norm,
        )
