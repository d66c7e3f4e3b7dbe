"""Heads that go on with features of their own (EAGLE and its variants): the module, the drafter, the objective."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from reprlib import repr as short
from typing import Any, ClassVar, Literal, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.dice import Purpose, step_generator
from outrider.core.types import Frontier, Guess, InputError, Request, Running, ShortList
from outrider.drafters.protocol import Observed, Rows
from outrider.drafters.slotted import SlottedDrafter, TreeState, tree_segments
from outrider.heads.doubt import Doubt
from outrider.heads.head import Head, TrainedHead
from outrider.heads.objective import GuessObjective
from outrider.heads.parts.layer_config import rotary_doubts
from outrider.heads.parts.layers import Rotary
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import PADDING, TrainBatch, on_device
from outrider.learning.options import HeadOptions, loss
from outrider.lm.head import HeadLM
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.protocol import LM, Extension, Segment
from outrider.lm.slots.batch import joined, upload
from outrider.lm.slots.chain import LinkedChain, Links
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.tabular import TabularHead
from outrider.lm.target_info import TargetInfo
from outrider.trees.chained import Follow

BACKLOG = 64
"""This many pending features of a request are read at once. Fewer wait for the next draft's first forward."""
NOISE_LENGTH = 512
"""The length of a row whose noise has its full strength; longer rows have less."""


class FeatureHead(Head):
    r"""Reads pairs of a token and a feature, and outputs a feature for the next pair.

    The pair at $t$ is $(x_{t+1}, g_t)$. `fuse` makes $g_t$ from the target's hidden states; behind the target's last
    position it is `next_feature` of what the head output at the pair before. `logits` guesses $x_{t+2}$ from what the
    head outputs at $t$.

    Attributes:
        config: The sizes of its layers.
        embedding_and_head: The target's embedding, final norm and output layer.
        feature_size: Width of the features.
        vocab_size: Width of the logits.
        embed_tokens: Its own embedding; None takes the target's.
        layers: Its decoder layers.
        ids: The tokens that it can guess, ascending; None: all.

    Args:
        own_embedding: Whether it has an embedding of its own.
    """

    layers: nn.ModuleList

    def __init__(
        self, config: PreTrainedConfig, embedding_and_head: EmbeddingAndHead, *, vocab_size: int, own_embedding: bool
    ) -> None:
        super().__init__()
        if (act := getattr(config, "hidden_act", "silu")) not in ("silu", "swish"):
            raise InputError(f"heads with the activation {short(act)} are not known; known is silu")
        self.config, self.embedding_and_head = config, embedding_and_head
        self.feature_size, self.vocab_size = config.hidden_size, vocab_size
        self.rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None

    def doubts(self, target: TargetInfo) -> Sequence[Doubt]:
        doubts = rotary_doubts(self, self.config, target.config)
        table = self.embed_tokens
        if table is not None and self.config.hidden_size == target.hidden_size:
            doubts.append(
                Doubt(
                    about="embedding",
                    means="its own embedding is not the one that it was trained with",
                    advice="remove embed_tokens.weight from its file, so that the target's is used",
                    changes=[(self, "embed_tokens", None)],
                )
            )
        return doubts

    @abstractmethod
    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        """Features from the tapped states of the target, side by side."""

    @abstractmethod
    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        """What is output at each pair."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        """Logits of the next token."""

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The feature that a draft token is read with, from what was output before it; by default the same."""
        return head_output

    def prefill(self, inputs: HeadInputs) -> None:
        """Store the keys and values of pairs whose outputs nobody needs. The head has one layer."""
        raise NotImplementedError(f"{type(self).__name__} cannot read pairs without an output")

    def target_logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits by the target's output layer, in the target's dtype."""
        return self.embedding_and_head.logits(hidden)

    def freeze(self) -> None:
        if self.embed_tokens is not None:
            self.embed_tokens.requires_grad_(False)

    def embed(self, tokens: Int[Tensor, "rows width"], like: Float[Tensor, "..."]) -> Float[Tensor, "rows width dim"]:
        """Embeddings of tokens, in the dtype and on the device of another tensor."""
        if self.embed_tokens is not None:
            embedded: Tensor = self.embed_tokens(tokens)
            return embedded
        return self.embedding_and_head.embed(tokens).to(like.device, like.dtype)


@dataclass(kw_only=True)
class FeatureState(TreeState):
    """One request's slot of a head, and the features that the head has not read yet; changes in place.

    The slot holds one pair for each position that the head has read: the target's feature there, and the token that
    follows.

    Attributes:
        pending_features: Features of the next positions.
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
        kept = []
        for features in self.pending_features:
            if count < len(features):
                kept.append(features[count:])
            count = max(0, count - len(features))
        self.pending_features = kept

    def first_pending(self, count: int) -> list[Float[Tensor, "_ dim"]]:
        """The features of the first pending positions."""
        kept = []
        for features in self.pending_features:
            if count > 0:
                kept.append(features[:count])
            count -= len(features)
        return kept


