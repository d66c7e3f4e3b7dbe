"""A draft model: any causal LM (Leviathan et al. 2023; Chen et al. 2023)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.drafters.protocol import Drafter, Observed, Rows, Surroundings
from outrider.lm.anatomy import Anatomy
from outrider.lm.open import as_lm, logit_width, open_config, open_model, open_tokenizer
from outrider.lm.packed import packable
from outrider.lm.protocol import LM, Segment
from outrider.lm.tabular import TabularLM, random_rows
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import Translation, translation
from outrider.types import Frontier, Guess, InputError, Request, Running

CHUNK = 512
"""Most tokens of one request in one forward."""
LEAST_SHARE = 0.05
"""Least share of the target's ids that a draft model with another vocabulary must have. A vocabulary of a tenth of the
target's size has at most 10 % of its ids, and these are the commonest words. Two byte-level vocabularies without a
common word still share 256 bytes, which is 3 % of 8192 ids."""
BACKLOG = 16
"""This many committed tokens that the draft model has not read are prefilled at once. Fewer wait for the next draft's
first forward."""


@dataclass(kw_only=True)
class ModelState:
    """One request's slot of the draft model; changes in place.

    Attributes:
        slot: Where the draft model keeps the request.
        fed: For each expanded node of the growing tree, its pending number in the slot.
    """

    slot: int
    fed: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ModelDrafter(Drafter):
    """Guess with the next-token distribution of `lm`.

    The draft model's cache holds every committed token but the newest one or two: after a full acceptance the last
    draft token has not been fed yet. So the first forward of a step feeds all missing tokens, the anchor last.

    Attributes:
        lm: The draft model.
        vocab_size: Width of the target's logits, if it is wider than the draft model's. Tokens that the draft model
            lacks are never guessed.
    """

    rows: ClassVar[Rows] = "sampled"
    context_pure: ClassVar[bool] = True
    keeps_cache: ClassVar[bool] = True
    trainer: ClassVar[str | None] = "distill"
    exports: ClassVar[tuple[str, ...]] = ("draft_model",)

    lm: LM
    vocab_size: int | None = None

    @property
    def max_context(self) -> int | None:
        return self.lm.max_context

    @property
    def device(self) -> torch.device:
        return self.lm.device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {f"draft {name}": module for name, module in self.lm.modules.items()}

    @property
    def chains_only(self) -> str | None:
        return self.lm.chains_only

    def open(self, request: Request) -> ModelState:
        return ModelState(slot=self.lm.open())

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        self._digest(states, [len(s.tokens) - 1 - (len(s.tokens) - 1 - self._length(s)) % CHUNK for s in states])
        segments = [
            Segment(slot=_own(s).slot, tokens=self._tensor(s.tokens[self._length(s) :]), logits="last") for s in states
        ]
        logits = self.lm.extend(segments).logits
        self.lm.commit({piece.slot: range(len(piece.tokens)) for piece in segments})
        for s in states:
            _own(s).fed.clear()
        return Guess(logits=self._widened(logits))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        tokens = frontier.tokens.to(self.lm.device)
        starts = [0, *(np.flatnonzero(np.diff(frontier.owners)) + 1).tolist()]
        segments = []
        for first, end in zip(starts, [*starts[1:], len(frontier.owners)], strict=True):
            own = _own(states[int(frontier.owners[first])])
            parents = [own.fed.get(parent, -1) for parent in frontier.parents[first:end].tolist()]
            for node in frontier.nodes[first:end].tolist():
                own.fed[node] = len(own.fed)
            segments.append(Segment(slot=own.slot, tokens=tokens[first:end], parents=np.array(parents)))
        return Guess(logits=self._widened(self.lm.extend(segments).logits))

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        counts = observed.counts()
        known = [min(len(s.tokens) - 1, self._length(s) + count) for s, count in zip(states, counts, strict=True)]
        behind = [(s, end) for s, end in zip(states, known, strict=True) if end - self._length(s) >= BACKLOG]
        self._digest([s for s, _ in behind], [end for _, end in behind])

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        kept = {}
        for state, path in zip(states, paths, strict=True):
            own = _own(state)
            kept[own.slot] = [own.fed[node] for node in path if node in own.fed]
            own.fed.clear()
        self.lm.commit(kept)

    def reuse(self, state: object, request: Request, length: int) -> ModelState:
        own = _state(state)
        self.lm.truncate(own.slot, min(length, self.lm.length(own.slot)))
        own.fed.clear()
        return own

    def fork(self, state: object, request: Request, length: int) -> ModelState:
        own = _state(state)
        return ModelState(slot=self.lm.copy(own.slot, min(length, self.lm.length(own.slot))))

    def close(self, state: object) -> None:
        self.lm.release(_state(state).slot)

    def cast(self, surroundings: Surroundings) -> "ModelDrafter":
        return replace(self, lm=self.lm.cast(surroundings.dtype))

    def on_tables(self, vocab_size: int, seed: int) -> "ModelDrafter":
        return ModelDrafter(lm=TabularLM(random_rows(vocab_size, seed), vocab_size))

    def _length(self, state: Running) -> int:
        return self.lm.length(_own(state).slot)

    def _widened(self, logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n target_vocab"]:
        missing = (self.vocab_size or self.lm.vocab_size) - self.lm.vocab_size
        # Finite, so that products with probabilities of 0 are numbers.
        return torch.nn.functional.pad(logits, (0, missing), value=torch.finfo(logits.dtype).min) if missing else logits

    def _tensor(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor(tokens).to(self.lm.device, non_blocking=True)

    def _digest(self, states: Sequence[Running], ends: Sequence[int]) -> None:
        """Prefill each request's tokens up to `ends`, in chunks, without logits."""
        pairs = list(zip(states, ends, strict=True))
        while pairs := [(s, end) for s, end in pairs if self._length(s) < min(end, self.lm.max_context)]:
            segments = []
            for s, end in pairs:
                first = self._length(s)
                last = min(end, first + CHUNK, self.lm.max_context)
                segments.append(Segment(slot=_own(s).slot, tokens=self._tensor(s.tokens[first:last]), logits="none"))
            self.lm.extend(segments)
            self.lm.commit({piece.slot: range(len(piece.tokens)) for piece in segments})


