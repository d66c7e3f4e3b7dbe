"""What the loop asks of a drafter: guesses at the root, guesses at new nodes, and to be told what survived."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.lm.ends import Ends
from outrider.lm.protocol import LM, Readable
from outrider.types import Frontier, Guess, InputError, Request, Running

Rows = Literal["sampled", "point", "marginal"]
"""What a drafter's guesses are: a distribution after each prefix, one token, or a distribution per position."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Positions whose target state has become known, of several requests, packed.

    The positions of request r are `offsets[r] : offsets[r + 1]`, in order: those behind what was observed before.

    Attributes:
        tokens: The token at each position, on the host.
        offsets: Where each request's positions begin; the last entry is the number of positions.
        taps: For each tap that the drafter asked for, the target's hidden state at each position.
    """

    tokens: Int[np.ndarray, " positions"]
    offsets: Int[np.ndarray, " bounds"]
    taps: Mapping[int, Float[Tensor, "positions hidden"]] = field(default_factory=dict)

    def counts(self) -> list[int]:
        """How many positions of each request there are."""
        return np.diff(self.offsets).tolist()


def _no_ends() -> Ends:
    raise InputError("this drafter needs the target's embedding, final norm and output layer, and has no way to them")


def _no_keys_values(slot: int, layer: int) -> tuple[Tensor, Tensor]:
    raise InputError("this drafter reads the target's keys and values, and this target keeps none that can be read")


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Immutable: what belongs to one request is the value that `open` returns, kept by the loop in
    `Running.drafter_state` and passed back; it may change in place.

    A class that derives from this one inherits what a drafter does that reads only tokens and keeps nothing.

    Attributes:
        rows: What its guesses are.
        context_pure: Whether a guess depends on the tokens alone: not on features, nor on weights that change.
        taps: Which hidden states of the target `observe` wants.
        max_context: Longest context, in tokens, in which it can still guess; None has no end.
        max_depth: How deep it can guess at all; None: as deep as it is asked.
        device: Where its drafts are drawn; None is where the target is.
        modules: The modules that it guesses with, by name: a change of their weights is a change of the drafter.
        chains_only: Why it cannot grow a branching tree, as a whole sentence's end; None where it can.
        keeps_cache: Whether it keeps keys and values, or the like, of every request.
        trainer: The name of the method that trains it; None where there is nothing to train.
        exports: The formats of other engines that fit its checkpoints.
    """

    rows: ClassVar[Rows]
    context_pure: ClassVar[bool]
    keeps_cache: ClassVar[bool] = False
    trainer: ClassVar[str | None] = None
    exports: ClassVar[tuple[str, ...]] = ()

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def max_context(self) -> int | None:
        return None

    @property
    def max_depth(self) -> int | None:
        return None

    @property
    def device(self) -> torch.device | None:
        return None

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return MappingProxyType({})

    @property
    def chains_only(self) -> str | None:
        return None

    def open(self, request: Request) -> object:
        """State for a new request."""
        return None

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        """Guess what follows the anchor, `state.tokens[-1]`, of each request.

        Args:
            depths: How deep each request's draft can become, at least 1: how far it is worth computing.
        """
        ...

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        """Guess what follows each node of the frontier, in one batched call."""
        ...

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        """Learn the newest positions whose target state is known: after prefill and commit, all but the anchor."""
        return

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        """What survived of the last draft: the nodes of each accepted path, by their numbers. `state.tokens` still ends
        with the old anchor.
        """
        return

    def needs(self, state: object, length: int) -> int:
        """Where hidden states must be observed from, at most `length`, if a text goes on that shares its first `length`
        tokens with the one that `state` belongs to. Asked before `reuse` or `fork`; nothing is changed.
        """
        return 0 if self.taps else length

    def reuse(self, state: object, request: Request, length: int) -> object:
        """State for a request that shares its first `length` tokens with the one that `state` belonged to.

        The old state is used up. It may be that of a call that failed half-way: what was there before counts.
        """
        return self.open(request)

    def fork(self, state: object, request: Request, length: int) -> object:
        """As `reuse`, but the old state stays in use."""
        return self.open(request)

    def close(self, state: object) -> None:
        """Give back what `open` took."""
        return

    def cast(self, surroundings: "Surroundings") -> "Drafter":
        """The same drafter beside a target that computes in another type, with states of its own."""
        return self

    def on_tables(self, vocab_size: int, seed: int) -> "Drafter":
        """A drafter of the same kind for a small vocabulary, whose law can be enumerated: random tables stand for what
        it learnt.
        """
        return self


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a drafter may know of the target when the parts are put together. It never holds the target itself.

    Attributes:
        tokenizer: The target's tokenizer; None where there is none.
        vocab_size: Width of the target's logits.
        device: Where the target is.
        dtype: What the target computes in.
        max_slots: Most requests at once, those included whose slots are kept warm.
        max_context: The target's longest context.
        num_layers: The target's decoder layers; 0 where its hidden states cannot be read.
        hidden_size: Width of its hidden states; 0 where they cannot be read.
        ends: Its input embedding, final norm and output layer; raises InputError where a drafter cannot use them.
        keys_values: A slot's committed keys and values in a layer, `[length, heads, dim]` each: views that hold until
            the target's next call.
        compile: Whether the target's forwards are compiled.
        prepack: Whether the target's weights are laid out for the CPU's kernels.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    max_slots: int
    max_context: int
    num_layers: int = 0
    hidden_size: int = 0
    ends: Callable[[], Ends] = _no_ends
    keys_values: Callable[[int, int], tuple[Tensor, Tensor]] = _no_keys_values
    compile: bool = False
    prepack: bool = False

    @classmethod
    def of(
        cls,
        target: LM,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_slots: int | None = None,
        compile: bool = False,
        prepack: bool = False,
    ) -> "Surroundings":
        """What there is to know of a target.

        Args:
            max_slots: Most requests at once; by default as many as the target's slots.
        """
        known = cls(
            tokenizer=tokenizer,
            vocab_size=target.vocab_size,
            device=target.device,
            dtype=target.dtype,
            max_slots=max_slots or target.max_slots,
            max_context=target.max_context,
            compile=compile,
            prepack=prepack,
        )
        if not isinstance(target, Readable):
            return known
        return replace(
            known,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            ends=target.ends,
            keys_values=target.keys_values,
        )

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """The target's input embeddings of tokens."""
        return self.ends().embed(tokens)

    def norm(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The target's final norm of what leaves its last layer."""
        return self.ends().norm(hidden)

    def head(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """The target's logits of normed states."""
        return self.ends().head(hidden)


@runtime_checkable
class Unbound(Protocol):
    """A drafter as it is written down, before it knows the target."""

    def bind(self, surroundings: Surroundings) -> Drafter:
        """The drafter itself. Raises InputError where it does not fit the target."""
        ...


@runtime_checkable
class UnboundModel(Unbound, Protocol):
    """A drafter as it is written down that is a language model by itself. Its files can be compared with the target's
    before any weights are loaded.
    """

    def read_config(self) -> PreTrainedConfig:
        """The model's config. Raises InputError where it cannot be read."""
        ...

    def read_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer beside the model; None where there is none."""
        ...
