"""Drafters of several small language models, each of which guesses some depths of a draft (PosS, prediction layers)."""

import copy
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar, cast

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Request, Running
from outrider.heads.trunks.features import FeatureDrafter, FeatureState, attach_target
from outrider.lm.head import HeadLM
from outrider.lm.tabular import TabularHead
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow


@dataclass(frozen=True, kw_only=True)
class ExpandedNode:
    """An expanded draft node: its parent's number, its depth and its token."""

    parent: int
    depth: int
    token: Int[Tensor, ""]


@dataclass(kw_only=True)
class SeveralState(FeatureState):
    """One request's slots of all models, and its growing draft; changes in place. It is itself the state of the first
    model.

    Attributes:
        further: The states of the further models.
        nodes: The expanded nodes of the draft, by number.
    """

    further: list[FeatureState] = field(default_factory=list)
    nodes: dict[int, ExpandedNode] = field(default_factory=dict)

    @property
    def parts(self) -> list[FeatureState]:
        """What each model keeps."""
        return [self, *self.further]


States = TypeVar("States", bound=SeveralState)


@dataclass(frozen=True, kw_only=True)
class SeveralDrafter(FeatureDrafter[States]):
    """Guess by several models, the first of which guesses the first token.

    Attributes:
        lm: The first model.
        further: The further ones.
    """

    state: ClassVar[type[Any]] = SeveralState

    further: tuple[HeadLM | TabularHead, ...] = ()

    @property
    def lms(self) -> tuple[HeadLM | TabularHead, ...]:
        """All models."""
        return self.lm, *self.further

    @abstractmethod
    def usable(self, state: States, length: int) -> list[tuple[int, int]]:
        """For each model, how many positions of its slot, and how many of its pending features, a text with the same
        first `length` tokens can use.
        """

    def open(self, request: Request) -> States:
        opened: States = self.state(slot=self.lm.open(), further=[FeatureState(slot=lm.open()) for lm in self.further])
        return opened

    def close(self, state: object) -> None:
        for lm, each in zip(self.lms, self.checked(state).parts, strict=True):
            lm.release(each.slot)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        depths = iter(range(1, max(counts) + 1))

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            depth = next(depths)
            owners = np.flatnonzero(np.array(counts) >= depth)
            numbers = np.full(len(owners), depth)
            frontier = Frontier(owners=owners, nodes=numbers, parents=numbers - 1, depths=numbers, tokens=tokens)
            return cast(Tensor, self.expand(states, frontier).logits)

        return step

    def by_owner(self, states: Sequence[Running], frontier: Frontier) -> Iterator[tuple[Running, list[int]]]:
        """The requests of a frontier, each with its nodes. Notes what is known of the nodes."""
        numbers = frontier.nodes.tolist()
        starts = np.flatnonzero(np.diff(frontier.owners, prepend=-1)).tolist()
        rows = zip(frontier.parents.tolist(), frontier.depths.tolist(), frontier.tokens.unbind(0), strict=True)
        nodes = [ExpandedNode(parent=parent, depth=depth, token=token) for parent, depth, token in rows]
        for first, end in zip(starts, [*starts[1:], len(numbers)], strict=True):
            state = states[int(frontier.owners[first])]
            self.state_of(state).nodes |= dict(zip(numbers[first:end], nodes[first:end], strict=True))
            yield state, numbers[first:end]

    def reuse(self, state: object, request: Request, length: int) -> States:
        drafter_state, states = self.checked(state), []
        usable = self.usable(drafter_state, length)
        for lm, each, (kept, count) in zip(self.lms, drafter_state.parts, usable, strict=True):
            lm.truncate(each.slot, kept)
            states.append(FeatureState(slot=each.slot, pending_features=each.first_pending(count)))
        return self._joined(states)

    def fork(self, state: object, request: Request, length: int) -> States:
        drafter_state = self.checked(state)
        usable = self.usable(drafter_state, length)
        return self._joined(
            [
                FeatureState(slot=lm.copy(each.slot, kept), pending_features=each.first_pending(count))
                for lm, each, (kept, count) in zip(self.lms, drafter_state.parts, usable, strict=True)
            ]
        )

    def cast(self, target_info: TargetInfo) -> "SeveralDrafter":
        if isinstance(self.lm, TabularHead):
            return self
        # Copied together, they share what they shared.
        modules = copy.deepcopy([cast(HeadLM, lm).module for lm in self.lms])
        first, *further = (
            HeadLM(attach_target(module, target_info), max_slots=lm.max_slots, max_context=lm.max_context)
            for lm, module in zip(self.lms, modules, strict=True)
        )
        return replace(self, lm=first, further=tuple(further))

    def on_tables(self, vocab_size: int, seed: int) -> "SeveralDrafter":
        first, *further = (TabularHead(vocab_size, seed + number) for number in range(len(self.lms)))
        return replace(self, lm=first, further=tuple(further), reads=(0,), short_list=None)

    def _joined(self, states: Sequence[FeatureState]) -> States:
        """The state of a request from those of all models."""
        first, further = states[0], list(states[1:])
        whole: States = self.state(slot=first.slot, pending_features=first.pending_features, further=further)
        return whole
