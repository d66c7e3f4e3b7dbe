"""The refusal matrix: which parts together keep the target's law, at any temperature above 0."""

from dataclasses import dataclass, field

from outrider import catalog
from outrider.core.types import Structure
from outrider.decoding.protocol import Decoding
from outrider.decoding.step import StepDecoding
from outrider.drafters.protocol import Rows
from outrider.lengths.fixed import FixedLength
from outrider.lengths.protocol import LengthPolicy
from outrider.verifiers.protocol import Carrying, Verifier
from outrider.verifiers.traits import KINDS, Kind, StatedVerifier

DEFAULT: dict[Kind, str] = {
    "sampled chain": "block",
    "chosen chain": "block",
    "iid paths": "recursive",
    "deduplicated iid paths": "traversal",
    "tree drawn without replacement": "traversal",
    "top n-1 and one draw": "top_plus_one",
    "chosen tree": "match",
    "union of chains": "traversal",
}
"""The default verifier for each kind of draft: the one that accepts most, by the papers."""

ALLOW = "allow it with --allow-lossy (allow_lossy=True)"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination of parts, with the traits that decide about it.

    Attributes:
        rows: The kind of the drafter's guesses.
        context_pure: Whether the guesses depend on the tokens alone.
        taps: Whether the drafter reads hidden states of the target.
        estimates: Whether it estimates how likely its guesses are accepted.
        several: Whether it chooses at each step which drafter drafts.
        branches: Whether a drafter of single tokens can guess several after a node.
        unites: Whether the drafts of several drafters make one tree.
        structure: How the tree makes children.
        ranked: Whether it is a `RankedTree`.
        verifier: The rule.
        length: The length policy.
        decoding: The order of drafting and verifying.
    """

    rows: Rows
    structure: Structure
    verifier: Verifier
    context_pure: bool = True
    taps: bool = False
    estimates: bool = False
    several: bool = False
    branches: bool = False
    unites: bool = False
    ranked: bool = False
    length: LengthPolicy = field(default_factory=FixedLength)
    decoding: Decoding = field(default_factory=StepDecoding)

    @property
    def kind(self) -> Kind:
        return kind_of(self.rows, self.structure)


def kind_of(rows: Rows, structure: Structure) -> Kind:
    """The kind of draft that a drafter and a tree make together."""
    if structure == "chain":
        return "chosen chain" if rows == "point" else "sampled chain"
    return KINDS[structure]


def verifiers(*, lossy: bool = False) -> dict[str, type[StatedVerifier]]:
    """The catalog's verifiers by name: the lossless ones, or the lossy ones."""
    classes = {name: row.make for name, row in catalog.rows("verifier").items()}
    return {name: make for name, make in classes.items() if issubclass(make, StatedVerifier) and make.lossy == lossy}


def refusal(cell: Cell, allow_lossy: bool = False) -> str | None:
    """Why a combination is not lossless, and one that is; None if it is lossless.

    Args:
        allow_lossy: Allow lossy verifiers and length policies, if they can run at all.

    Example:
        >>> from outrider.verifiers.block import BlockVerifier
        >>> refusal(Cell(rows="sampled", structure="deterministic", verifier=BlockVerifier()))
        "verifier 'block' does not keep the target's law on a chosen tree; use verifier 'match' or 'coupled'"
        >>> refusal(Cell(rows="point", structure="chain", verifier=BlockVerifier())) is None
        True
    """
    if cell.unites and cell.structure not in ("union", "deterministic"):
        return (
            "this drafter copies beside chains or chosen trees, and the last drafter's tree is drawn with branches; "
            "use tree 'chain' or 'dynamic'"
        )
    if cell.rows == "point" and cell.branches and cell.structure not in ("chain", "deterministic"):
        return "this drafter has no distributions to draw from; use a tree that chooses, 'dynamic' or 'opt', or 'chain'"
    if cell.rows == "point" and not cell.branches and cell.structure != "chain":
        return "this drafter proposes one token at a time, and a branching tree needs distributions; use tree 'chain'"
    if cell.structure != "chain" and not cell.length.constant and (reason := _not_sized(cell)):
        return reason
    if getattr(cell.length, "reads_survival", False) and not cell.estimates:
        return (
            f"length {_name(cell.length)} needs a drafter that estimates how likely its guesses are accepted, as a "
            "dspark head with a confidence head does; use length 'adaedl'"
        )
    if cell.decoding.drafts_ahead and (reason := _not_ahead(cell)):
        return (
            f"decoding {_name(cell.decoding)} drafts on behind tokens that are not judged yet, {reason}, or decoding "
            "'step'"
        )
    if reason := _not_judged(cell, allow_lossy):
        return reason
    if cell.length.lossy and not allow_lossy:
        return f"length {_name(cell.length)} is lossy: {cell.length.lossy}, or {ALLOW}"
    if not isinstance(cell.verifier, StatedVerifier):
        return None
    if cell.verifier.needs_one_length and not cell.length.constant:
        return f"verifier {_name(cell.verifier)} needs drafts of one length; use length 'fixed', or {_usual(cell)}"
    if cell.verifier.needs_pure_rows and not cell.context_pure:
        return (
            f"verifier {_name(cell.verifier)} needs the next draft's rows to be those that this draft would have had, "
            f"and this drafter's rows depend on more than the tokens; {_usual(cell)}"
        )
    return None


