"""The base of drafters whose head continues with its own features after the target's last one (EAGLE and its kin)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Frontier, Guess, Request, Running, ShortList
from outrider.drafters.protocol import Observed, Rows
from outrider.drafters.slotted import SlottedDrafter, TreeState, state_of, tree_segments
from outrider.lm.protocol import LM, Extension, Segment
from outrider.lm.slots.chain import chain
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

BACKLOG = 64
"""This many pending features of a request are read at once. Fewer wait for the next draft's first forward."""


@dataclass(kw_only=True)
class HeadState(TreeState):
    """One request's slot of a head, and the features that the head has not read yet; changes in place.

    The slot holds one pair for each position that the head has read: the target's feature there, and the token that
    follows.

    Attributes:
        unread: Features of the next positions.
        head_output: For the root and each expanded node, the feature that the head returned.
    """

    pending_features: list[Float[Tensor, "_ dim"]] = field(default_factory=list)
    head_output: dict[int, Float[Tensor, " hidden"]] = field(default_factory=dict)

    @property
    def num_pending(self) -> int:
        """Number of positions whose features are known but not read."""
        return sum(len(features) for features in self.pending_features)

    def forget(self, count: int) -> None:
        """Drop the first pending features, because the head has read them."""
        if count >= self.num_pending:
            self.pending_features = []
        elif count:
            self.pending_features = [torch.cat(self.pending_features)[count:]]

    def first_pending(self, count: int) -> list[Float[Tensor, "_ dim"]]:
        """The features of the first pending positions."""
        kept = []
        for features in self.pending_features:
            if count > 0:
                kept.append(features[:count])
            count -= len(features)
        return kept


