"""The interface of drafters: guess after the root, guess after new nodes, learn what was accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from outrider.core.option import Bounds
from outrider.core.types import Draft, Frontier, Guess, Request, Running, Step
from outrider.drafters.exports import Exports
from outrider.lengths.costs import CostTable
from outrider.lm.slots.batch import upload
from outrider.lm.target_info import TargetInfo

Rows = Literal["sampled", "point", "marginal"]
"""The kind of a drafter's guesses: `sampled` is a distribution after each prefix, `point` one token (or a few, where a
drafter has `branching`), `marginal` a distribution per position."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """New committed positions of several requests, packed, with the target's hidden states there.

    The positions of request r are `offsets[r] : offsets[r + 1]`, in order. They follow the positions observed before.

    Attributes:
        tokens: The token at each position, on the host.
        offsets: Where each request's positions begin; the last entry is the number of positions.
        taps: For each of the drafter's taps, the target's hidden state at each position.
    """

    tokens: Int[np.ndarray, " positions"]
    offsets: Int[np.ndarray, " bounds"]
    taps: Mapping[int, Float[Tensor, "positions hidden"]] = field(default_factory=dict)

    def counts(self) -> list[int]:
        """Number of positions of each request."""
        return np.diff(self.offsets).tolist()

    def newest(self, values: Float[Tensor, "positions dim"]) -> dict[int, Float[Tensor, " dim"]]:
        """The values at the last new position of each request that has one, by the request's index.

        Copies, so that the values at all other positions can be freed.
        """
        requests = np.flatnonzero(np.diff(self.offsets))
        rows = values[upload([self.offsets[1:][requests] - 1], values.device)[0]]
        return dict(zip(requests.tolist(), rows, strict=True))


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens. Immutable: the state of a request is the value that `open` returns. The loop keeps it in
    `Running.drafter_state` and passes it back. It may change in place.

    The defaults here are those of a drafter that reads only tokens and keeps no state.

    Attributes:
        components: The drafters that draft for it, the costliest last; itself, if it is no drafter of several.
        rows: The kind of its guesses.
        context_pure: Whether a guess depends on the tokens alone, not on hidden states or on weights that change.
        taps: The hidden states of the target that `observe` gets, as numbers of `Readable` in `outrider.lm.protocol`.
        max_context: Longest context, in tokens, in which it can guess; None: any length.
        max_depth: Deepest node that it can guess; None: any depth.
        device: Where its drafts are drawn; None: on the target's device.
        modules: The modules that it guesses with, by name. New weights in them make it another drafter.
        estimates: Whether it estimates how likely its guesses are accepted.
        chains_only: Why it cannot grow a branching tree, as the end of a sentence; None if it can.
        keeps_cache: Whether it keeps keys and values, or something like them, of every request.
        waits: Whether calls of `observe` may be left out, because `begin` reads the tokens that it has not seen.
        unites: Whether the drafts of all its components make one tree, see `Uniting`.
        usual_hits: How likely it is taken to find a draft before any was asked for; 1 where it always does.
        looks_up: Whether it can find its drafts before their lengths are chosen, see `look_up`.
        trainer: The name of the method that trains it; None where there is nothing to train.
        exports: Which other engines run it, and by which names.
    """

    rows: ClassVar[Rows]
    context_pure: ClassVar[bool]
    keeps_cache: ClassVar[bool] = False
    waits: ClassVar[bool] = False
    unites: ClassVar[bool] = False
    usual_hits: ClassVar[float] = 1.0
    looks_up: ClassVar[bool] = False
    trainer: ClassVar[str | None] = None
    exports: ClassVar[Exports] = Exports()

    @property
    def components(self) -> tuple["Drafter", ...]:
        return (self,)

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
    def estimates(self) -> bool:
        return False

    @property
    def chains_only(self) -> str | None:
        return None

    def open(self, request: Request) -> object:
        """State for a new request."""
        return None

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        """Guess what follows the anchor, `state.tokens[-1]`, of each request.

        Args:
            depths: Deepest node of each request's draft, at least 1. Deeper guesses will not be asked for.
        """
        ...

    def look_up(self, states: Sequence[Running], depths: Sequence[int]) -> list[Sequence[float]]:
        """Find the next draft of each request. Returns the probability of each of its tokens to be accepted if all
        before it are. `begin` and `expand` then guess these tokens. Called only if it `looks_up`.

        Args:
            depths: Most tokens of each draft.
        """
        return [() for _ in states]

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        """Guess what follows each node of the frontier, in one batched call."""
        ...

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        """Take in new positions. Called after prefill and after commit, with every new position but the anchor's."""
        return

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        """Learn which nodes of the last draft were accepted: the numbers of each accepted path. `state.tokens` does not
        have the new tokens yet. A step in which nobody drafts leaves this out.
        """
        return

    def needs(self, state: object, length: int) -> int:
        """The first position, at most `length`, whose hidden state the drafter must observe again if another text
        reuses the first `length` tokens of `state`'s text. Called before `reuse` or `fork`; changes nothing.
        """
        return 0 if self.taps else length

    def reuse(self, state: object, request: Request, length: int) -> object:
        """State for a request whose first `length` tokens are those of `state`'s text. The old state is used up.

        The old state may come from a call that failed half-way. What was committed before that call is still valid.
        """
        return self.open(request)

    def fork(self, state: object, request: Request, length: int) -> object:
        """As `reuse`, but the old state stays valid."""
        return self.open(request)

    def ended(self, state: Running) -> None:
        """Take note of a request that has ended, by itself or because it was cancelled. Its state may be reused."""
        return

    def forget(self) -> None:
        """Forget the texts of ended requests, if it remembers them."""
        return

    def predicted(self, state: object) -> tuple[int, int]:
        """Draft tokens that it copied from the request's prediction: how many were accepted, and how many were not."""
        return 0, 0

    def close(self, state: object) -> None:
        """Release what `open` allocated."""
        return

    def cast(self, target_info: "TargetInfo") -> "Drafter":
        """The same drafter for a target of another dtype. It shares no request states with this one."""
        return self

    def on_tables(self, vocab_size: int, seed: int) -> "Drafter":
        """A drafter of the same kind for a small vocabulary, so that its law can be enumerated. Random tables replace
        its weights.
        """
        return self


