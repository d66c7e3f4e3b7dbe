"""A draft model: any causal LM (Leviathan et al. 2023; Chen et al. 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.core.option import check, option
from outrider.core.types import Frontier, Guess, InputError, Request, Running, ShortList
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Observed, Rows
from outrider.drafters.slotted import SlottedDrafter, TreeState, tree_segments
from outrider.drafters.token_map import check_listed, checked_ids, read_token_map
from outrider.lm.hf.narrow import narrowed
from outrider.lm.hf.open import (
    as_device,
    holds_files_of,
    logit_width,
    open_config,
    open_model,
    open_tokenizer,
)
from outrider.lm.model import runnable
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from outrider.lm.slots.batch import upload
from outrider.lm.slots.budget import prefill_size
from outrider.lm.slots.chain import LinkedChain, Links, chain
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import Translation, translation
from outrider.lm.weights.checkpoint import keep_packed
from outrider.lm.weights.quantiser import Quantiser
from outrider.lm.weights.rounder import Rounder
from outrider.trees.chained import Follow

LEAST_SHARE = 0.05
"""Least share of the target's ids that a draft model with another vocabulary must have. A vocabulary of a tenth of the
target's size has at most 10 % of its ids, and these are the commonest words. Two byte-level vocabularies without a
common word still share 256 bytes, which is 3 % of 8192 ids."""
BACKLOG = 16
"""This many committed tokens that the draft model has not read are prefilled in a forward of their own. Fewer wait for
the next draft's first forward."""


Tree = TypeVar("Tree", bound=TreeState)


