"""The law of blockwise heads whose drafts are refined: on tables, and whole runs over real models."""

import pytest

from outrider import catalog
from outrider.drafters.protocol import Drafter
from outrider.lm.open import as_lm
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from tests.proof.tiny_runs import BOUND, SLOTS, assert_lossless, drafter, engine, pair, tiny, walk
from tests.world.models import target
from tests.world.own_heads import rescored, with_paths
from tests.world.tables import tables
from tests.world.verifiers import verifier

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

CELLS = [
    ("rescored", "block", "chain"),
    ("paths", "block", "chain"),
    ("paths", "match", "dynamic:width=2,num_nodes=4"),
    ("paths", "recursive", "gumbel:branching=2x1"),
]


def refined(kind: str, around: TargetInfo, vocab: int) -> Drafter:
    if kind == "rescored":
        return rescored(around, drafter("llama", vocab), top_k=2)
    return with_paths(around, paths=2, top_k=2)


@pytest.mark.parametrize(("kind", "rule", "tree"), CELLS)
def test_the_gate_enumerates_a_refined_draft(kind, rule, tree):
    made = refined(kind, TargetInfo.of(target(1), None), 64).on_tables(2, seed=1)
    assert law_error(tables(2, verifier(rule), drafter=made, tree=catalog.make("tree", tree))) < BOUND


@pytest.mark.parametrize(("kind", "rule", "tree"), CELLS)
def test_whole_runs_over_a_real_model_keep_the_law(kind, rule, tree):
    lm = as_lm(tiny("llama", 3), max_slots=SLOTS)
    assert_lossless(walk(engine(lm, refined(kind, TargetInfo.of(lm, None), 3), rule, tree), most=3))


@pytest.mark.parametrize("kind", ["rescored", "paths"])
def test_two_requests_of_a_batch_keep_the_law_together(kind):
    lm = as_lm(tiny("llama", 2), max_slots=SLOTS)
    made = engine(lm, refined(kind, TargetInfo.of(lm, None), 2))
    assert pair(made, [(1, 0, 1, 1, 0), (0, 1)], most=3).error < BOUND
