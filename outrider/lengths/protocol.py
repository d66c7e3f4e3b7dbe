"""The interface of length policies: the deepest draft, when to stop, and an update after each step."""

from collections.abc import Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import Running, Step
from outrider.lengths.experience import Experience, LengthChoice
from outrider.trees.protocol import Level, RankedTree


@runtime_checkable
class LengthPolicy(Protocol):
    """Decides when drafting stops, from earlier steps and from rows. It must not read drawn tokens: a policy that reads
    a drawn token to decide whether to keep it breaks the law. Immutable; a request's state is a value.

    Attributes:
        constant: Whether all drafts have the same length, as far as there is room.
        known_ahead: Whether a step's length is known before the step: `reach` never sets a bound, and requests share
            no budget. A policy that does not say so is asked at every level.
        reads_survival: Whether `reach` needs the drafter's own estimate of acceptance. A policy that does not say so
            needs none.
        lossy: Why the output has another law than the target's, and what to use instead; None if the law is the same.
    """

    constant: ClassVar[bool]

    @property
    def lossy(self) -> str | None: ...

    def open(self) -> object:
        """State for a new request."""
        ...

    def limit(self, state: object) -> int:
        """Deepest draft of the next step."""
        ...

    def reach(self, states: Sequence[object], level: Level) -> Int[np.ndarray, " n"] | None:
        """How many more tokens may follow each node of a level, given its scores: 0 stops there, 1 allows one more.
        None sets no bound. Called before tokens are drawn, and only if the drafter has rows.
        """
        ...

    def update(self, state: object, step: Step) -> object:
        """The state after a step."""
        ...


@runtime_checkable
class BatchPolicy(Protocol):
    """A length policy that shares one budget of target nodes among the chains of a batch, after drafting."""

    def note(self, level: Level, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n 2"]:
        """The two numbers per drawn token that `share` needs later."""
        ...

    def share(self, notes: Float[np.ndarray, "requests depth 2"]) -> Int[np.ndarray, " requests"]:
        """How many draft tokens of each request to verify. `notes` is -inf where a request has no token."""
        ...


@runtime_checkable
class LoadPolicy(Protocol):
    """A length policy that chooses the lengths of all requests of a step together, before drafting, by what steps cost
    and by the acceptance so far.
    """

    def choose(self, experience: Experience, states: Sequence[Running], rooms: Sequence[int]) -> LengthChoice:
        """The lengths of the next step. Changes nothing.

        Args:
            experience: What the engine knows of its steps.
            states: The requests of the step.
            rooms: Longest draft that each of them can make.
        """
        ...

    def looks(self, experience: Experience, states: Sequence[Running], choice: LengthChoice) -> bool:
        """Whether all requests look for drafts, also those for which `choose` found none worth it. Asked where a
        drafter can find its drafts before their lengths are chosen. Changes nothing.
        """
        ...

    def shorten(
        self,
        experience: Experience,
        states: Sequence[Running],
        choice: LengthChoice,
        promised: Sequence[Sequence[float] | None],
    ) -> LengthChoice:
        """The lengths of drafts that were found before the step, by what the drafter promises of their tokens. Changes
        nothing.

        Args:
            choice: What `choose` returned. Who has a length of 0 there was not asked for a draft.
            promised: Of each token of each request's draft, none where there is no draft. None for a request whose
                drafter promises nothing; it keeps its length.
        """
        ...

    def why_plain(self, experience: Experience) -> str:
        """Why the last steps drafted nothing, as the rest of a sentence that begins with `nothing was drafted:`."""
        ...


@runtime_checkable
class SizingPolicy(LoadPolicy, Protocol):
    """A policy that chooses the size of trees too. One without this is for chains."""

    def sized(
        self,
        experience: Experience,
        states: Sequence[Running],
        choice: LengthChoice,
        rooms: Sequence[int],
        tree: RankedTree,
    ) -> LengthChoice:
        """The choice for drafts that branch: how deep they may be, and the tree that chooses the nodes and levels of
        this step while it grows. Changes nothing.

        Args:
            choice: What `choose` returned. Who has a length of 0 there drafts nothing.
            rooms: Deepest draft of each request.
            tree: How drafts branch.
        """
        ...