Features = TypeVar("Features", bound=FeatureState)


@dataclass(frozen=True, kw_only=True)
class OwnFeatures(SlottedDrafter[Features]):
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

    state: ClassVar[type[Any]] = FeatureState

    lm: LM
    short_list: ShortList | None = None

    def features(self, taps: Mapping[int, Float[Tensor, "n hidden"]]) -> Float[Tensor, "n dim"]:
        """Features from the target's hidden states; by default these side by side, in the order of the taps."""
        return torch.cat([taps[k] for k in self.taps], -1)

    def next_feature(self, head_output: Float[Tensor, "n hidden"]) -> Float[Tensor, "n dim"]:
        """The feature that stands for a draft token's, from the head's output there; by default that output itself."""
        return head_output

    def open(self, request: Request) -> Features:
        return self.state(slot=self.lm.open())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        feature_states = [self.state_of(state) for state in states]
        many = append_features(self.lm, feature_states, self.features(observed.taps), observed.offsets)
        if many:
            # The last pair waits, so that the next draft has one to begin with.
            self._read([states[i] for i in many], [feature_states[i].num_pending - 1 for i in many], "none")

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        counts = [self.state_of(state).num_pending for state in states]
        extension = self._read(states, counts, "last")
        last_places = np.cumsum(counts) - 1
        for state, end in zip(states, last_places.tolist(), strict=True):
            drafter_state = self.state_of(state)
            drafter_state.fed, drafter_state.head_output = {}, {0: output_features(extension)[end]}
        return Guess(logits=extension.logits, short_list=self.short_list)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        pairs = zip(frontier.owners.tolist(), frontier.parents.tolist(), strict=True)
        features = self.next_feature(
            torch.stack([self.state_of(states[owner]).head_output[parent] for owner, parent in pairs])
        )
        segments = tree_segments(self.state_of, states, frontier, self.lm.device, features)
        extension = self.lm.extend(segments)
        for i, (owner, node) in enumerate(zip(frontier.owners.tolist(), frontier.nodes.tolist(), strict=True)):
            self.state_of(states[owner]).head_output[node] = output_features(extension)[i]
        return Guess(logits=extension.logits, short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        drafter_states = [self.state_of(state) for state in states]
        head_output = torch.stack([drafter_state.head_output[0] for drafter_state in drafter_states])
        return LinkedChain(
            self.lm, [drafter_state.slot for drafter_state in drafter_states], counts, self._links, head_output
        )

    @cached_property
    def _links(self) -> Links:
        """What happens between two forwards of a chain."""
        ids = None if self.short_list is None else self.short_list.ids
        return Links(logits=_unchanged, next_feature=self.next_feature, ids=ids)

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        self.lm.commit({self.state_of(state).slot: [] for state in states})

    def needs(self, state: object, length: int) -> int:
        return needed(self.lm, self.checked(state), length)

    def reuse(self, state: object, request: Request, length: int) -> Features:
        drafter_state = self.checked(state)
        kept = pending_of(self.lm, drafter_state, length)
        self.lm.truncate(drafter_state.slot, min(self.lm.length(drafter_state.slot), max(0, length - 1)))
        return self.state(slot=drafter_state.slot, pending_features=kept)

    def fork(self, state: object, request: Request, length: int) -> Features:
        drafter_state = self.checked(state)
        slot = self.lm.copy(drafter_state.slot, min(self.lm.length(drafter_state.slot), max(0, length - 1)))
        return self.state(slot=slot, pending_features=pending_of(self.lm, drafter_state, length))

    def cast(self, target_info: TargetInfo) -> "OwnFeatures":
        return replace(self, lm=self.lm.cast(target_info.dtype))

    def _pairs(
        self, states: Sequence[Running], counts: Sequence[int], logits: Literal["last", "none"]
    ) -> list[Segment]:
        """The next `counts[i]` pairs that each request's slot lacks."""
        return next_pairs(self.lm, [self.state_of(state) for state in states], states, counts, logits)

    def _read(self, states: Sequence[Running], counts: Sequence[int], logits: Literal["last", "none"]) -> Extension:
        """Run the head on the next pairs of each request, and commit them."""
        extension = read(self.lm, self._pairs(states, counts, logits))
        for state, count in zip(states, counts, strict=True):
            self.state_of(state).forget(count)
        return extension


def _unchanged(logits: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
    return logits


def append_features(
    lm: LM,
    feature_states: Sequence[FeatureState],
    features: Float[Tensor, "n dim"],
    offsets: Int[np.ndarray, " bounds"],
) -> list[int]:
    """Note the features of new positions.

    Args:
        lm: The head.
        feature_states: What it keeps of each request.
        features: Of all requests, packed.
        offsets: Where each request's features begin; the last entry is their number.

    Returns:
        The requests of which so many are pending that the head should read them now.
    """
    many = []
    for i, feature_state in enumerate(feature_states):
        feature_state.pending_features.append(features[offsets[i] : offsets[i + 1]])
        if BACKLOG <= feature_state.num_pending <= lm.max_context - lm.length(feature_state.slot):
            many.append(i)
    return many


def next_pairs(
    lm: LM,
    feature_states: Sequence[FeatureState],
    states: Sequence[Running],
    counts: Sequence[int],
    logits: Literal["last", "none"],
) -> list[Segment]:
    """The next `counts[i]` pairs that each request's slot lacks.

    Args:
        lm: The head.
        feature_states: What it keeps of each request.
    """
    texts = []
    for feature_state, state, count in zip(feature_states, states, counts, strict=True):
        first = lm.length(feature_state.slot) + 1
        texts.append(np.array(state.tokens[first : first + count], dtype=np.int64))
    return [
        Segment(slot=feature_state.slot, tokens=tokens, features=pending(feature_state)[:count], logits=logits)
        for feature_state, tokens, count in zip(feature_states, upload(texts, lm.device), counts, strict=True)
    ]


def pending(feature_state: FeatureState) -> Float[Tensor, "n dim"]:
    """The features that a head has not read yet, of which there are some."""
    return joined(feature_state.pending_features, feature_state.pending_features[0])


def behind_committed(
    committed: Mapping[int, Segment],
    tokens: Int[Tensor, " n"],
    features: Float[Tensor, "n dim"],
    sizes: Sequence[int],
) -> list[tuple[Int[Tensor, " _"], Float[Tensor, "_ dim"]]]:
    """Tokens and features of the new nodes of each request, behind its committed pairs.

    Args:
        committed: The pairs, by the request's place; a request may have none.
        tokens: Of the new nodes of all requests, packed.
        features: As the tokens.
        sizes: The number of new nodes of each request.
    """
    counts = [len(committed[i].tokens) if i in committed else 0 for i in range(len(sizes))]
    if any(counts):
        pairs = [committed[i] for i, count in enumerate(counts) if count]
        tokens = torch.cat([*(pair.tokens for pair in pairs), tokens])
        features = torch.cat([*(cast(Tensor, pair.features) for pair in pairs), features])
        if len(sizes) > 1:
            # All pairs stand before all nodes; one gather brings each request's together.
            firsts = np.cumsum([0, *counts, *sizes])
            order = [
                np.arange(first, first + count)
                for i in range(len(sizes))
                for first, count in ((firsts[i], counts[i]), (firsts[len(sizes) + i], sizes[i]))
            ]
            [index] = upload([np.concatenate(order)], tokens.device)
            tokens, features = tokens[index], features[index]
    lengths = [count + size for count, size in zip(counts, sizes, strict=True)]
    return list(zip(tokens.split(lengths), features.split(lengths), strict=True))


def read(lm: LM, segments: Sequence[Segment]) -> Extension:
    """Run a head on pairs and commit them."""
    extension = lm.extend(segments)
    lm.commit({segment.slot: range(len(segment.tokens)) for segment in segments})
    return extension


def needed(lm: LM, feature_state: FeatureState, length: int) -> int:
    """The first position that a head must be shown again, for a text with the same first `length` tokens."""
    known = lm.length(feature_state.slot)
    return min(known + feature_state.num_pending, length) if known < length else max(0, length - 1)


def pending_of(lm: LM, feature_state: FeatureState, length: int) -> list[Float[Tensor, "_ dim"]]:
    """The pending features that a text with the same first `length` tokens can use."""
    known = lm.length(feature_state.slot)
    return feature_state.first_pending(length - known) if known < length else []


def output_features(extension: Extension) -> Float[Tensor, "nodes hidden"]:
    """What a head outputs at all new nodes."""
    if extension.features is None:
        raise TypeError("the extension of a head must hold features")
    return extension.features


def attach_target(module: nn.Module, target: TargetInfo) -> nn.Module:
    """A head in the dtype of a target, whose embedding and output layer it uses from now on."""
    head = cast(Any, module.to(target.dtype))
    ids, embedding_and_head = head.embedding_and_head.ids, target.embedding_and_head()
    head.embedding_and_head = embedding_and_head if ids is None else embedding_and_head.cut(ids)
    return module


@dataclass(frozen=True, kw_only=True)
class FeatureDrafter(OwnFeatures[Features]):
    """Guess by a `FeatureHead`.

    Attributes:
        lm: The head.
        reads: The target's hidden states that it reads, in order.
    """

    lm: HeadLM | TabularHead
    reads: tuple[int, ...]

    @classmethod
    def of(cls, head: FeatureHead, target: TargetInfo, trained: TrainedHead) -> "FeatureDrafter":
        """The drafter with a head, where the user wants it."""
        return cls(**cls.fields_of(head, target, trained))

    @staticmethod
    def fields_of(head: FeatureHead, target: TargetInfo, trained: TrainedHead) -> dict[str, Any]:
        """The fields that all drafters with such a head have."""
        lm = trained.lm(head, target)
        ids = cast(Tensor | None, head.ids)
        few = None if ids is None else ShortList.of(ids.to(lm.device), target.vocab_size)
        return {"lm": lm, "reads": head.reads(target.num_layers), "short_list": few}

    @property
    def taps(self) -> tuple[int, ...]:
        return self.reads

    @property
    def module(self) -> FeatureHead:
        """What computes: the head's module, or its packed twin."""
        # That of tables has the functions of a head.
        return cast(FeatureHead, self.lm.module if isinstance(self.lm, TabularHead) else self.lm.running)

    @torch.inference_mode()
    def features(self, taps: Mapping[int, Float[Tensor, "n hidden"]]) -> Float[Tensor, "n dim"]:
        return self.module.fuse(super().features(taps))

    @torch.inference_mode()
    def next_feature(self, head_output: Float[Tensor, "n hidden"]) -> Float[Tensor, "n dim"]:
        return self.module.next_feature(head_output)

    def cast(self, target_info: TargetInfo) -> "FeatureDrafter":
        if isinstance(self.lm, TabularHead):
            return self
        module = attach_target(copy.deepcopy(self.lm.module), target_info)
        return replace(self, lm=HeadLM(module, max_slots=self.lm.max_slots, max_context=self.lm.max_context))

    def on_tables(self, vocab_size: int, seed: int) -> "FeatureDrafter":
        return replace(self, lm=TabularHead(vocab_size, seed), reads=(0,), short_list=None)


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(HeadOptions):
    """What heads that go on with features of their own can be told.

    Attributes:
        decay: The weight of each draft token in the loss, as a share of the weight of the token before it.
        unrolled: How many draft tokens are learnt, all but the first from the head's own features.
        noise: Strength of the noise on the target's features.
    """

    decay: float = loss(0.8, above=0)
    unrolled: int = loss(1, least=1)
    noise: float = loss(0.0, least=0)


class FeatureObjective(GuessObjective):
    r"""A head that learns on its own features, as it drafts (training-time test).

    All places of a row are one step each of $J$ passes. In pass $j$ the pair of place $t$ is the token $x_{t+1+j}$ of
    the text with the feature that pass $j - 1$ output at $t$; in pass 0 it is the target's. Its query sees the
    target's features up to $t$ and the features of its own place in passes $1 \ldots j$. So pass $j$ at $t$ is what
    draft step $j$ computes behind the anchor $x_{t+1}$, if the draft tokens are those of the text.

    References:
        Li et al. 2025, EAGLE-3. https://arxiv.org/abs/2503.01840
        Zhang et al. 2024, HASS. https://arxiv.org/abs/2408.15766
    """

    head: FeatureHead
    options: FeatureOptions

    detached: ClassVar[bool] = False
    """Whether no gradient flows from a pass to the one before it."""

    @property
    def num_guesses(self) -> int:
        """$J$."""
        return self.options.unrolled

    def head_tokens(self, length: int) -> int:
        return length * self.num_guesses

    def passes(self) -> Callable[[int, HeadInputs], Float[Tensor, "rows length hidden"]]:
        """What runs pass 0, 1, ... of some rows, in order."""
        return lambda number, inputs: cast(Tensor, self.head(inputs))

    def guesses(self, batch: TrainBatch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What the head outputs in pass 0, 1, ..., `count - 1`."""
        length, device = batch.tokens.shape[1], batch.tokens.device
        features = self.features(batch)
        if self.training and self.options.noise:
            features = features + self._noises(batch).to(features)
        places, eye = torch.arange(length, device=device), torch.eye(length, dtype=torch.bool, device=device)
        mask, cache, run = torch.ones_like(eye).tril(), GroupKeys(), self.passes()
        for number in range(count):
            tokens = torch.nn.functional.pad(batch.tokens[:, 1 + number :], (0, min(1 + number, length)), value=PADDING)
            positions = (places + number).expand(len(tokens), -1)
            seen = mask.expand(len(tokens), 1, -1, -1)
            inputs = HeadInputs(tokens=tokens, features=features, positions=positions, mask=seen, cache=cache)
            head_output = run(number, inputs)
            yield head_output
            features = self.head.next_feature(head_output.detach() if self.detached else head_output)
            mask = torch.cat([mask, eye], -1)

    def features(self, batch: TrainBatch) -> Float[Tensor, "rows length dim"]:
        """The features of pass 0, from the target's hidden states."""
        return self.head.fuse(torch.cat([batch.hidden[tap] for tap in self.taps], -1))

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """Logits of what is output; the same function in every pass."""
        return self.head.logits(hidden)

    def _noises(self, batch: TrainBatch) -> Float[Tensor, "rows length dim"]:
        """Uniform noise, keyed by seed, step and row."""
        size = self.head.feature_size
        rows = []
        for number, length in zip(batch.rows, batch.host.lengths.tolist(), strict=True):
            dice = step_generator(Purpose.NOISE, seed=self.context.seed, step=batch.step, row=number)
            strength = self.options.noise * NOISE_LENGTH / max(length, NOISE_LENGTH)
            rows.append(strength * (dice.random((batch.tokens.shape[1], size), dtype=np.float32) - 0.5))
        return on_device(np.stack(rows), batch.tokens.device)
