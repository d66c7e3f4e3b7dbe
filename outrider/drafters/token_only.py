"""The base of drafters that read only tokens and propose one token at a time."""

from dataclasses import dataclass
from typing import ClassVar

from outrider.drafters.protocol import Drafter, Rows

USUAL_HITS = 0.3
"""How often a drafter that looks tokens up finds some, before that is known. It was 0.1 to 0.3 in stories, and is more
where answers repeat their prompts."""


@dataclass(frozen=True, kw_only=True)
class TokenOnly(Drafter):
    """A drafter that reads only the committed tokens and proposes one token at a time; one with `branching` may propose
    several for trees of chosen tokens.

    It is context-pure: a guess depends on known tokens and on the draft's own tokens alone. A later draft may guess
    another token after the same tokens, because more tokens are known by then. A verifier that carries rows
    from step to step stays exact: it weighs emitted tokens by $p/q$, and a point draft has $q = 0$ for every token that
    it did not propose, so the target's row is used unchanged.
    """

    rows: ClassVar[Rows] = "point"
    context_pure: ClassVar[bool] = True
