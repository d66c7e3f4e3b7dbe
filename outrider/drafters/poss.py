"""PosS: EAGLE or EAGLE-3 with a specialist for each part of a draft (Huang et al. 2025)."""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Request, Running, ShortList
from outrider.drafters.eagle3 import AskingPath
from outrider.drafters.protocol import Observed
from outrider.drafters.slotted import state_of
from outrider.heads.checkpoint import TargetShape, read_config, read_tensors
from outrider.heads.eagle import EagleHead
from outrider.heads.parts.layer_config import without_copies
from outrider.heads.poss import PossFile, is_poss
from outrider.heads.trunks.features import (
    FeatureDrafter,
    FeatureHead,
    FeatureState,
    append_features,
    head_lm,
    needed,
    pending_of,
)
from outrider.lm.head import HeadLM
from outrider.lm.protocol import Segment
from outrider.lm.tabular import TabularHead
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow


@dataclass(kw_only=True)
class PossState(FeatureState):
    """One request's slot of each specialist, and its growing draft; changes in place. Its own slot and features are
    those of the first specialist.

    Attributes:
        further: The slots and pending features of the further specialists.
        above: For each expanded node, its parent.
        tokens: For each expanded node, its token.
    """

    further: list[FeatureState] = field(default_factory=list)
    above: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, Int[Tensor, ""]] = field(default_factory=dict)

    def all(self) -> list[FeatureState]:
        """What each specialist keeps."""
        return [self, *self.further]


