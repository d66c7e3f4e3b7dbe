"""The parts of a decoder, of which a test says what it is about."""

from outrider import catalog
from outrider.decoding.protocol import Decoding, Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.protocol import Drafter
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength
from outrider.lengths.protocol import LengthPolicy
from outrider.lm.protocol import LM
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier


def parts_of(
    target: LM,
    drafter: Drafter,
    *,
    tree: str | Tree = "chain",
    verifier: str | Verifier = "token",
    length: int | LengthPolicy = 3,
    decoding: Decoding | None = None,
    experience: Experience | None = None,
) -> Parts:
    """Parts that draft chains of three tokens and verify each token by itself, if nothing else is said.

    Args:
        tree: A tree, or its text in the catalog.
        verifier: A verifier, or its text in the catalog.
        length: How long to draft, if a number.
    """
    return Parts(
        target=target,
        drafter=drafter,
        tree=catalog.make("tree", tree) if isinstance(tree, str) else tree,
        verifier=catalog.make("verifier", verifier) if isinstance(verifier, str) else verifier,
        length=FixedLength(num_speculative_tokens=length) if isinstance(length, int) else length,
        decoding=decoding or StepDecoding(),
        experience=experience or Experience(),
    )
