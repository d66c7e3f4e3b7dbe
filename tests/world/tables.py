"""Decoders over random tables, whose law can be enumerated."""

import numpy as np

from outrider.decoding.protocol import Decoding, Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Drafter
from outrider.lengths.protocol import LengthPolicy
from outrider.lm.protocol import LM
from outrider.lm.tabular import Row, TabularLM, random_rows
from outrider.trees.chain import ChainTree
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier
from tests.world.parts import parts_of


def tables(
    vocab: int,
    verifier: Verifier,
    length: LengthPolicy | int = 2,
    seed: int = 0,
    *,
    target: LM | None = None,
    drafter: Drafter | None = None,
    tree: Tree | None = None,
    decoding: Decoding | None = None,
) -> Parts:
    """Random tables for target and draft model, in which every prefix has a row of its own.

    Args:
        length: How long to draft, if a number.
    """
    return parts_of(
        target or TabularLM(random_rows(vocab, seed), vocab),
        drafter or ModelDrafter(lm=TabularLM(random_rows(vocab, seed + 100), vocab)),
        tree=tree or ChainTree(),
        verifier=verifier,
        length=length,
        decoding=decoding or StepDecoding(),
    )


def with_rows(
    target: Row, draft: Row, vocab: int, verifier: Verifier, length: int = 2, tree: Tree | None = None
) -> Parts:
    """These tables for target and draft model."""
    drafter = ModelDrafter(lm=TabularLM(draft, vocab))
    return tables(vocab, verifier, length, target=TabularLM(target, vocab), drafter=drafter, tree=tree)


def toy(verifier: Verifier) -> Parts:
    """Two tokens and two rows, in papers an example: block verification accepts 11/9 tokens where token does 10/9."""
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    return with_rows(lambda _: p, lambda _: q, 2, verifier)
