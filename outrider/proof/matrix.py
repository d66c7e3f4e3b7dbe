"""The refusal matrix: which verifier is lossless for which way of drafting; judged once, at temperature above 0."""

from dataclasses import dataclass
from typing import Literal

from outrider.drafters.protocol import Rows
from outrider.types import Structure

Kind = Literal[
    "sampled chain",
    "chosen chain",
    "iid paths",
    "deduplicated iid paths",
    "tree drawn without replacement",
    "top n-1 and one draw",
    "chosen tree",
]
"""What a verifier sees: how the children were made."""

KINDS: dict[Structure, Kind] = {
    "iid": "iid paths",
    "iid_dedup": "deduplicated iid paths",
    "without_replacement": "tree drawn without replacement",
    "top_plus_one": "top n-1 and one draw",
    "deterministic": "chosen tree",
}

LOSSLESS: dict[str, frozenset[Kind]] = {
    "token": frozenset({"sampled chain", "chosen chain"}),
    "block": frozenset({"sampled chain", "chosen chain"}),
    "match": frozenset({"sampled chain", "chosen chain", *KINDS.values()}),
}
"""For each verifier, the kinds of draft for which it keeps the target's law; every other cell is refused."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination, by catalog name, with what decides about it."""

    rows: Rows
    structure: Structure
    verifier: str

    @property
    def kind(self) -> Kind:
        if self.structure == "chain":
            return "chosen chain" if self.rows == "point" else "sampled chain"
        return KINDS[self.structure]


def refusal(cell: Cell) -> str | None:
    """Why a combination is not lossless, with one that is; None where it is lossless.

    Example:
        >>> refusal(Cell(rows="sampled", structure="deterministic", verifier="token"))
        "verifier 'token' does not keep the target's law on a chosen tree; use verifier 'match'"
        >>> refusal(Cell(rows="point", structure="chain", verifier="block")) is None
        True
    """
    if cell.kind in LOSSLESS[cell.verifier]:
        return None
    working = sorted(name for name, kinds in LOSSLESS.items() if cell.kind in kinds)
    names = " or ".join(repr(name) for name in working)
    article = "" if cell.kind.endswith("s") else "a "
    return f"verifier {cell.verifier!r} does not keep the target's law on {article}{cell.kind}; use verifier {names}"