@dataclass(frozen=True, kw_only=True)
class OwnFeatures(SlottedDrafter):
    r"""Guess by a head that reads pairs of a token and the feature of the position before it.

    After the target has read $x_0 \ldots x_n$, its features $f_0 \ldots f_n$ are known, and $x_{n+1}$ is the anchor.
    The head reads the pairs $(x_{t+1}, f_t)$, the anchor's last, and guesses the next token. For a draft token the head
    reads its own returned feature instead of the target's. Committed positions are always read with the target's
    features, so no draft token stays in the head's cache.

    A subclass states its taps, and how they become features.

    Attributes:
        lm: The head.
        short_list: The tokens that it can guess; None: all.

    References:
        Li et al. 2024, EAGLE. https://arxiv.org/abs/2401.15077
    """

    rows: ClassVar[Rows] = "sampled"
    context_pure: ClassVar[bool] = False

    state: ClassVar[type[HeadState]] = HeadState
    """The kind of a request's state."""

    lm: LM
    short_list: ShortList | None = None

    def features(self, taps: Mapping[int, Float[Tensor, "n hidden"]]) -> Float[Tensor, "n dim"]:
        """Features from the target's hidden states; by default these side by side, in the order of the taps."""
        return torch.cat([taps[k] for k in self.taps], -1)

    def next_feature(self, head_output: Float[Tensor, "n hidden"]) -> Float[Tensor, "n dim"]:
        """The feature that stands for a draft token's, from the head's output there; by default that output itself."""
        return head_output

    def open(self, request: Request) -> HeadState:
        return self.state(slot=self.lm.open())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        features, long = self.features(observed.taps), []
        for i, state in enumerate(states):
            own = _own(state)
            own.pending_features.append(features[observed.offsets[i] : observed.offsets[i + 1]])
            if BACKLOG <= own.num_pending <= self.lm.max_context - self.lm.length(own.slot):
                long.append(state)
        if long:
            # The last pair waits, so that the next draft has one to begin with.
            self._read(long, [_own(state).num_pending - 1 for state in long], "none")

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        counts = [_own(state).num_pending for state in states]
        extension = self._read(states, counts, "last")
        ends = np.cumsum(counts) - 1
        for state, end in zip(states, ends.tolist(), strict=True):
            own = _own(state)
            own.fed, own.head_output = {}, {0: output_features(extension)[end]}
        return Guess(logits=extension.logits, short_list=self.short_list)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        pairs = zip(frontier.owners.tolist(), frontier.parents.tolist(), strict=True)
        features = self.next_feature(torch.stack([_own(states[owner]).head_output[parent] for owner, parent in pairs]))
        segments = tree_segments(states, frontier, self.lm.device, features)
        extension = self.lm.extend(segments)
        for i, (owner, node) in enumerate(zip(frontier.owners.tolist(), frontier.nodes.tolist(), strict=True)):
            _own(states[owner]).head_output[node] = output_features(extension)[i]
        return Guess(logits=extension.logits, short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        follow = chain(self.lm, [_own(state).slot for state in states], counts)
        head_output = torch.stack([_own(state).head_output[0] for state in states])
        left = np.array(counts)

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal head_output, left
            if not (left > 0).all():
                head_output = head_output[torch.from_numpy(np.flatnonzero(left > 0)).to(head_output.device)]
            extension = follow(tokens, self.next_feature(head_output))
            head_output, left = output_features(extension), left[left > 0] - 1
            return extension.logits

        return step

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        self.lm.commit({_own(state).slot: [] for state in states})

    def needs(self, state: object, length: int) -> int:
        return needed(self.lm, state_of(HeadState, state), length)

    def reuse(self, state: object, request: Request, length: int) -> HeadState:
        own = state_of(HeadState, state)
        kept = pending_of(self.lm, own, length)
        self.lm.truncate(own.slot, min(self.lm.length(own.slot), max(0, length - 1)))
        return self.state(slot=own.slot, pending_features=kept)

    def fork(self, state: object, request: Request, length: int) -> HeadState:
        own = state_of(HeadState, state)
        slot = self.lm.copy(own.slot, min(self.lm.length(own.slot), max(0, length - 1)))
        return self.state(slot=slot, pending_features=pending_of(self.lm, own, length))

    def cast(self, target_info: TargetInfo) -> "OwnFeatures":
        return replace(self, lm=self.lm.cast(target_info.dtype))

    def _pairs(self, state: Running, count: int, logits: Literal["last", "none"]) -> Segment:
        """The next `count` pairs that a request's slot lacks."""
        return next_pairs(self.lm, _own(state), state, count, logits)

    def _read(self, states: Sequence[Running], counts: Sequence[int], logits: Literal["last", "none"]) -> Extension:
        """Run the head on the next pairs of each request, and commit them."""
        segments = [self._pairs(state, count, logits) for state, count in zip(states, counts, strict=True)]
        extension = read(self.lm, segments)
        for state, count in zip(states, counts, strict=True):
            _own(state).forget(count)
        return extension


def append_features(
    lm: LM,
    owns: Sequence[HeadState],
    states: Sequence[Running],
    features: Float[Tensor, "n dim"],
    offsets: Int[np.ndarray, " bounds"],
) -> None:
    """Note the features of new positions. Where many are unread, a head reads them now.

    Args:
        lm: The head.
        owns: What it keeps of each request.
        states: The requests.
        features: Of all requests, packed.
        offsets: Where each request's features begin; the last entry is their number.
    """
    long = []
    for i, (own, state) in enumerate(zip(owns, states, strict=True)):
        own.pending_features.append(features[offsets[i] : offsets[i + 1]])
        if BACKLOG <= own.num_pending <= lm.max_context - lm.length(own.slot):
            long.append((own, state))
    if long:
        # The last pair waits, so that the next draft has one to begin with.
        read(lm, [next_pairs(lm, own, state, own.num_pending - 1, "none") for own, state in long])
        for own, _ in long:
            own.forget(own.num_pending - 1)


def next_pairs(lm: LM, own: HeadState, state: Running, count: int, logits: Literal["last", "none"]) -> Segment:
    """The next `count` pairs that a request's slot lacks."""
    first, features = lm.length(own.slot) + 1, torch.cat(own.pending_features)
    tokens = torch.tensor(state.tokens[first : first + count]).to(lm.device, non_blocking=True)
    return Segment(slot=own.slot, tokens=tokens, features=features[:count], logits=logits)


def read(lm: LM, segments: Sequence[Segment]) -> Extension:
    """Run a head on pairs and commit them."""
    extension = lm.extend(segments)
    lm.commit({segment.slot: range(len(segment.tokens)) for segment in segments})
    return extension


def needed(lm: LM, own: HeadState, length: int) -> int:
    """The first position that a head must be shown again, for a text with the same first `length` tokens."""
    known = lm.length(own.slot)
    return min(known + own.num_pending, length) if known < length else max(0, length - 1)


def pending_of(lm: LM, own: HeadState, length: int) -> list[Float[Tensor, "_ dim"]]:
    """The pending features that a text with the same first `length` tokens can use."""
    known = lm.length(own.slot)
    return own.first_pending(length - known) if known < length else []


def output_features(extension: Extension) -> Float[Tensor, "nodes hidden"]:
    """What a head outputs at all new nodes."""
    if extension.features is None:
        raise TypeError("the extension of a head must hold features")
    return extension.features


def _own(state: Running) -> HeadState:
    return state_of(HeadState, state.drafter_state)
