"""What the loop asks of a drafter: guesses at the root, guesses at new nodes, and to be told what survived."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from outrider.types import Frontier, Guess, Request, Running

Rows = Literal["sampled", "point", "marginal"]
"""What a drafter's guesses are: a distribution after each prefix, one token, or a distribution per position."""


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Immutable: what belongs to one request is the value that `open` returns, kept by the loop in
    `Running.drafter_state` and passed back; it may change in place.

    Attributes:
        rows: What its guesses are.
        context_pure: Whether a guess depends on the tokens alone.
        taps: Which hidden states of the target `observe` wants.
        max_context: Longest context, in tokens, in which it can still guess; None has no end.
    """

    @property
    def rows(self) -> Rows: ...
    @property
    def context_pure(self) -> bool: ...
    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def max_context(self) -> int | None: ...

    def open(self, request: Request) -> object:
        """State for a new request."""
        ...

    def begin(self, states: Sequence[Running]) -> Guess:
        """Guess what follows the anchor, `state.tokens[-1]`, of each request."""
        ...

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        """Guess what follows each node of the frontier, in one batched call."""
        ...

    def observe(
        self,
        states: Sequence[Running],
        tokens: Sequence[Sequence[int]],
        taps: Sequence[Mapping[int, Float[Tensor, "positions hidden"]]],
    ) -> None:
        """Learn the newest positions whose target state is known: after prefill and commit, all but the anchor."""
        ...

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        """Per request, the numbers of the nodes that were accepted, as `expand` was given them; the rest is forgotten.

        Nodes that were never expanded may be among them. Called before `state.tokens` grows.
        """
        ...

    def reuse(self, state: object, request: Request, length: int) -> object:
        """State for a new request that shares its first `length` tokens with the one that `state` belonged to."""
        ...

    def close(self, state: object) -> None:
        """Give back what `open` took."""
        ...


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a drafter may need to know of the target when the parts are put together.

    Attributes:
        tokenizer: The target's tokenizer; None where there is none.
        vocab_size: Width of the target's logits.
        device: Where the target is.
        dtype: What the target computes in.
        max_slots: Most requests at once.
        compile: Whether the target's forwards are compiled.
        prepack: Whether the target's weights are laid out for the CPU's kernels.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    max_slots: int
    compile: bool = False
    prepack: bool = False


@runtime_checkable
class Unbound(Protocol):
    """A drafter as it is written down, before it knows the target."""

    def bind(self, surroundings: Surroundings) -> "Drafter":
        """The drafter itself. Raises InputError where it does not fit the target."""
        ...