@dataclass(frozen=True, kw_only=True)
class Promise:
    """What a copy of earlier text promises.

    Attributes:
        match: How many tokens the context shares with the text before the copy.
        tokens: Most tokens that can be copied.
    """

    match: int
    tokens: int


@runtime_checkable
class Copying(Protocol):
    """A drafter that copies earlier text, and can say beforehand what that promises."""

    def promise(self, state: Running, most: int) -> Promise | None:
        """What a draft of at most so many tokens promises; None if there is nothing to copy. Drafts nothing yet."""
        ...


@runtime_checkable
class Choosing(Protocol):
    """A drafter of several."""

    def choose(self, states: Sequence[Running], rooms: Sequence[int], costs: CostTable | None) -> list[Running]:
        """The requests as those of its components see them that draft for them in this step: `drafter`, `drafter_state`
        and `length_state` are the component's, all else is shared. A request without room is returned itself.

        Args:
            rooms: Deepest draft of each request; 0 drafts nothing.
            costs: What steps cost; None if that is not known.
        """
        ...

    def instead(self, state: Running) -> Running:
        """The request as its last component sees it, which then drafts in place of the chosen one."""
        ...

    def learn(self, state: Running, view: Running, step: Step) -> None:
        """Learn what a step brought to a request and to what `choose` returned for it. `state.tokens` has its tokens.
        What is learnt goes into a new value of `state.drafter_state`, so that it is forgotten where the step fails and
        is made again.
        """
        ...


@runtime_checkable
class Uniting(Protocol):
    """A drafter of several that all draft in each step."""

    def seen_by(self, number: int, state: Running) -> Running:
        """A request as one of its components sees it."""
        ...

    def unite(self, states: Sequence[Running], drafts: Sequence[Draft]) -> Draft:
        """One tree of the drafts of its components, one draft of each, in their order. Notes which nodes are whose."""
        ...


@runtime_checkable
class Unbound(Protocol):
    """A drafter before it is bound to a target: the options that a user gave."""

    def bind(self, target_info: TargetInfo) -> Drafter:
        """The drafter itself. Raises InputError if it does not fit the target."""
        ...


@runtime_checkable
class UnboundCheckpoint(Unbound, Protocol):
    """An unbound drafter in files."""

    def check_files(self) -> None:
        """Raise InputError if there is no such checkpoint. Called before the target is loaded, which takes longer."""
        ...


@runtime_checkable
class UnboundModel(Unbound, Protocol):
    """An unbound drafter that is a language model by itself. Its files can be compared with the target's before any
    weights are loaded.
    """

    def read_config(self) -> PreTrainedConfig:
        """The model's config. Raises InputError if it cannot be read."""
        ...

    def read_tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer beside the model; None if there is none."""
        ...


def lm_of(drafter: Drafter) -> Any:
    """The model or head that a drafter runs, itself or as the last of several; None: it runs none."""
    while (last := drafter.components[-1]) is not drafter:
        drafter = last
    return getattr(drafter, "lm", None)


def check_longest(max_context: int | None) -> None:
    """Raise InputError if a longest context holds no token."""
    Bounds(least=1).check("max_context", max_context)


def fits(drafter: Drafter, num_tokens: int, left: int) -> int:
    """Deepest draft of a drafter behind so many tokens, at most `left`."""
    if (most := drafter.max_context) is not None:
        left = min(left, most - num_tokens - 1)
    if (most := drafter.max_depth) is not None:
        left = min(left, most)
    return max(left, 0)
