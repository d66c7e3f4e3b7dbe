"""The law of drafters that guess blocks: lattices on tables, and whole runs over real models. The law of all heads on
tables is in test_head_law.
"""

import pytest

from outrider import catalog
from outrider.heads.dflash2 import DFlash2Sizes
from outrider.lm.open import as_lm
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from tests.proof.tiny_runs import BOUND, SLOTS, assert_lossless, engine, pair, tiny, walk
from tests.world.block_heads import BLOCKS, block_drafter
from tests.world.models import target
from tests.world.tables import tables

pytestmark = pytest.mark.usefixtures("float64_stays_float64")


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_gate_enumerates_lattices(kind):
    drafter = block_drafter(kind, TargetInfo.of(target(1), None)).on_tables(3, seed=1)
    tree = catalog.make("tree", "lattice:num_nodes=4")
    assert law_error(tables(3, catalog.make("verifier", "match"), drafter=drafter, tree=tree)) < 1e-12


def over_a_llama(kind: str, rule: str = "block", tree: str = "chain", **more: object):
    lm = as_lm(tiny("llama", 2), max_slots=SLOTS)
    return engine(lm, block_drafter(kind, TargetInfo.of(lm, None), **more), rule, tree)


@pytest.mark.parametrize(
    ("kind", "rule", "tree"),
    [
        ("dflash", "block", "chain"),
        ("dflash", "match", "lattice:num_nodes=4"),
        ("dflare", "token", "chain"),
        ("dspark", "block", "chain"),
        ("dspark", "recursive", "gumbel:branching=2x1"),
        ("jetspec", "recursive", "iid:num_paths=2"),
        ("domino", "block", "chain"),
        ("dflash2", "recursive", "gumbel:branching=2x1"),
    ],
)
def test_whole_runs_over_a_real_model_keep_the_law(kind, rule, tree):
    assert_lossless(walk(over_a_llama(kind, rule, tree), most=4))


def test_a_choice_among_fewer_tokens_than_there_are_keeps_the_law():
    own = DFlash2Sizes(group=8, rank=4, top_k=1)
    assert_lossless(walk(over_a_llama("dflash2", own=own), most=4))


def test_windows_that_are_passed_within_a_run_keep_the_law():
    assert_lossless(walk(over_a_llama("dflash", windows=True), (1, 0, 1, 1, 0), most=4))


@pytest.mark.parametrize("kind", BLOCKS)
def test_two_requests_of_a_batch_keep_the_law_together(kind):
    assert pair(over_a_llama(kind), [(1, 0, 1, 1, 0), (0, 1)], most=3).error < BOUND
