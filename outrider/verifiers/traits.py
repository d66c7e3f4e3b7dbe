"""What a verifier says of itself: which kinds of draft it judges, and what it needs of the other parts."""

from typing import ClassVar, Literal, get_args

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
"""What each way of making several children is to a verifier."""

CHAINS: frozenset[Kind] = frozenset({"sampled chain", "chosen chain"})
EVERY: frozenset[Kind] = frozenset(get_args(Kind))


class StatedVerifier:
    """The base of verifiers that say what they are for. The refusal matrix, the docs and the tests read it.

    A subclass sets `kinds`, and each of the others that does not hold for it. A verifier that carries something from
    step to step says so by having `verify_carrying`.

    Attributes:
        kinds: The kinds of draft for which the verifier keeps the target's law; of a lossy verifier, the kinds that it
            can judge. Empty says nothing, and the verifier is refused.
        lossy: Whether the output has another law than the target's.
        needs_one_length: Whether it keeps the law only where all drafts are equally long.
        needs_pure_rows: Whether it keeps the law only where the draft's rows depend on the tokens alone.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset()
    lossy: ClassVar[bool] = False
    needs_one_length: ClassVar[bool] = False
    needs_pure_rows: ClassVar[bool] = False