@dataclass(frozen=True, kw_only=True)
class PossDrafter(FeatureDrafter):
    r"""Guess draft step i (from 0) with specialist $\min(\lfloor i / n \rfloor, \text{last})$.

    Each specialist has keys and values of its own. When a draft reaches it, it reads in one forward what it lacks: the
    committed pairs since it was last reached, with the target's features; the nodes above the new ones, with the
    features that were output there; and the new nodes. Its committed pairs stay. So a switch costs no forward, and a
    specialist that no draft reaches reads only long stretches of committed pairs.

    Attributes:
        lm: The first specialist.
        further: The further specialists.
        stride: $n$.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2506.03566
    """

    trainer: ClassVar[str | None] = "poss"
    state: ClassVar[type[FeatureState]] = PossState

    further: tuple[HeadLM | TabularHead, ...] = ()
    stride: int = 1

    @property
    def lms(self) -> tuple[HeadLM | TabularHead, ...]:
        """All specialists."""
        return self.lm, *self.further

    def open(self, request: Request) -> PossState:
        return PossState(slot=self.lm.open(), further=[FeatureState(slot=lm.open()) for lm in self.further])

    def close(self, state: object) -> None:
        for lm, own in zip(self.lms, state_of(PossState, state).all(), strict=True):
            lm.release(own.slot)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        features = self.features(observed.taps)
        for number, lm in enumerate(self.lms):
            append_features(lm, [_own(state).all()[number] for state in states], states, features, observed.offsets)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        guess = super().begin(states, depths)
        for own in map(_own, states):
            own.fed, own.above, own.tokens = {0: -1}, {}, {}
        return guess

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        number = min(int(frontier.depths[0]) // self.stride, len(self.further))
        groups = list(_by_owner(states, frontier))
        segments = [self._segment(number, state, nodes) for state, nodes in groups]
        extension = self.lms[number].extend(segments)
        parts = cast(Tensor, extension.features).split([len(segment.tokens) for segment in segments])
        for (state, nodes), part in zip(groups, parts, strict=True):
            _own(state).head_output |= dict(zip(nodes, part[len(part) - len(nodes) :].unbind(0), strict=True))
        return Guess(logits=extension.logits, short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        depths = iter(range(1, max(counts) + 1))

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            depth = next(depths)
            owners = np.flatnonzero(np.array(counts) >= depth)
            numbers = np.full(len(owners), depth)
            frontier = Frontier(owners=owners, nodes=numbers, parents=numbers - 1, depths=numbers, tokens=tokens)
            return cast(Tensor, self.expand(states, frontier).logits)

        return step

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        super().commit(states, paths)
        for number, lm in enumerate(self.further, start=1):
            reached = [own for state in states if (own := _own(state).all()[number]).fed]
            lm.commit({own.slot: range(own.fed[0] + 1) for own in reached})
            for own in reached:
                rest = torch.cat(own.pending_features)[own.fed[0] + 1 :]
                own.pending_features, own.fed = [rest] if len(rest) else [], {}

    def needs(self, state: object, length: int) -> int:
        own = state_of(PossState, state)
        # What all specialists can go on from.
        return min(needed(lm, each, length) for lm, each in zip(self.lms, own.all(), strict=True))

    def reuse(self, state: object, request: Request, length: int) -> PossState:
        own, first = state_of(PossState, state), self.needs(state, length)
        kept = []
        for lm, each in zip(self.lms, own.all(), strict=True):
            unread = pending_of(lm, each, first)
            lm.truncate(each.slot, min(lm.length(each.slot), first, max(0, length - 1)))
            kept.append(FeatureState(slot=each.slot, pending_features=unread))
        return PossState(slot=kept[0].slot, pending_features=kept[0].pending_features, further=kept[1:])

    def fork(self, state: object, request: Request, length: int) -> PossState:
        own, first = state_of(PossState, state), self.needs(state, length)
        kept = []
        for lm, each in zip(self.lms, own.all(), strict=True):
            slot = lm.copy(each.slot, min(lm.length(each.slot), first, max(0, length - 1)))
            kept.append(FeatureState(slot=slot, pending_features=pending_of(lm, each, first)))
        return PossState(slot=kept[0].slot, pending_features=kept[0].pending_features, further=kept[1:])

    def cast(self, target_info: TargetInfo) -> "PossDrafter":
        if isinstance(self.lm, TabularHead):
            return self
        head = copy.deepcopy(cast(FeatureHead, self.lm.module)).to(target_info.dtype)
        head.ends = target_info.ends()
        slots, longest = self.lm.max_slots, self.lm.max_context
        readers = map(head.reader, range(len(self.lms)))
        lms = [HeadLM(reader, max_slots=slots, max_context=longest) for reader in readers]
        return replace(self, lm=lms[0], further=tuple(lms[1:]))

    def on_tables(self, vocab_size: int, seed: int) -> "PossDrafter":
        further = tuple(TabularHead(vocab_size, seed + number) for number in range(1, len(self.lms)))
        return replace(self, lm=TabularHead(vocab_size, seed), further=further, reads=(0,), short_list=None)

    def _segment(self, number: int, state: Running, nodes: Sequence[int]) -> Segment:
        """What a specialist must read of a request to guess after some nodes. Their logits are wanted."""
        lm, draft = self.lms[number], _own(state)
        own = draft.all()[number]
        tokens: list[Int[Tensor, " _"]] = []
        features: list[Float[Tensor, "_ dim"]] = []
        parents: list[int] = []
        if 0 not in own.fed:
            count, first = own.num_pending, lm.length(own.slot) + 1
            tokens.append(torch.tensor(state.tokens[first : first + count]).to(lm.device, non_blocking=True))
            features += own.pending_features
            parents += range(-1, count - 1)
            own.fed[0] = count - 1
        lacking = [*_unfed(draft, own, nodes), *nodes]
        tokens.append(torch.stack([draft.tokens[node] for node in lacking]).to(lm.device, non_blocking=True))
        features.append(self.next_feature(torch.stack([draft.head_output[draft.above[node]] for node in lacking])))
        for node in lacking:
            parents.append(own.fed[draft.above[node]])
            own.fed[node] = own.fed[0] + len(own.fed)
        return Segment(
            slot=own.slot,
            tokens=torch.cat(tokens),
            parents=np.array(parents),
            logits=len(nodes),
            features=torch.cat(features),
        )


@dataclass(frozen=True, kw_only=True)
class PossPath(AskingPath):
    """A head with position specialists before it is bound to a target: `poss:path=...`.

    Attributes:
        stride: Draft steps of each specialist, where the config does not say it. The other fields are those of
            `eagle3`, for a head on its trunk.
    """

    stride: int | None = None

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return is_poss(config, names)

    def bind(self, target_info: TargetInfo) -> PossDrafter:
        """Load the head."""
        config = read_config(self.path, revision=self.revision)
        tensors = read_tensors(self.path, revision=self.revision)
        file = PossFile.of(self.path, config, tensors, stride=self.stride)
        self.check_target(TargetShape.of(config, self.path), file.target_hidden_size, target_info)
        self.check_vocabulary(file.vocab_size, target_info)
        own = without_copies(dict(file.trunk.tensors), target_info.embed, target_info.device)
        file = replace(file, trunk=replace(file.trunk, tensors=own))
        head = file.head(
            target_info.ends(),
            num_layers=target_info.num_layers,
            vocab_size=target_info.vocab_size,
            answers=self.answers,
        )
        lms = [head_lm(self, head.reader(number), target_info) for number in range(1 + len(head.specialists))]
        few = None
        if isinstance(head, EagleHead):
            reads: tuple[int, ...] = (target_info.num_layers,)
        else:
            reads = head.sizes.taps
            few = None if head.ids is None else ShortList.of(head.ids.to(lms[0].device), target_info.vocab_size)
        return PossDrafter(lm=lms[0], further=tuple(lms[1:]), stride=head.stride, reads=reads, short_list=few)


def _by_owner(states: Sequence[Running], frontier: Frontier) -> Iterator[tuple[Running, list[int]]]:
    """The requests of a frontier, each with its nodes. Notes the parents and the tokens of the nodes."""
    nodes, above = frontier.nodes.tolist(), frontier.parents.tolist()
    starts = np.flatnonzero(np.diff(frontier.owners, prepend=-1)).tolist()
    for first, end in zip(starts, [*starts[1:], len(nodes)], strict=True):
        state = states[int(frontier.owners[first])]
        own = _own(state)
        own.above |= dict(zip(nodes[first:end], above[first:end], strict=True))
        own.tokens |= dict(zip(nodes[first:end], frontier.tokens[first:end].unbind(0), strict=True))
        yield state, nodes[first:end]


def _unfed(draft: PossState, own: FeatureState, nodes: Sequence[int]) -> list[int]:
    """The nodes above some nodes that a specialist has not read yet, parents first."""
    found: set[int] = set()
    for node in nodes:
        above = draft.above[node]
        while above not in own.fed and above not in found:
            found.add(above)
            above = draft.above[above]
    return sorted(found)


def _own(state: Running) -> PossState:
    return state_of(PossState, state.drafter_state)
