"""Hydra: Medusa heads that read the draft tokens before them; Hydra++ has a prefix layer (Ankner et al. 2024)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.core.types import InputError, Request, Running
from outrider.drafters.head_path import HeadPath, running_head
from outrider.drafters.last_state import last_state
from outrider.drafters.protocol import Observed
from outrider.drafters.sequential import SequentialDrafter, SequentialState, placed
from outrider.heads.hydra import HydraConfig, HydraHeads, is_hydra, read_hydra
from outrider.heads.sequential import randomise
from outrider.lm.head import HeadLM
from outrider.lm.hf.checkpoint import TargetShape, read_config
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.protocol import Segment
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo


@dataclass(kw_only=True)
class HydraState(SequentialState):
    """What Hydra heads keep of a request; changes in place.

    Attributes:
        slot: Where the prefix layer keeps the request; None without one.
    """

    slot: int | None = None


@dataclass(frozen=True, kw_only=True)
class HydraDrafter(SequentialDrafter):
    """Guess by `HydraHeads`. With a prefix layer, that layer reads the target's states of all positions, and the heads
    read its newest output.

    Attributes:
        norm: The target's final norm, or nothing where the heads read an earlier state.
        prefix: The prefix layer.

    References:
        Ankner et al. 2024. https://arxiv.org/abs/2402.05109
    """

    keeps_cache: ClassVar[bool] = True

    norm: Callable[[Tensor], Tensor] = field(compare=False, default=nn.Identity())
    prefix: HeadLM | None = None

    @property
    def max_context(self) -> int | None:
        return None if self.prefix is None else self.prefix.max_context

    @property
    def modules(self) -> dict[str, nn.Module]:
        return super().modules | ({} if self.prefix is None else {"prefix": self.prefix.module})

    def features(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n hidden"]:
        return self.norm(hidden) if self.prefix is None else hidden

    def open(self, request: Request) -> HydraState:
        return HydraState(slot=None if self.prefix is None else self.prefix.open())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        prefix = self.prefix
        if prefix is None:
            super().observe(states, observed)
            return
        features = self.norm(observed.taps[self.tap]).to(prefix.device, prefix.dtype, non_blocking=True)
        segments = []
        for i, state in enumerate(states):
            own, first, end = _own(state.drafter_state), int(observed.offsets[i]), int(observed.offsets[i + 1])
            end = min(end, first + prefix.max_context - prefix.length(_slot(own)))
            tokens = torch.from_numpy(observed.tokens[first:end]).to(prefix.device, non_blocking=True)
            segments.append(Segment(slot=_slot(own), tokens=tokens, features=features[first:end], logits="none"))
        found = cast(Tensor, prefix.extend(segments).features)
        prefix.commit({segment.slot: range(len(segment.tokens)) for segment in segments})
        end = 0
        for state, segment in zip(states, segments, strict=True):
            own, end = _own(state.drafter_state), end + len(segment.tokens)
            own.num_seen = prefix.length(segment.slot)
            if len(segment.tokens):
                own.newest = found[end - 1].clone()

    def reuse(self, state: object, request: Request, length: int) -> HydraState:
        own, slot = _own(state), _own(state).slot
        if self.prefix is not None:
            self.prefix.truncate(_slot(own), self.needs(own, length))
        return self._again(own, length, slot)

    def fork(self, state: object, request: Request, length: int) -> HydraState:
        own = _own(state)
        slot = None if self.prefix is None else self.prefix.copy(_slot(own), self.needs(own, length))
        return self._again(own, length, slot)

    def close(self, state: object) -> None:
        if self.prefix is not None:
            self.prefix.release(_slot(_own(state)))

    def cast(self, target_info: TargetInfo) -> "HydraDrafter":
        prefix = None if self.prefix is None else self.prefix.cast(target_info.dtype)
        norm = self.norm if isinstance(self.norm, nn.Identity) else target_info.norm
        return replace(super().cast(target_info), norm=norm, prefix=prefix)

    def on_tables(self, vocab_size: int, seed: int) -> "HydraDrafter":
        table, same = nn.Embedding(vocab_size, TABLE_FEATURES).double().requires_grad_(False), nn.Identity()
        randomise(table, seed)
        config = HydraConfig(hidden_size=TABLE_FEATURES, vocab_size=vocab_size, num_heads=self.max_depth)
        head = HydraHeads(config, EmbeddingAndHead(embed=table, norm=same, head=same)).double().eval()
        randomise(head, seed)
        return HydraDrafter(head=head, tap=0, vocab_size=vocab_size)

    def _again(self, own: HydraState, length: int, slot: int | None) -> HydraState:
        newest = own.newest if own.num_seen <= length else None
        return HydraState(num_seen=self.needs(own, length), newest=newest, slot=slot)


@dataclass(frozen=True, kw_only=True)
class HydraPath(HeadPath):
    """Hydra heads before they are bound to a target: `hydra:path=...`.

    Attributes:
        base: Directory or hub id of the target, whose config says what a prefix layer is like; by default as the heads'
            config names it.
    """

    base: str | None = None

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_hydra(config)

    def bind(self, target_info: TargetInfo) -> HydraDrafter:
        """Load the heads."""
        config = read_config(self.path, revision=self.revision)
        read, layer = read_hydra(self.path, target_info.ends(), base=self.base, revision=self.revision)
        self.check_target(TargetShape.of(config, self.path), read.hidden_size, target_info)
        self.check_vocabulary(read.config.vocab_size, target_info)
        offset = read.config.offset
        if not 0 <= offset <= target_info.num_layers:
            raise InputError(
                f"the heads in {self.path} read the state {offset} layers before the end, and this target has "
                f"{target_info.num_layers} layers"
            )
        head, running = placed(self, read, target_info)
        prefix = None
        if layer is not None:
            layer = layer.to(head.weight.device, head.weight.dtype).requires_grad_(False)
            prefix = running_head(layer, target_info, max_context=self.longest(target_info))
        return HydraDrafter(
            head=head,
            running=running,
            tap=target_info.num_layers - offset,
            vocab_size=target_info.vocab_size,
            norm=nn.Identity() if offset else target_info.norm,
            prefix=prefix,
        )


def _own(state: object) -> HydraState:
    found = last_state(state)
    if not isinstance(found, HydraState):
        raise TypeError(f"this drafter keeps a HydraState, got {type(found).__name__}")
    return found


def _slot(own: HydraState) -> int:
    if own.slot is None:
        raise RuntimeError("this request has no slot of the prefix layer")
    return own.slot