def _not_sized(cell: Cell) -> str | None:
    """Why the length policy cannot choose the depth of a branching tree, and what can."""
    what = "drafter 'union'" if cell.unites else "a branching tree"
    if cell.unites or cell.several or not hasattr(cell.length, "sized"):
        return f"length {_name(cell.length)} is for chains; use length 'fixed' with {what}"
    if not cell.ranked:
        return f"length {_name(cell.length)} is for chains and tree 'dynamic'; use length 'fixed' with another tree"
    return None


def _not_judged(cell: Cell, allow_lossy: bool) -> str | None:
    """Why the verifier does not keep the law on drafts of this kind; the other parts do not matter here."""
    rule, name = cell.verifier, f"verifier {_name(cell.verifier)}"
    if catalog.row_of(rule) is None:
        prove = "prove it with outrider.proof.enumerate.law and run it with allow_lossy=True"
        return None if allow_lossy else f"{name} is not in the catalog, so nothing is proven of it; {prove}"
    if not isinstance(rule, StatedVerifier) or not rule.kinds:
        state = "let its class inherit StatedVerifier and set `kinds`"
        return None if allow_lossy else f"{name} does not say for which drafts it keeps the target's law; {state}"
    if rule.lossy and cell.kind not in rule.kinds:
        return f"{name} cannot judge {_named(cell.kind)}; {_working(cell)}"
    if rule.lossy and not allow_lossy:
        return f"{name} is lossy; {ALLOW}, or {_working(cell)}"
    if cell.kind not in rule.kinds:
        return f"{name} does not keep the target's law on {_named(cell.kind)}; {_working(cell)}"
    return None


def _not_ahead(cell: Cell) -> str | None:
    """Why a combination cannot draft ahead, and one that can."""
    if cell.unites:
        return "and this drafter's drafts have several ends; use one drafter"
    if cell.structure != "chain":
        return "and a tree has no one end to go on from; use tree 'chain'"
    if cell.several:
        return "and this drafter chooses by what its last drafts brought, which is not known there; use one drafter"
    if cell.taps:
        return "and this drafter reads the target's hidden states, which are not known there; use a draft model"
    if not cell.length.constant:
        return (
            f"as many as the target's forward gives time for, not as length {_name(cell.length)} says; use length "
            "'fixed'"
        )
    if getattr(cell.verifier, "shares_noise", False):
        return (
            f"and verifier {_name(cell.verifier)} counts the positions of draft tokens from the newest judged one; "
            f"{_usual(cell)}"
        )
    if isinstance(cell.verifier, Carrying):
        return f"and verifier {_name(cell.verifier)} carries rows from step to step, past them; {_usual(cell)}"
    return None


def _name(part: object) -> str:
    return repr(catalog.name_of(part))


def _named(kind: Kind) -> str:
    return kind if kind.endswith("paths") else f"a {kind}"


def _usual(cell: Cell) -> str:
    return f"use verifier {DEFAULT[cell.kind]!r}"


def _working(cell: Cell) -> str:
    """The verifiers that keep the law on drafts of this kind, with any other parts."""
    names = [
        repr(name)
        for name, make in verifiers().items()
        if cell.kind in make.kinds and not (make.needs_one_length or make.needs_pure_rows)
    ]
    return f"use verifier {' or '.join(names)}"
