"""The refusal matrix: which rules keep the target's law on which drafts; judged once, at temperature above 0."""

from dataclasses import dataclass
from typing import Literal, get_args

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
CHAINS: frozenset[Kind] = frozenset({"sampled chain", "chosen chain"})
EVERY: frozenset[Kind] = frozenset(get_args(Kind))

LOSSLESS: dict[str, frozenset[Kind]] = {
    "token": CHAINS,
    "block": CHAINS,
    "match": EVERY,
    "recursive": CHAINS | {"iid paths", "deduplicated iid paths", "tree drawn without replacement"},
    "kseq": CHAINS | {"iid paths"},
    "top_plus_one": CHAINS | {"top n-1 and one draw"},
    "traversal": CHAINS | {"deduplicated iid paths", "tree drawn without replacement"},
    "multipath": CHAINS | {"iid paths"},
    "greedy_block": CHAINS,
}
"""For each lossless verifier, the kinds of draft for which it keeps the target's law."""

LOSSY: dict[str, frozenset[Kind]] = {"lenient": CHAINS, "typical": EVERY}
"""For each lossy verifier, the kinds of draft that it can be run on."""

DEFAULT: dict[Kind, str] = {
    "sampled chain": "block",
    "chosen chain": "block",
    "iid paths": "recursive",
    "deduplicated iid paths": "traversal",
    "tree drawn without replacement": "traversal",
    "top n-1 and one draw": "top_plus_one",
    "chosen tree": "match",
}
"""The verifier that a draft gets where none is named: the one that accepts most, by the papers."""

FIXED_LENGTH = frozenset({"greedy_block"})
"""Verifiers whose window must not end where a stopping rule says."""

CONTEXT_PURE = frozenset({"greedy_block"})
"""Verifiers that need the next draft's rows to be what the last draft's would have been."""

CARRYING = frozenset({"greedy_block"})
"""Verifiers that carry something from step to step."""

LOSSY_LENGTHS = frozenset({"tetris:criterion=original"})
"""Length policies that drop drawn tokens because of which tokens they are."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination, by catalog names, with what decides about it.

    Attributes:
        rows: What the drafter's guesses are.
        context_pure: Whether they depend on the tokens alone.
        structure: How the tree makes children.
        verifier: The rule's name.
        length: The length policy's name, `tetris:criterion=original` for that form.
        decoding: The name of what orders drafting and verifying.
        taps: Whether the drafter reads hidden states of the target.
    """

    rows: Rows
    structure: Structure
    verifier: str
    context_pure: bool = True
    length: str = "fixed"
    decoding: str = "step"
    taps: bool = False

    @property
    def kind(self) -> Kind:
        if self.structure == "chain":
            return "chosen chain" if self.rows == "point" else "sampled chain"
        return KINDS[self.structure]


def refusal(cell: Cell, allow_lossy: bool = False) -> str | None:
    """Why a combination is not lossless, with one that is; None where it is lossless.

    Args:
        allow_lossy: Let lossy rules pass, where they can be run at all.

    Example:
        >>> refusal(Cell(rows="sampled", structure="deterministic", verifier="token"))
        "verifier 'token' does not keep the target's law on a chosen tree; use verifier 'match'"
        >>> refusal(Cell(rows="point", structure="chain", verifier="block")) is None
        True
    """
    if cell.rows == "point" and cell.structure != "chain":
        return "this drafter proposes one token at a time, and a branching tree needs distributions; use tree 'chain'"
    if cell.length != "fixed" and cell.structure != "chain":
        return f"length {cell.length.split(':')[0]!r} is for chains; use length 'fixed' with a branching tree"
    if cell.decoding == "pearl" and (reason := _not_ahead(cell)):
        return f"decoding 'pearl' drafts on behind tokens that are not judged yet, {reason}, or decoding 'step'"
    if cell.verifier in LOSSY:
        if cell.kind not in LOSSY[cell.verifier]:
            return f"verifier {cell.verifier!r} cannot judge {_named(cell.kind)}; {_working(cell)}"
        if not allow_lossy:
            allow = "allow it with --allow-lossy (allow_lossy=True)"
            return f"verifier {cell.verifier!r} is lossy; {allow}, or {_working(cell)}"
    elif cell.verifier not in LOSSLESS:
        return (
            None
            if allow_lossy
            else (
                f"verifier {cell.verifier!r} is not in the catalog, so nothing is proven of it; prove it with "
                "outrider.proof.enumerate.law and run it with allow_lossy=True"
            )
        )
    elif cell.kind not in LOSSLESS[cell.verifier]:
        return f"verifier {cell.verifier!r} does not keep the target's law on {_named(cell.kind)}; {_working(cell)}"
    if cell.length in LOSSY_LENGTHS and not allow_lossy:
        return (
            f"length {cell.length!r} drops drawn tokens because of which tokens they are, and is lossy; use "
            "criterion=predictable, or allow it with --allow-lossy (allow_lossy=True)"
        )
    if cell.length != "fixed" and cell.verifier in FIXED_LENGTH:
        return f"verifier {cell.verifier!r} needs drafts of one length; use length 'fixed', or verifier 'block'"
    if not cell.context_pure and cell.verifier in CONTEXT_PURE:
        return (
            f"verifier {cell.verifier!r} carries rows from step to step, and this drafter's rows depend on more than "
            "the tokens; use verifier 'block'"
        )
    return None


def _not_ahead(cell: Cell) -> str | None:
    """Why a combination cannot be drafted ahead of its verification, and what could."""
    if cell.structure != "chain":
        return "and a tree has no one end to go on from; use tree 'chain'"
    if cell.taps:
        return "and this drafter reads the target's hidden states, which are not known there; use a draft model"
    if cell.length != "fixed":
        return f"as many as the target's forward gives time for, not as length {cell.length!r} says; use length 'fixed'"
    if cell.verifier in CARRYING:
        return f"and verifier {cell.verifier!r} carries rows from step to step, past them; use verifier 'block'"
    return None


def _named(kind: Kind) -> str:
    return kind if kind.endswith("s") else f"a {kind}"


def _working(cell: Cell) -> str:
    names = [name for name, kinds in LOSSLESS.items() if cell.kind in kinds and name != "greedy_block"]
    return f"use verifier {' or '.join(repr(name) for name in names)}"
