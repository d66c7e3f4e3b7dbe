"""The traits of a verifier: the kinds of draft that it verifies, and what it needs from the other parts."""

from typing import ClassVar, Literal, get_args

from outrider.core.types import Structure

Kind = Literal[
    "sampled chain",
    "chosen chain",
    "iid paths",
    "deduplicated iid paths",
    "tree drawn without replacement",
    "top n-1 and one draw",
    "chosen tree",
    "union of chains",
]
"""The kinds of draft: how the children were made."""

KINDS: dict[Structure, Kind] = {
    "iid": "iid paths",
    "iid_dedup": "deduplicated iid paths",
    "without_replacement": "tree drawn without replacement",
    "top_plus_one": "top n-1 and one draw",
    "deterministic": "chosen tree",
    "union": "union of chains",
}
"""The kind of draft for each structure of a branching tree."""

CHAINS: frozenset[Kind] = frozenset({"sampled chain", "chosen chain"})
EVERY: frozenset[Kind] = frozenset(get_args(Kind))


class StatedVerifier:
    """The base of verifiers, with their traits.

    The refusal matrix, the docs and the tests read these. A subclass sets `kinds`, and the other traits where they
    differ. A verifier that carries something from step to step has `verify_carrying`.

    Attributes:
        kinds: The kinds of draft for which the verifier keeps the target's law; for a lossy verifier, the kinds that it
            can verify. A verifier with no kinds is refused.
        lossy: Whether the output's law differs from the target's.
        needs_one_length: Whether it keeps the law only if all drafts have the same length.
        needs_pure_rows: Whether it keeps the law only if the draft's rows depend on the tokens alone.
        takes_likeliest: Whether at temperature 0 it accepts the path of the likeliest tokens of a chosen draft, and
            nothing else. Then it is not asked.
        shares_noise: Whether the draft's and the target's token at a position are drawn with the same noise. Then steps
            throw `CoupledDice`.
    """

    kinds: ClassVar[frozenset[Kind]] = frozenset()
    lossy: ClassVar[bool] = False
    needs_one_length: ClassVar[bool] = False
    needs_pure_rows: ClassVar[bool] = False
    takes_likeliest: ClassVar[bool] = False
    shares_noise: ClassVar[bool] = False
