"""A target's own multi-token-prediction layers: transformers' modules behind the slots of `HeadLM`.

DeepSeek-AI 2024, DeepSeek-V3, section 2.2. https://arxiv.org/abs/2412.19437
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Observed, check_longest
from outrider.heads.trunks.features import (
    BACKLOG,
    FeatureDrafter,
    behind_committed,
    output_features,
    pending,
)
from outrider.heads.trunks.several import SeveralDrafter, SeveralState
from outrider.lm.head import head_lm
from outrider.lm.hf.anatomy import Span
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.open import model_place
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.batch import upload
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo

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

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        features, places = inputs.needed_features, inputs.positions + self.number + 1
        embedded = self.embedding_and_head.embed(inputs.tokens).to(features.dtype)
        rotary = None if self._rotary[0] is None else self._rotary[0](embedded, position_ids=places, **self._of_rotary)
        output: Tensor = self.layer(
            embedded,
            features,
            position_embeddings=rotary,
            attention_mask=inputs.mask,
            position_ids=places,
            **{self._cache: inputs.cache},
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


@dataclass(kw_only=True)
class LayersState(SeveralState):
    """One request's slots of all layers, and its growing draft; changes in place.

    The pending features of a further layer are those that the layer before has output. In its `fed`, the root's number
    is that of the newest committed position that is pending, or -1.

    Attributes:
        waiting: For each further layer, the committed positions that it has read in this step. Until the commit they
            are pending in its slot, before the nodes of the draft, and their features count as pending.
    """

    waiting: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class MtpLayersDrafter(SeveralDrafter[LayersState]):
    r"""Guess the token at depth $k + 1$ by layer k of several multi-token-prediction layers.

    At position p of the text, layer k computes $f^k_p$ from the token there and from $f^{k-1}_{p-1}$, where
    $f^{-1}_p$ is the target's state, and guesses $x_{p+1}$. So every layer reads all committed positions, and layer k
    reads the first k tokens of a draft too. A layer runs when the draft gets as deep as it guesses, and then reads what
    it has missed. Beyond the depth of the last layer, that layer runs again, on the features that it output itself.

    Attributes:
        lm: The first layer.
        further: The further layers.
    """

    exports: ClassVar[Exports] = EXPORTS

    state: ClassVar[type[Any]] = LayersState

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {f"{name} {k}": module for k, lm in enumerate(self.lms) for name, module in lm.modules.items()}

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        super().observe(states, observed)
        for k, lm in enumerate(self.further, 1):
            long = [state for state in states if self.state_of(state).parts[k].num_pending >= BACKLOG]
            # As in the first layer, one position waits for the next draft.
            if long:
                segments = self._missed(long, k, [self.state_of(state).parts[k].num_pending - 1 for state in long])
                extension = lm.extend(segments)
                counts = [len(segment.tokens) for segment in segments]
                lm.commit({segment.slot: range(count) for segment, count in zip(segments, counts, strict=True)})
                for state, count in zip(long, counts, strict=True):
                    self.state_of(state).parts[k].forget(count)
                parts = output_features(extension).split(counts)
                self._hand_on(long, k, parts)

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        for state in states:
            drafter_state = self.state_of(state)
            drafter_state.nodes, drafter_state.waiting = {}, [0] * len(self.further)
            for each in drafter_state.further:
                each.fed, each.head_output = {}, {}
        return super().begin(states, depths)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        groups = list(self.by_owner(states, replace(frontier, tokens=frontier.tokens.to(self.lm.device))))
        running, wanted = [state for state, _ in groups], [nodes for _, nodes in groups]
        k = min(int(frontier.depths[0]), len(self.further))
        new = [self._unfed(state, k, nodes) for state, nodes in zip(running, wanted, strict=True)]
        segments = self._segments(running, k, new, [len(of_owner) for of_owner in wanted])
        extension = self.further[k - 1].extend(segments)
        parts = output_features(extension).split([len(segment.tokens) for segment in segments])
        committed = []
        for state, nodes, part in zip(running, new, parts, strict=True):
            count, head_output = len(part) - len(nodes), self.state_of(state).parts[k].head_output
            head_output |= dict(zip(nodes, part[count:], strict=True))
            if count:
                head_output[0] = part[count - 1]
            committed.append(part[:count])
        self._hand_on(running, k, committed)
        return Guess(logits=extension.logits, short_list=self.short_list)

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        super().commit(states, paths)
        drafter_states = [self.state_of(state) for state in states]
        for k, lm in enumerate(self.further):
            counts = [drafter_state.waiting[k] if drafter_state.waiting else 0 for drafter_state in drafter_states]
            lm.commit(
                {
                    drafter_state.further[k].slot: range(count)
                    for drafter_state, count in zip(drafter_states, counts, strict=True)
                }
            )
            for drafter_state, count in zip(drafter_states, counts, strict=True):
                drafter_state.further[k].forget(count)
        for drafter_state in drafter_states:
            drafter_state.waiting = []

    def needs(self, state: object, length: int) -> int:
        return sum(self.usable(self.checked(state), length)[0])

    def _read(self, states: Sequence[Running], counts: Sequence[int], logits: Literal["last", "none"]) -> Extension:
        extension = super()._read(states, counts, logits)
        self._hand_on(states, 0, output_features(extension).split(list(counts)))
        return extension

    def _hand_on(self, states: Sequence[Running], k: int, parts: Sequence[Float[Tensor, "_ hidden"]]) -> None:
        """Give the layer behind layer k what layer k output at committed positions of each request."""
        if k < len(self.further):
            for state, part in zip(states, parts, strict=True):
                if len(part):
                    self.state_of(state).parts[k + 1].pending_features.append(part)

    def _missed(self, states: Sequence[Running], k: int, counts: Sequence[int]) -> list[Segment]:
        """The next committed positions that layer k has not read of each request, at most `counts[i]`."""
        layer_states, lm = [self.state_of(state).parts[k] for state in states], self.lms[k]
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
        behind = [i for i, whole in enumerate(wholes) if 0 not in whole.parts[k].fed and whole.parts[k].num_pending]
        counts = [wholes[i].parts[k].num_pending for i in behind]
        missed = dict(zip(behind, self._missed([states[i] for i in behind], k, counts), strict=True)) if behind else {}
        read = [
            self._read_with(whole, k, number) for whole, numbers in zip(wholes, new, strict=True) for number in numbers
        ]
        tokens, features = torch.stack([token for token, _ in read]), torch.stack([feature for _, feature in read])
        parts = behind_committed(missed, tokens, features, [len(numbers) for numbers in new])
        segments = []
        for i, (whole, (own_tokens, own_features)) in enumerate(zip(wholes, parts, strict=True)):
            layer_state, count = whole.parts[k], len(own_tokens) - len(new[i])
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
        before = whole.parts[k if node.depth > k else k - 1]
        return node.token, before.head_output[node.parent]

    def usable(self, state: LayersState, length: int) -> list[tuple[int, int]]:
        """As of all such drafters.

        Layer k has position p in its slot at index p - k - 1. Layer k + 1 must have a pending feature of every position
        from its own newest one to the newest one of layer k.
        """
        read_to = [lm.length(each.slot) + k for k, (lm, each) in enumerate(zip(self.lms, state.parts, strict=True))]
        newest: list[int] = []
        for k, end in enumerate(read_to):
            newest.append(max(k, min(end, length - 1, newest[-1] + 1 if newest else end)))
        for k in range(len(read_to) - 1, 0, -1):
            pending = state.parts[k].num_pending if newest[k] == read_to[k] else 0
            newest[k - 1] = min(newest[k - 1], newest[k] + pending - 1)
        first = min(state.num_pending, length - read_to[0]) if newest[0] == read_to[0] else 0
        left = [first, *(before + 1 - after for before, after in pairwise(newest))]
        return [(end - k, pending) for k, (end, pending) in enumerate(zip(newest, left, strict=True))]

    def _unfed(self, state: Running, k: int, nodes: Sequence[int]) -> list[int]:
        """The nodes, and those before them, that layer k has not read; parents first. Its first position is k + 1."""
        unfed: set[int] = set()
        drafter_state, anchor = self.state_of(state), len(state.tokens) - 1
        for node in nodes:
            while (
                node
                and node not in drafter_state.parts[k].fed
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
        first, *further = (
            head_lm(
                target_info.target_forward,
                target_info.forward,
                head.to(target_info.device, target_info.dtype).requires_grad_(False),
                max_slots=target_info.max_slots,
                max_context=longest,
            )
            for head in heads
        )
        if further:
            return MtpLayersDrafter(lm=first, further=tuple(further), reads=reads)
        return MtpDrafter(lm=first, reads=reads)
