"""ParallelSpec: all tokens of a draft are guessed in one forward of a head, at mask slots (2024)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Guess, InputError, Running, ShortList
from outrider.drafters.eagle3 import AskingPath
from outrider.drafters.marginal import MarginalDrafter
from outrider.drafters.slotted import state_of
from outrider.heads.checkpoint import MOST_COUNT, TargetShape, read_config, read_names, read_tensors
from outrider.heads.parallel import ParallelFile, is_parallel
from outrider.heads.peagle import PEagleFile, is_peagle
from outrider.heads.trunks.features import FeatureDrafter, FeatureState, head_lm
from outrider.lm.protocol import Segment
from outrider.lm.target_info import TargetInfo


@dataclass(kw_only=True)
class ParallelState(FeatureState):
    """One request's slot of a head, its pending features, and the last draft; changes in place.

    Attributes:
        block: Logits for the depths of the last draft; None before any.
    """

    block: Float[Tensor, "depth vocab"] | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelDrafter(MarginalDrafter, FeatureDrafter):
    """Guess with one forward per draft, over the pairs that the head has not read and the mask slots behind them.

    Keys and values of pairs stay in the head's cache. Those of slots do not.

    Attributes:
        slots: The tokens that stand for the slots, in order.

    References:
        ParallelSpec 2024. https://arxiv.org/abs/2410.05589
    """

    trainer: ClassVar[str | None] = "parallel"
    state: ClassVar[type[FeatureState]] = ParallelState

    slots: tuple[int, ...]

    @property
    def max_depth(self) -> int:
        return len(self.slots) + 1

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        pairs = [
            self._pairs(state, state_of(FeatureState, state.drafter_state).num_pending, "last") for state in states
        ]
        slots = torch.tensor(self.slots, dtype=torch.long).to(self.lm.device, non_blocking=True)
        segments = [_before(pair, slots[: depth - 1]) for pair, depth in zip(pairs, depths, strict=True)]
        blocks = self.lm.extend(segments).logits.split(list(depths))
        self.lm.commit({pair.slot: range(len(pair.tokens)) for pair in pairs})
        for state, pair, block in zip(states, pairs, blocks, strict=True):
            own = state_of(ParallelState, state.drafter_state)
            own.forget(len(pair.tokens))
            own.block = block
        return Guess(logits=torch.stack([block[0] for block in blocks]), short_list=self.short_list)

    def guessed(self, state: Running) -> Float[Tensor, "depth vocab"] | None:
        return state_of(ParallelState, state.drafter_state).block

    def on_tables(self, vocab_size: int, seed: int) -> "ParallelDrafter":
        made = super().on_tables(vocab_size, seed)
        slots = tuple(i % vocab_size for i in range(len(self.slots)))
        return replace(self, lm=made.lm, reads=made.reads, short_list=None, slots=slots)


@dataclass(frozen=True, kw_only=True)
class ParallelPath(AskingPath):
    """A parallel head before it is bound to a target: `parallel:path=...`. P-EAGLE heads load too.

    Attributes:
        path: Directory or hub id.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default the target's.
        slots: Mask slots of a P-EAGLE head, which guess one token each behind the first; by default as its config says.
        mask_token_id: The mask token of a P-EAGLE head, where its config does not say it. `norm_before_residual`,
            `norm_output` and `taps` are for such heads too, as for `eagle3`.
    """

    slots: int | None = None
    mask_token_id: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and not 0 <= self.slots <= MOST_COUNT:
            raise InputError(f"slots must be in 0..{MOST_COUNT}, got {self.slots}")

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_parallel(config) or is_peagle(config, names)

    def bind(self, target_info: TargetInfo) -> ParallelDrafter:
        """Load the head."""
        config = read_config(self.path, revision=self.revision)
        if is_peagle(config, read_names(self.path, revision=self.revision)):
            return self._peagle(config, target_info)
        file = ParallelFile.read(self.path, revision=self.revision)
        if self.slots is not None and self.slots > file.num_slots:
            raise InputError(f"the head in {self.path} has {file.num_slots} mask slots, got slots={self.slots}")
        self.check_target(TargetShape.of(config, self.path), file.layer.hidden_size, target_info)
        self.check_vocabulary(file.layer.vocab_size, target_info)
        head = file.head(target_info.ends(), target_info.vocab_size)
        return ParallelDrafter(
            lm=head_lm(self, head, target_info),
            reads=(target_info.num_layers,),
            slots=_slots(file.num_slots if self.slots is None else self.slots),
        )

    def _peagle(self, config: Mapping[str, Any], target_info: TargetInfo) -> ParallelDrafter:
        """Load a P-EAGLE head."""
        tensors = read_tensors(self.path, revision=self.revision)
        file = PEagleFile.of(self.path, config, tensors, mask_id=self.mask_token_id)
        self.check_target(file.eagle3.target, file.eagle3.target_hidden_size, target_info)
        self.check_vocabulary(int(file.eagle3.layer.vocab_size), target_info)
        num_slots = file.num_slots if self.slots is None else self.slots
        if num_slots is None:
            raise InputError(
                f"the config of the P-EAGLE head in {self.path} does not say how many tokens it drafts; add slots=N "
                "behind the path, one less than the tokens of a draft"
            )
        head = file.head(
            target_info.ends(),
            num_layers=target_info.num_layers,
            vocab_size=target_info.vocab_size,
            answers=self.answers,
        )
        lm, ids = head_lm(self, head, target_info), head.ids
        return ParallelDrafter(
            lm=lm,
            reads=head.sizes.taps,
            slots=_slots(num_slots),
            short_list=None if ids is None else ShortList.of(ids.to(lm.device), target_info.vocab_size),
        )


def _slots(count: int) -> tuple[int, ...]:
    """The tokens that stand for mask slots."""
    return tuple(range(-1, -1 - count, -1))


def _before(pairs: Segment, slots: Tensor) -> Segment:
    """A segment with mask slots behind its pairs. The logits are those of the last pair and of the slots."""
    if pairs.features is None:
        raise TypeError("a pair has a feature")
    nothing = pairs.features.new_zeros(len(slots), pairs.features.shape[1])
    return replace(
        pairs,
        tokens=torch.cat([pairs.tokens, slots]),
        features=torch.cat([pairs.features, nothing]),
        logits=len(slots) + 1,
    )
