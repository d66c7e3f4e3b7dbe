"""Drafters with a DFlash head: a whole block is guessed in one forward (DFlash, and DFlare beside it)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import InputError, ShortList
from outrider.drafters.block import BlockDrafter
from outrider.drafters.head_path import HeadPath, running_head
from outrider.heads.block_formats import Answers, method_of
from outrider.heads.blocks import guessed_ids, read_block
from outrider.heads.checkpoint import TargetShape, read_config
from outrider.heads.dflash import DFlash, Method
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo

TABLE_BLOCK = 5
"""Positions of a block in proofs on tables."""


@dataclass(frozen=True, kw_only=True)
class DFlashDrafter(BlockDrafter):
    """Guess a block with a head that reads several of the target's hidden states at every committed position.

    Attributes:
        tapped: Which hidden states.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    trainer: ClassVar[str | None] = "dflash"
    exports: ClassVar[tuple[str, ...]] = ("dflash",)

    tapped: tuple[int, ...]

    @property
    def taps(self) -> tuple[int, ...]:
        return self.tapped

    def features(self, taps: Mapping[int, Float[Tensor, "n hidden"]]) -> Float[Tensor, "n dim"]:
        return torch.cat([taps[k] for k in self.tapped], -1)

    def on_tables(self, vocab_size: int, seed: int) -> "DFlashDrafter":
        return type(self)(
            lm=TabularLM(random_rows(vocab_size, seed), vocab_size),
            block_size=TABLE_BLOCK,
            mask_id=0,
            from_anchor=self.from_anchor,
            tapped=(0,),
        )


@dataclass(frozen=True, kw_only=True)
class DFlareDrafter(DFlashDrafter):
    """The same with a DFlare head.

    References:
        https://github.com/Tencent/AngelSlim
    """

    trainer: ClassVar[str | None] = "dflare"
    exports: ClassVar[tuple[str, ...]] = ()


@dataclass(frozen=True, kw_only=True)
class BlockPath(HeadPath):
    """A head that guesses blocks, before it is bound to a target.

    Attributes:
        path: Directory or hub id: the `speculators` layout, or an author's own.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default the target's.
        mask_token_id: The token that stands for an unknown token, where the files do not say it.
        sample_from_anchor: Whether the anchor's position guesses the first token, where the files do not say it.
        causal: Whether a position of a block sees no later one of it, where the files do not say it (JetSpec heads: it
            does not).
    """

    method: ClassVar[Method]

    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    causal: bool | None = None

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return method_of(config) == cls.method

    def read(self, target_info: TargetInfo) -> dict[str, Any]:
        """Load the head. Returns the fields of its drafter.

        Raises:
            InputError: There is none, it is another one, or it was not made for this target.
        """
        shape = TargetShape.of(read_config(self.path, revision=self.revision), self.path)
        self.check_target(shape, target_info.hidden_size if shape is None else shape.hidden_size, target_info)
        answers = Answers(
            mask_token_id=self.mask_token_id, sample_from_anchor=self.sample_from_anchor, causal=self.causal
        )
        head = read_block(self.path, target_info.ends, target_info.vocab_size, revision=self.revision, answers=answers)
        self._check(head, target_info)
        device, dtype = self.place(target_info)
        config, ids = head.config, guessed_ids(head)
        placed = head.to(device, dtype).requires_grad_(False)
        lm = running_head(placed, target_info, max_context=self.longest(target_info) + config.block_size)
        return {
            "lm": lm,
            "block_size": config.block_size,
            "mask_id": config.mask_id,
            "from_anchor": config.from_anchor,
            "tapped": config.taps,
            "short_list": None if ids is None else ShortList.of(ids.to(target_info.device), target_info.vocab_size),
        }

    def _check(self, head: DFlash, target_info: TargetInfo) -> None:
        """Raise InputError if the head is another one, or was not made for this target."""
        if head.method != self.method:
            raise InputError(f"the head in {self.path} is a {head.method} head; use drafter {head.method}")
        config = head.config
        self.check_target(None, config.target_size, target_info)
        if max(config.taps) > target_info.num_layers:
            raise InputError(
                f"the head in {self.path} reads the hidden states {list(config.taps)}, and this target has "
                f"{target_info.num_layers} layers; give a head that was trained for this target"
            )
        borrowed = config.num_embeddings is None or config.num_outputs is None
        if borrowed and config.layers.hidden_size != target_info.hidden_size:
            raise InputError(
                f"the head in {self.path} is {config.layers.hidden_size} wide and uses the embedding or the output "
                f"layer of its target, and this target's are {target_info.hidden_size} wide"
            )


@dataclass(frozen=True, kw_only=True)
class DFlashPath(BlockPath):
    """A DFlash head before it is bound to a target: `dflash:path=...`. Its fields are those of `BlockPath`."""

    method: ClassVar[Method] = "dflash"

    def bind(self, target_info: TargetInfo) -> DFlashDrafter:
        """Load the head."""
        return DFlashDrafter(**self.read(target_info))


@dataclass(frozen=True, kw_only=True)
class DFlarePath(BlockPath):
    """A DFlare head before it is bound to a target: `dflare:path=...`. Its fields are those of `BlockPath`."""

    method: ClassVar[Method] = "dflare"

    def bind(self, target_info: TargetInfo) -> DFlareDrafter:
        """Load the head."""
        return DFlareDrafter(**self.read(target_info))
