"""What drafters share that read nothing but tokens."""

from dataclasses import dataclass
from typing import ClassVar

from outrider.drafters.protocol import Drafter, Rows


@dataclass(frozen=True, kw_only=True)
class TokenOnly(Drafter):
    """A drafter that reads nothing but the committed tokens and proposes one token at a time.

    It is context-pure: a guess follows from the tokens before the anchor and the draft's own, and from nothing else. A
    later draft may answer otherwise after the same tokens, because more of them are committed by then. No rule that
    carries rows from step to step can notice: its weight is the quotient of the target's and the draft's probability of
    what was emitted, and a point draft gives a token that it did not propose the probability 0, so the target stands.
    """

    rows: ClassVar[Rows] = "point"
    context_pure: ClassVar[bool] = True
