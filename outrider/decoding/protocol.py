"""The parts of a decoder, and the interface of decodings: the orders of drafting and verifying."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.types import Draft, InputError, Running, Step, Verdict
from outrider.drafters.protocol import Drafter
from outrider.lengths.experience import Experience
from outrider.lengths.protocol import LengthPolicy
from outrider.lm.protocol import LM
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier

Keep = Callable[[Running, list[int]], int]
"""How many of the tokens about to be emitted a request still wants, at least one."""


class NoDistribution(InputError):
    """The target gives no probability to any token at a place where one must be drawn: its logits there are not
    numbers, or every token is forbidden."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """What happened in one step, for an observer. It is valid until the observer returns.

    Attributes:
        states: The requests before the step's tokens were added.
        draft: The draft that was verified.
        rows: The target's distribution after each node of the draft.
        logits: The target's raw logits there. Where the target did not run on a leaf, a placeholder.
        verdict: What was accepted.
    """

    states: Sequence[Running]
    draft: Draft
    rows: Float[Tensor, "nodes vocab"]
    logits: Float[Tensor, "nodes vocab"]
    verdict: Verdict


Watch = Callable[[Cycle], None]
"""Called once per step, before the commit."""


@runtime_checkable
class Decoding(Protocol):
    """How drafting and verifying follow each other. Immutable.

    Attributes:
        drafts_ahead: Whether it drafts behind tokens that are not verified yet.
    """

    drafts_ahead: ClassVar[bool]

    def step(
        self,
        parts: "Parts",
        states: Sequence[Running],
        *,
        dice: Dice | None = None,
        keep: Keep | None = None,
        watch: Watch | None = None,
    ) -> list[Step]:
        """One draft-verify-commit cycle of every request; the states change in place.

        Args:
            states: Requests that may still emit a token.
            dice: The source of all draws; by default those that the verifier wants, keyed by each request's seed.
            keep: Returns how many of the step's tokens a request keeps.
            watch: Called with the draft, the rows and the verdict.

        Raises:
            NoDistribution: The target gives a request no token a positive probability.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a decoder. A running request may have another drafter than `drafter`: see `Running.drafter`.

    Attributes:
        experience: What the decoder has learnt of its own steps, if the length policy reads it. Changes in place.
    """

    target: LM
    drafter: Drafter
    tree: Tree
    verifier: Verifier
    length: LengthPolicy
    decoding: Decoding
    experience: Experience = field(default_factory=Experience, compare=False)


@runtime_checkable
class Settling(Protocol):
    """A decoding that completes its parts when the engine is built, such as the draft length."""

    def settled(self, parts: Parts, named: bool) -> Parts:
        """The parts that will run. Called once, before the first step.

        Args:
            named: Whether the user named the length policy; otherwise it is the default one.

        Raises:
            InputError: The length policy and the decoding contradict each other.
        """
        ...
