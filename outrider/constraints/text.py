"""Grammars as people write them."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["JSON schema", "regex", "choice", "Lark", "EBNF", "structural tag"]


@dataclass(frozen=True, kw_only=True)
class GrammarText:
    """The text of a grammar.

    Attributes:
        kind: What `text` is.
        text: The schema, pattern or rules; of choices and structural tags their JSON.
        max_whitespace: Of JSON: most whitespace characters between two elements; None is any number.
    """

    kind: Kind
    text: str
    max_whitespace: int | None = None
