"""What a decoder is made of, and what the engine asks of the order in which drafting and verifying follow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from outrider.dice import Dice
from outrider.drafters.protocol import Drafter
from outrider.lengths.protocol import LengthPolicy
from outrider.lm.protocol import LM
from outrider.trees.protocol import Tree
from outrider.types import Draft, InputError, Running, Step, Verdict
from outrider.verifiers.protocol import Verifier

Keep = Callable[[Running, list[int]], int]
"""How many of the tokens about to be emitted a request still wants, at least one."""


class NoDistribution(InputError):
    """The target gives no probability to any token at a place where one must be drawn: its logits there are not
    numbers, or every token is forbidden."""


@dataclass(frozen=True, kw_only=True)
class Cycle:
    """What happened in one step, for an observer; it holds until the observer returns.

    Attributes:
        states: The requests, as they were before the step's tokens were added.
        draft: What was drafted and judged.
        rows: The target's distribution after each node of the draft.
        verdict: What survived.
    """

    states: Sequence[Running]
    draft: Draft
    rows: Float[Tensor, "nodes vocab"]
    verdict: Verdict


Watch = Callable[[Cycle], None]
"""Called once per step, before anything of it is committed."""


@runtime_checkable
class Decoding(Protocol):
    """How drafting and verifying follow each other. Immutable.

    Attributes:
        drafts_ahead: Whether it drafts behind tokens that are not judged yet.
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
            dice: The source of all draws; by default keyed by each request's seed and step.
            keep: How many of the tokens about to be emitted each request still wants.
            watch: Sees the draft, the rows and the verdict.

        Raises:
            NoDistribution: The target gives a request nothing to draw from.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a decoder is made of. Requests under way may have another drafter: `Running.drafter` counts."""

    target: LM
    drafter: Drafter
    tree: Tree
    verifier: Verifier
    length: LengthPolicy
    decoding: Decoding