@dataclass(frozen=True, kw_only=True)
class ModelPath:
    """A draft model before it is bound to a target: `model:path=...`.

    Attributes:
        path: Directory or hub id.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default as long as the model and the memory allow.
    """

    path: str
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    max_context: int | None = None

    def read_config(self) -> PreTrainedConfig:
        return open_config(self.path, revision=self.revision)

    def read_tokenizer(self) -> PreTrainedTokenizerBase | None:
        return open_tokenizer(self.path, revision=self.revision)

    def bind(self, surroundings: Surroundings) -> ModelDrafter:
        """Load the draft model. If its vocabulary differs from the target's, it proposes the tokens that both have."""
        model = open_model(
            self.path,
            dtype=self.dtype or surroundings.dtype,
            device=self.device or surroundings.device,
            revision=self.revision,
        )
        width = logit_width(model)
        words = shared_words(self.path, self.read_tokenizer(), width, surroundings)
        lm = as_lm(
            model,
            max_slots=surroundings.max_slots,
            max_context=self.max_context,
            vocab_size=min(width, surroundings.vocab_size) if words is None else None,
            compile=surroundings.compile and not Anatomy.of(model).recurrent,
            prepack=surroundings.prepack and packable(model),
        )
        return ModelDrafter(lm=lm if words is None else Translated(lm, words), vocab_size=surroundings.vocab_size)


def shared_words(
    path: str, tokenizer: PreTrainedTokenizerBase | None, width: int, surroundings: Surroundings
) -> Translation | None:
    """The map from the target's tokens to a draft model's. None if both have the same ids, apart from padding.

    Raises:
        InputError: The vocabularies have too little in common, or cannot be compared.
    """
    ours = surroundings.tokenizer
    if ours is None or tokenizer is None:
        if width != surroundings.vocab_size:
            raise InputError(
                f"the draft model {path} has {width} token ids and the target {surroundings.vocab_size}, and without "
                "both tokenizers the two cannot be matched; put the tokenizer's files beside both models"
            )
        return None
    if tokenizer.get_vocab() == ours.get_vocab():
        return None
    words = translation(ours, tokenizer, surroundings.vocab_size, width)
    if words.share < LEAST_SHARE:
        raise InputError(
            f"the draft model {path} has another vocabulary, with {len(words.ours)} of the target's "
            f"{words.vocab_size} tokens ({words.share:.1%}), so it could propose almost nothing. Use a draft model "
            f"with at least {LEAST_SHARE:.0%} of them, or drafter suffix"
        )
    return words


def _state(state: object) -> ModelState:
    if not isinstance(state, ModelState):
        raise TypeError(f"a draft model keeps a ModelState, got {type(state).__name__}")
    return state


def _own(state: Running) -> ModelState:
    return _state(state.drafter_state)
