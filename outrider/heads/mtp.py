"""A target's own multi-token-prediction layers: transformers' modules behind the slots of `HeadLM`.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2. https://arxiv.org/abs/2412.19437
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from outrider.core.types import Frontier, Guess, Request, Running
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Observed, check_longest
from outrider.heads.trunks.features import (
    BACKLOG,
    FeatureDrafter,
    FeatureState,
    behind_committed,
    output_features,
    pending,
)
from outrider.lm.head import HeadLM, KVCache, head_lm
from outrider.lm.hf.anatomy import Span
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.open import model_place
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.batch import upload
from outrider.lm.tabular import TabularHead
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

EXPORTS = Exports(vllm="mtp", sglang="NEXTN", llama="draft-mtp", has_files=False)
"""The layers are part of the target's checkpoint."""


class MtpHead(nn.Module):
    r"""Layer k of a target's `MtpModel`: it reads the token at a position and a feature of the position before.

    With the target's normed last hidden state $h_p$ and $f^{-1}_p = h_p$, layer k computes
    $f^k_p = L_k(x_p, f^{k-1}_{p-1})$, with attention to its own keys at earlier positions, and guesses $x_{p+1}$ from
    $f^k_p$ by the target's output layer. Its slot holds positions $k + 1, k + 2, \ldots$ of the text.

    Attributes:
        embedding_and_head: The target's embedding, final norm and output layer.
        feature_size: Width of the features.
        vocab_size: Width of the logits.
        span: How far its attention looks back.

    Args:
        model: The `MtpModel`.
        number: The number k of the layer.
        embedding_and_head: Those of the target.
        vocab_size: Width of the target's logits.
    """

    def __init__(self, model: Any, number: int, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__()
        config = model.config
        self.layer = model.layers[number]
        self._cache = cache_keyword(type(self.layer))
        self.shared_norm = model.shared_post_norm if model.use_shared_post_norm else nn.Identity()
        self.number, self.embedding_and_head = number, embedding_and_head
        self.feature_size, self.vocab_size = int(config.hidden_size), vocab_size
        kind = (getattr(config, "layer_types", None) or {number: None})[number]
        self.span = Span(window=config.sliding_window) if kind == "sliding_attention" else Span()
        self._of_rotary = {"layer_type": kind} if model.has_per_layer_rope else {}
        # The tuple keeps torch from registering the target's own module.
        self._rotary = (model.rotary_emb,)

    def fuse(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The feature of a position, from the target's hidden state below its final norm."""
        return self.embedding_and_head.norm(states)

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The feature that the layer itself makes of a position, for the next token."""
        return head_output

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        places = positions + self.number + 1
        embedded = self.embedding_and_head.embed(tokens).to(features.dtype)
        rotary = None if self._rotary[0] is None else self._rotary[0](embedded, position_ids=places, **self._of_rotary)
        output: Tensor = self.layer(
            embedded,
            features,
            position_embeddings=rotary,
            attention_mask=mask,
            position_ids=places,
            **{self._cache: cache},
        )
        return self.shared_norm(output)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        weight = next(iter(getattr(self.embedding_and_head.embed, "parameters", tuple)()), hidden)
        return self.embedding_and_head.head(hidden.to(weight.device, weight.dtype))[..., : self.vocab_size]


@dataclass(frozen=True, kw_only=True)
class MtpDrafter(FeatureDrafter):
    """Guess by the one multi-token-prediction layer of a target's checkpoint.

    The layer reads the target's normed last hidden state at a position and the token that follows, and guesses the
    token after that. For the second draft token and all later ones it runs again, on the features that it output
    itself, as in vLLM. transformers drafts one token per layer and no more.

    References:
        DeepSeek-AI 2024, DeepSeek-V3, section 2.2. https://arxiv.org/abs/2412.19437
    """

    exports: ClassVar[Exports] = EXPORTS


@dataclass(frozen=True, kw_only=True)
class ExpandedNode:
    """An expanded draft node: its parent's number, its depth and its token."""

    parent: int
    depth: int
    token: Int[Tensor, ""]


@dataclass(kw_only=True)
class LayersState(FeatureState):
    """One request's slots of all layers; changes in place. It is itself the state of the first layer.

    Attributes:
        deeper: The state of each further layer. Its pending features are those that the layer before has output.
            In `fed`, the root's number is that of the newest committed position that is pending, or -1.
        nodes: The expanded nodes of the draft, by number.
        waiting: For each further layer, the committed positions that it has read in this step. Until the commit they
            are pending in its slot, before the nodes of the draft, and their features count as pending.
    """

    deeper: list[FeatureState]
    nodes: dict[int, ExpandedNode] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)

    @property
    def layers(self) -> list[FeatureState]:
        """The states of all layers."""
        return [self, *self.deeper]


@dataclass(frozen=True, kw_only=True)
class MtpLayersDrafter(FeatureDrafter[LayersState]):
    r"""Guess the token at depth $k + 1$ by layer k of several multi-token-prediction layers.

    At position p of the text, layer k computes $f^k_p$ from the token there and from $f^{k-1}_{p-1}$, where
    $f^{-1}_p$ is the target's state, and guesses $x_{p+1}$. So every layer reads all committed positions, and layer k
    reads the first k tokens of a draft too. A layer runs when the draft gets as deep as it guesses, and then reads what
    it has missed. Beyond the depth of the last layer, that layer runs again, on the features that it output itself.

    Attributes:
        lm: The first layer.
        deeper: The further layers.
    """

    exports: ClassVar[Exports] = EXPORTS

    state: ClassVar[type[Any]] = LayersState

    deeper: tuple[HeadLM | TabularHead, ...]

    @property
    def lms(self) -> tuple[HeadLM | TabularHead, ...]:
        """All layers."""
        return (self.lm, *self.deeper)

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {f"{name} {k}": module for k, lm in enumerate(self.lms) for name, module in lm.modules.items()}

    def open(self, request: Request) -> LayersState:
        return LayersState(slot=self.lm.open(), deeper=[FeatureState(slot=lm.open()) for lm in self.deeper])

    def close(self, state: object) -> None:
        for lm, layer_state in zip(self.lms, self.checked(state).layers, strict=True):
            lm.release(layer_state.slot)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        super().observe(states, observed)
        for k, lm in enumerate(self.deeper, 1):
            long = [state for state in states if self.state_of(state).layers[k].num_pending >= BACKLOG]
            # As in the first layer, one position waits for the next draft.
            if long:
                segments = self._missed(long, k, [self.state_of(state).layers[k].num_pending - 1 for state in long])
                extension = lm.extend(segments)
                counts = [len(segment.tokens) for segment in segments]
                lm.commit({segment.slot: range(count) for segment, count in zip(segments, counts, strict=True)})
                for state, count in zip(long, counts, strict=True):
                    self.state_of(state).layers[k].forget(count)
                parts = output_features(extension).split(counts)
                self._hand_on(long, k, parts)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        for state in states:
            drafter_state = self.state_of(state)
            drafter_state.nodes, drafter_state.waiting = {}, [0] * len(self.deeper)
            for each in drafter_state.deeper:
                each.fed, each.head_output = {}, {}
        return super().begin(states, depths)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        tokens = frontier.tokens.to(self.lm.device)
        for i, owner in enumerate(frontier.owners.tolist()):
            node = ExpandedNode(parent=int(frontier.parents[i]), depth=int(frontier.depths[i]), token=tokens[i])
            self.state_of(states[owner]).nodes[int(frontier.nodes[i])] = node
        owners = np.unique(frontier.owners).tolist()
        wanted = [frontier.nodes[frontier.owners == owner].tolist() for owner in owners]
        k = min(int(frontier.depths[0]), len(self.deeper))
        running = [states[owner] for owner in owners]
        new = [self._unfed(state, k, nodes) for state, nodes in zip(running, wanted, strict=True)]
        segments = self._segments(running, k, new, [len(of_owner) for of_owner in wanted])
        extension = self.deeper[k - 1].extend(segments)
        parts = output_features(extension).split([len(segment.tokens) for segment in segments])
        committed = []
        for state, nodes, part in zip(running, new, parts, strict=True):
            count, head_output = len(part) - len(nodes), self.state_of(state).layers[k].head_output
            head_output |= dict(zip(nodes, part[count:], strict=True))
            if count:
                head_output[0] = part[count - 1]
            committed.append(part[:count])
        self._hand_on(running, k, committed)
        return Guess(logits=extension.logits, short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        depth = 0

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal depth
            depth += 1
            owners = np.flatnonzero(np.array(counts) >= depth)
            same = np.full(len(owners), depth)
            frontier = Frontier(owners=owners, nodes=same, parents=same - 1, depths=same, tokens=tokens)
            logits = self.expand(states, frontier).logits
            if logits is None:
                raise TypeError("a head guesses by logits")
            return logits

        return step

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        super().commit(states, paths)
        drafter_states = [self.state_of(state) for state in states]
        for k, lm in enumerate(self.deeper):
            counts = [drafter_state.waiting[k] if drafter_state.waiting else 0 for drafter_state in drafter_states]
            lm.commit(
                {
                    drafter_state.deeper[k].slot: range(count)
                    for drafter_state, count in zip(drafter_states, counts, strict=True)
                }
            )
            for drafter_state, count in zip(drafter_states, counts, strict=True):
                drafter_state.deeper[k].forget(count)
        for drafter_state in drafter_states:
            drafter_state.waiting = []

    def needs(self, state: object, length: int) -> int:
        return sum(self._valid(self.checked(state), length)[0])

    def reuse(self, state: object, request: Request, length: int) -> LayersState:
        drafter_state, states = self.checked(state), []
        for lm, each, (read, count) in zip(
            self.lms, drafter_state.layers, self._valid(drafter_state, length), strict=True
        ):
            lm.truncate(each.slot, read)
            states.append(FeatureState(slot=each.slot, pending_features=each.first_pending(count)))
        return LayersState(slot=states[0].slot, pending_features=states[0].pending_features, deeper=states[1:])

    def fork(self, state: object, request: Request, length: int) -> LayersState:
        drafter_state = self.checked(state)
        states = [
            FeatureState(slot=lm.copy(each.slot, read), pending_features=each.first_pending(pending))
            for lm, each, (read, pending) in zip(
                self.lms, drafter_state.layers, self._valid(drafter_state, length), strict=True
            )
        ]
        return LayersState(slot=states[0].slot, pending_features=states[0].pending_features, deeper=states[1:])

    def cast(self, target_info: TargetInfo) -> "MtpLayersDrafter":
        lms = [FeatureDrafter(lm=lm, reads=self.reads).cast(target_info).lm for lm in self.lms]
        return replace(self, lm=lms[0], deeper=tuple(lms[1:]))

    def on_tables(self, vocab_size: int, seed: int) -> "MtpLayersDrafter":
        first, *deeper = (TabularHead(vocab_size, seed + k) for k in range(len(self.lms)))
        return replace(self, lm=first, deeper=tuple(deeper), reads=(0,), short_list=None)

    def _read(self, states: Sequence[Running], counts: Sequence[int], logits: Literal["last", "none"]) -> Extension:
        extension = super()._read(states, counts, logits)
        self._hand_on(states, 0, output_features(extension).split(list(counts)))
        return extension

    def _hand_on(self, states: Sequence[Running], k: int, parts: Sequence[Float[Tensor, "_ hidden"]]) -> None:
        """Give the layer behind layer k what layer k output at committed positions of each request."""
        if k < len(self.deeper):
            for state, part in zip(states, parts, strict=True):
                if len(part):
                    self.state_of(state).layers[k + 1].pending_features.append(part)

    def _missed(self, states: Sequence[Running], k: int, counts: Sequence[int]) -> list[Segment]:
        """The next committed positions that layer k has not read of each request, at most `counts[i]`."""
        layer_states, lm = [self.state_of(state).layers[k] for state in states], self.lms[k]
        texts = []
        for state, layer_state, count in zip(states, layer_states, counts, strict=True):
            first = lm.length(layer_state.slot) + 1 + k
            texts.append(np.array(state.tokens[first : first + count], dtype=np.int64))
        return [
            Segment(slot=layer_state.slot, tokens=tokens, features=pending(layer_state)[: len(tokens)], logits="none")
            for layer_state, tokens in zip(layer_states, upload(texts, lm.device), strict=True)
        ]

    def _segments(
        self, states: Sequence[Running], k: int, new: Sequence[Sequence[int]], wanted: Sequence[int]
    ) -> list[Segment]:
        """What layer k reads of each request for a draft: the committed positions that it has missed, then new nodes.

        Args:
            wanted: The logits of this many nodes are wanted, the last ones.
        """
        wholes = [self.state_of(state) for state in states]
        behind = [i for i, whole in enumerate(wholes) if 0 not in whole.layers[k].fed and whole.layers[k].num_pending]
        counts = [wholes[i].layers[k].num_pending for i in behind]
        missed = dict(zip(behind, self._missed([states[i] for i in behind], k, counts), strict=True)) if behind else {}
        read = [
            self._read_with(whole, k, number) for whole, numbers in zip(wholes, new, strict=True) for number in numbers
        ]
        tokens, features = torch.stack([token for token, _ in read]), torch.stack([feature for _, feature in read])
        parts = behind_committed(missed, tokens, features, [len(numbers) for numbers in new])
        segments = []
        for i, (whole, (own_tokens, own_features)) in enumerate(zip(wholes, parts, strict=True)):
            layer_state, count = whole.layers[k], len(own_tokens) - len(new[i])
            parents = list(range(-1, count - 1))
            layer_state.fed.setdefault(0, -1)
            if i in missed:
                layer_state.fed[0], whole.waiting[k - 1] = count - 1, count
            for number in new[i]:
                # A layer begins late: in a short text the parent may stand before its first position.
                parents.append(layer_state.fed.get(whole.nodes[number].parent, -1))
                layer_state.fed[number] = whole.waiting[k - 1] + len(layer_state.fed) - 1
            segments.append(
                Segment(
                    slot=layer_state.slot,
                    tokens=own_tokens,
                    parents=np.array(parents, dtype=np.int64),
                    features=own_features,
                    logits=wanted[i],
                )
            )
        return segments

    @staticmethod
    def _read_with(whole: LayersState, k: int, number: int) -> tuple[Int[Tensor, ""], Float[Tensor, " hidden"]]:
        """The token of a node, and the feature that layer k reads with it."""
        node = whole.nodes[number]
        before = whole.layers[k if node.depth > k else k - 1]
        return node.token, before.head_output[node.parent]

    def _valid(self, drafter_state: LayersState, length: int) -> list[tuple[int, int]]:
        """For each layer, the positions in its slot and its pending features that a text with the same first `length`
        tokens can use.

        Layer k has position p in its slot at index p - k - 1. Layer k + 1 must have a pending feature of every position
        from its own newest one to the newest one of layer k.
        """
        read_to = [
            lm.length(each.slot) + k for k, (lm, each) in enumerate(zip(self.lms, drafter_state.layers, strict=True))
        ]
        newest: list[int] = []
        for k, end in enumerate(read_to):
            newest.append(max(k, min(end, length - 1, newest[-1] + 1 if newest else end)))
        for k in range(len(read_to) - 1, 0, -1):
            pending = drafter_state.layers[k].num_pending if newest[k] == read_to[k] else 0
            newest[k - 1] = min(newest[k - 1], newest[k] + pending - 1)
        first = min(drafter_state.num_pending, length - read_to[0]) if newest[0] == read_to[0] else 0
        left = [first, *(before + 1 - after for before, after in pairwise(newest))]
        return [(end - k, pending) for k, (end, pending) in enumerate(zip(newest, left, strict=True))]

    def _unfed(self, state: Running, k: int, nodes: Sequence[int]) -> list[int]:
        """The nodes, and those before them, that layer k has not read; parents first. Its first position is k + 1."""
        unfed: set[int] = set()
        drafter_state, anchor = self.state_of(state), len(state.tokens) - 1
        for node in nodes:
            while (
                node
                and node not in drafter_state.layers[k].fed
                and node not in unfed
                and anchor + drafter_state.nodes[node].depth > k
            ):
                unfed.add(node)
                node = drafter_state.nodes[node].parent
        return sorted(unfed)


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

    def check_files(self) -> None:
        if self.path is not None:
            model_place(self.path)

    def bind(self, target_info: TargetInfo) -> MtpDrafter | MtpLayersDrafter:
        """Load the layers."""
        model, embedding_and_head, reads = (
            target_info.mtp(self.path),
            target_info.embedding_and_head(),
            (target_info.num_layers,),
        )
        longest = min(self.max_context or target_info.max_context, target_info.max_context)
        heads = [
            MtpHead(model, number, embedding_and_head, target_info.vocab_size) for number in range(len(model.layers))
        ]
        first, *deeper = (
            head_lm(
                target_info.target_forward,
                target_info.forward,
                head.to(target_info.device, target_info.dtype).requires_grad_(False),
                max_slots=target_info.max_slots,
                max_context=longest,
            )
            for head in heads
        )
        if deeper:
            return MtpLayersDrafter(lm=first, deeper=tuple(deeper), reads=reads)
        return MtpDrafter(lm=first, reads=reads)
