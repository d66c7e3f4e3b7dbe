"""Medusa heads: every depth of a draft is guessed from the target's last hidden state (Cai et al. 2024)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from outrider.core.types import InputError, ShortList
from outrider.drafters.head_path import HeadPath
from outrider.drafters.state_heads import StateHeadsDrafter, randomise, running
from outrider.heads.medusa import MedusaConfig, MedusaHeads, is_medusa, read_medusa
from outrider.lm.hf.checkpoint import TargetShape, read_config
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class MedusaDrafter(StateHeadsDrafter):
    """Guess with Medusa heads, whose output layers may list some tokens only.

    References:
        Cai et al. 2024. https://arxiv.org/abs/2401.10774
    """

    trainer: ClassVar[str | None] = "medusa"
    exports: ClassVar[tuple[str, ...]] = ("medusa",)

    heads: MedusaHeads

    def on_tables(self, vocab_size: int, seed: int) -> "MedusaDrafter":
        config = MedusaConfig(hidden_size=TABLE_FEATURES, vocab_size=vocab_size, num_heads=self.max_depth)
        heads = MedusaHeads(config).double().eval()
        randomise(heads, seed)
        return MedusaDrafter(heads=heads, tap=0, vocab_size=vocab_size)


@dataclass(frozen=True, kw_only=True)
class MedusaPath(HeadPath):
    """Medusa heads before they are bound to a target: `medusa:path=...`."""

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_medusa(config)

    def bind(self, target_info: TargetInfo) -> MedusaDrafter:
        """Load the heads."""
        config = read_config(self.path, revision=self.revision)
        heads = read_medusa(self.path, vocab_size=target_info.vocab_size, revision=self.revision)
        sizes = heads.config
        self.check_target(TargetShape.of(config, self.path), sizes.hidden_size, target_info)
        self.check_vocabulary(sizes.vocab_size, target_info)
        if heads.token_map is None:
            self.check_vocabulary(sizes.width, target_info)
        device, dtype = self.place(target_info)
        heads = heads.to(device, dtype).requires_grad_(False)
        chosen = heads.token_map
        if chosen is not None and int(chosen.max()) >= target_info.vocab_size:
            raise InputError(f"token_map in {self.path} names tokens that this target does not have")
        return MedusaDrafter(
            heads=heads,
            running=running(heads, target_info),
            tap=target_info.num_layers,
            vocab_size=target_info.vocab_size,
            norm=target_info.norm,
            short_list=None if chosen is None else ShortList.of(chosen, target_info.vocab_size),
        )