@dataclass(frozen=True, kw_only=True)
class ModelDrafter(SlottedDrafter[Tree]):
    """Guess with the next-token distribution of `lm`.

    The draft model's cache holds every committed token but the newest one or two: after a full acceptance the last
    draft token has not been fed yet. So the first forward of a step feeds all missing tokens, the anchor last.

    Attributes:
        lm: The draft model.
        vocab_size: Width of the target's logits, if it is wider than the draft model's. Tokens that the draft model
            lacks are never guessed.
        short_list: The target's tokens that the draft model's logits are of; None: all, from the first on.
    """

    rows: ClassVar[Rows] = "sampled"
    context_pure: ClassVar[bool] = True
    state: ClassVar[type[Any]] = TreeState
    waits: ClassVar[bool] = True
    trainer: ClassVar[str | None] = "distill"
    exports: ClassVar[Exports] = Exports(
        vllm="draft_model",
        sglang="STANDALONE",
        llama="draft-simple",
        openvino="draft_model",
        transformers="assistant_model",
    )

    vocab_size: int | None = None
    short_list: ShortList | None = None

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {f"draft {name}": module for name, module in self.lm.modules.items()}

    @property
    def chains_only(self) -> str | None:
        return self.lm.chains_only

    def open(self, request: Request) -> TreeState:
        return TreeState(slot=self.lm.open())

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        behind = [s for s in states if len(s.tokens) - 1 - self._length(s) >= BACKLOG]
        self._prefill(behind, [len(s.tokens) - 1 for s in behind])
        drafter_states = [self.state_of(s) for s in states]
        missing = [
            len(s.tokens) - self.lm.length(drafter_state.slot)
            for s, drafter_state in zip(states, drafter_states, strict=True)
        ]
        tokens = [token for s, count in zip(states, missing, strict=True) for token in s.tokens[-count:]]
        segments = [
            Segment(slot=drafter_state.slot, tokens=part, logits="last", features=self._newest_features(s, len(part)))
            for s, drafter_state, part in zip(states, drafter_states, self._tensor(tokens).split(missing), strict=True)
        ]
        logits = self.lm.extend(segments).logits
        self.lm.commit({piece.slot: range(len(piece.tokens)) for piece in segments})
        for drafter_state in drafter_states:
            drafter_state.fed.clear()
        return Guess(logits=self._widened(logits), short_list=self.short_list)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        if (known := self._known(frontier.tokens)) is not frontier.tokens:
            frontier = replace(frontier, tokens=known)
        features = self._features([states[owner] for owner in frontier.owners.tolist()])
        segments = tree_segments(self.state_of, states, frontier, self.lm.device, features)
        return Guess(logits=self._widened(self.lm.extend(segments).logits), short_list=self.short_list)

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        drafter_states = [self.state_of(state) for state in states]
        for drafter_state, count in zip(drafter_states, counts, strict=True):
            drafter_state.fed.update(zip(range(1, count + 1), range(count), strict=True))
        slots, first_features = [drafter_state.slot for drafter_state in drafter_states], self._features(states)
        if first_features is None:
            return LinkedChain(self.lm, slots, counts, self._links)
        follow, features, left = chain(self.lm, slots, counts), first_features, np.array(counts)

        def step(tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]:
            nonlocal features, left
            if not (left > 0).all():
                features = features[upload([np.flatnonzero(left > 0)], features.device)[0]]
            left = left[left > 0] - 1
            return self._widened(follow(tokens, features).logits)

        return step

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        counts = observed.counts()
        known = [min(len(s.tokens) - 1, self._length(s) + count) for s, count in zip(states, counts, strict=True)]
        behind = [(s, end) for s, end in zip(states, known, strict=True) if end - self._length(s) >= BACKLOG]
        self._prefill([s for s, _ in behind], [end for _, end in behind])

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        kept = {}
        for state, path in zip(states, paths, strict=True):
            drafter_state = self.state_of(state)
            if drafter_state.fed:
                kept[drafter_state.slot] = [drafter_state.fed[node] for node in path if node in drafter_state.fed]
                drafter_state.fed.clear()
        if kept:
            self.lm.commit(kept)

    def reuse(self, state: object, request: Request, length: int) -> TreeState:
        drafter_state = self.checked(state)
        self.lm.truncate(drafter_state.slot, min(length, self.lm.length(drafter_state.slot)))
        drafter_state.fed.clear()
        return drafter_state

    def fork(self, state: object, request: Request, length: int) -> TreeState:
        drafter_state = self.checked(state)
        return TreeState(slot=self.lm.copy(drafter_state.slot, min(length, self.lm.length(drafter_state.slot))))

    def cast(self, target_info: TargetInfo) -> "ModelDrafter":
        return replace(self, lm=self.lm.cast(target_info.dtype))

    def on_tables(self, vocab_size: int, seed: int) -> "ModelDrafter":
        if self.short_list is None:
            return ModelDrafter(lm=TabularLM(random_rows(vocab_size, seed), vocab_size))
        width = vocab_size - 1
        few = ShortList.of(torch.arange(width), vocab_size)
        return ModelDrafter(lm=TabularLM(random_rows(width, seed), width), short_list=few)

    @cached_property
    def _links(self) -> Links:
        """What happens between two forwards of a chain."""
        return Links(logits=self._widened, ids=None if self.short_list is None else self.short_list.ids)

    def _features(self, states: Sequence[Running]) -> Float[Tensor, "n dim"] | None:
        """The vectors that it reads with a draft token of each of these requests; None where it reads tokens alone."""
        return None

    def _newest_features(self, state: Running, count: int) -> Float[Tensor, "count dim"] | None:
        """The vectors that it reads with the newest `count` committed tokens of a request."""
        return None

    def _length(self, state: Running) -> int:
        return self.lm.length(self.state_of(state).slot)

    def _widened(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n width"]:
        """Logits over the target's vocabulary, or over the short list."""
        if self.short_list is not None:
            return logits
        missing = (self.vocab_size or self.lm.vocab_size) - self.lm.vocab_size
        # Finite, so that products with probabilities of 0 are numbers.
        return torch.nn.functional.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min) if missing else logits

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return self._known(torch.tensor(tokens)).to(self.lm.device, non_blocking=True)

    def _known(self, tokens: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
        """Tokens as the draft model reads them: one that it has no row for is read as its last one."""
        few = self.short_list is None and (self.vocab_size or 0) > self.lm.vocab_size
        return tokens.clamp(max=self.lm.vocab_size - 1) if few else tokens

    def _prefill(self, states: Sequence[Running], ends: Sequence[int]) -> None:
        """Prefill each request's tokens up to `ends` without logits; no forward is larger than one of a prompt."""
        pairs = list(zip(states, ends, strict=True))
        while pairs := [(s, end) for s, end in pairs if self._length(s) < min(end, self.lm.max_context)]:
            segments, left = [], prefill_size(self.lm.device)
            for s, end in pairs:
                first = self._length(s)
                tokens = s.tokens[first : min(end, first + left, self.lm.max_context)]
                if tokens:
                    segments.append(Segment(slot=self.state_of(s).slot, tokens=self._tensor(tokens), logits="none"))
                    left -= len(tokens)
            self.lm.extend(segments)
            self.lm.commit({piece.slot: range(len(piece.tokens)) for piece in segments})


@dataclass(frozen=True, kw_only=True)
class ModelPath:
    """A draft model before it is bound to a target: `model:path=...`.

    Attributes:
        path: Directory, GGUF file or hub id.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        weights: `q8_0`, `q5_0`, `q4_0` or `q4_k` quantises its matrices while it is opened, on a CPU.
        activations: `bfloat16`, or `int8` to round what its packed weights are multiplied with to 8 bits.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default as long as the model and the memory allow.
        token_map: A file of the tokens that it may propose, the most frequent first: `read_token_map` says which
            kinds there are. Its output layer is cut to these. By default it may propose all tokens.
        vocabulary: How many tokens of the file to take; by default all.

    References:
        Zhao et al. 2025, FR-Spec: the output layer of the most frequent tokens. https://arxiv.org/abs/2502.14856
    """

    path: str
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    activations: str = "bfloat16"
    revision: str | None = None
    max_context: int | None = option(None, least=1)
    token_map: str | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        check(self)
        check_listed(self.token_map, self.vocabulary)

    def check_files(self) -> None:
        self.read_config()

    def read_config(self) -> PreTrainedConfig:
        return open_config(self.path, revision=self.revision)

    def read_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return open_tokenizer(self.path, revision=self.revision)

    def bind(self, target_info: TargetInfo) -> ModelDrafter:
        """Load the draft model. If its vocabulary differs from the target's, it proposes the tokens that both have."""
        listed = None if self.token_map is None else read_token_map(self.token_map, self.vocabulary)
        if listed is not None and self.device is not None and not _same(as_device(self.device), target_info.device):
            raise InputError(
                f"token_map needs the draft model on the target's device {target_info.device}, got {self.device}; "
                "leave out device or token_map"
            )
        rounder = Rounder.of(self.activations)
        model = open_model(
            self.path,
            dtype=self.dtype or target_info.dtype,
            device=self.device or target_info.device,
            revision=self.revision,
            keep_blocks=keep_packed(
                self.dtype or target_info.dtype,
                revision=self.revision,
                gguf=self.dtype is None and target_info.dtype == torch.bfloat16,
            ),
            quantise=Quantiser.of(self.weights),
        )
        model = model if rounder is None else rounder(model)
        width, few = logit_width(model), None
        ours = target_info.tokenizer
        shares = ours is not None and holds_files_of(self.path, ours)
        words = None if shares else shared_words(self.path, self.read_tokenizer(), width, target_info)
        shared = min(width, target_info.vocab_size)
        if listed is not None and words is not None:
            words = self._restricted(words, listed)
            model = narrowed(model, words.theirs.tolist())
            words = replace(words, theirs=np.arange(len(words.ours)))
        elif listed is not None:
            ids = checked_ids(listed, shared, str(self.token_map))
            model = narrowed(model, ids)
            few = ShortList.of(torch.tensor(ids, device=target_info.device), target_info.vocab_size)
        lm = as_lm(
            model,
            max_slots=target_info.max_slots,
            max_context=self.max_context,
            vocab_size=shared if words is None and few is None else None,
            forward=runnable(model, target_info.forward),
        )
        if few is not None and lm.vocab_size != len(few.ids):
            raise InputError(
                f"the draft model {self.path} computes all logits whatever its output layer is; leave out token_map"
            )
        return ModelDrafter(
            lm=lm if words is None else Translated(lm, words), vocab_size=target_info.vocab_size, short_list=few
        )

    def _restricted(self, words: Translation, listed: Sequence[int]) -> Translation:
        """The shared tokens that the list names. Its ids are the target's."""
        checked_ids(listed, words.vocab_size, str(self.token_map))
        kept = np.isin(words.ours, listed)
        if not kept.any():
            raise InputError(
                f"token_map {self.token_map} names no token that the target and the draft model {self.path} share; "
                "make the list with the target's tokenizer"
            )
        return replace(words, ours=words.ours[kept], theirs=words.theirs[kept])


def _same(one: torch.device, other: torch.device) -> bool:
    """Whether two names mean one device; without a number it is the first."""
    return (one.type, one.index or 0) == (other.type, other.index or 0)


def shared_words(
    path: str, tokenizer: PreTrainedTokenizerBase | None, width: int, target_info: TargetInfo
) -> Translation | None:
    """The map from the target's tokens to a draft model's. None if both have the same ids, apart from padding.

    Raises:
        InputError: The vocabularies have too little in common, or cannot be compared.
    """
    ours = target_info.tokenizer
    if ours is None or tokenizer is None:
        if width != target_info.vocab_size:
            raise InputError(
                f"the draft model {path} has {width} token ids and the target {target_info.vocab_size}, and without "
                "both tokenizers the two cannot be matched; put the tokenizer's files beside both models"
            )
        return None
    if tokenizer.get_vocab() == ours.get_vocab():
        return None
    words = translation(ours, tokenizer, target_info.vocab_size, width)
    if words.share < LEAST_SHARE:
        raise InputError(
            f"the draft model {path} has another vocabulary, with {len(words.ours)} of the target's "
            f"{words.vocab_size} tokens ({words.share:.1%}), so it could propose almost nothing. Use a draft model "
            f"with at least {LEAST_SHARE:.0%} of them, or drafter suffix"
        )
    return words
