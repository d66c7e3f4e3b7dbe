"""What drafters share that read nothing but tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from outrider.drafters.protocol import Rows
from outrider.types import Request, Running


@dataclass(frozen=True, kw_only=True)
class TokenOnly:
    """What drafters share that read nothing but the committed tokens and propose one token at a time.

    They are context-pure: a guess follows from the tokens before the anchor and the draft's own, and from nothing else.
    A later draft may answer otherwise after the same tokens, because more of them are committed by then. No rule that
    carries rows from step to step can notice: its weight is the quotient of the target's and the draft's probability of
    what was emitted, and a point draft gives a token that it did not propose the probability 0, so the target stands.
    """

    @property
    def rows(self) -> Rows:
        return "point"

    @property
    def context_pure(self) -> bool:
        return True

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def max_context(self) -> int | None:
        return None

    def open(self, request: Request) -> object:
        return None

    def observe(
        self,
        states: Sequence[Running],
        tokens: Sequence[Sequence[int]],
        taps: Sequence[Mapping[int, Float[Tensor, "positions hidden"]]],
    ) -> None:
        """The tokens are read when the next draft begins."""

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        """Nothing of a draft is kept."""

    def reuse(self, state: object, request: Request, length: int) -> object:
        return self.open(request)

    def close(self, state: object) -> None:
        """Nothing was taken."""
