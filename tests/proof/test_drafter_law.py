"""The law of drafters of the catalog: those of PosS, GRIFFIN and Jakiro, those that guess blocks, and blockwise heads
whose drafts are refined. Whole runs over real models, and what test_head_law leaves to tables.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from outrider import catalog
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.heads.dflash2 import DFlash2Sizes
from outrider.lengths.fixed import FixedLength
from outrider.lm.open import as_lm
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from tests.proof.tiny_runs import BOUND, SLOTS, assert_lossless, drafter, engine, pair, tiny, walk
from tests.world.block_heads import BLOCKS, block_drafter
from tests.world.models import target
from tests.world.own_heads import rescored, with_paths
from tests.world.published_eagle_variants import griffin, jakiro, poss
from tests.world.tables import tables
from tests.world.verifiers import verifier

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
PUBLISHED: dict[str, Callable[[Path, TargetInfo], object]] = {
    "poss": partial(poss, count=2),
    "griffin": griffin,
    "jakiro": jakiro,
    "jakiro, by the gate": partial(jakiro, mixture="gate"),
    "jakiro, by halves": partial(jakiro, mixture="half"),
}
BLOCK_OPTIONS: dict[str, dict[str, object]] = {
    "dflash2, among few": {"extra": DFlash2Sizes(group=8, rank=4, top_k=1)},
    "dflash, in windows": {"windows": True},
}
REFINED = [
    ("rescored", "block", "chain"),
    ("paths", "block", "chain"),
    ("paths", "match", "dynamic:width=2,num_nodes=4"),
    ("paths", "recursive", "gumbel:branching=2x1"),
]


def refined(kind: str, around: TargetInfo, vocab: int) -> Drafter:
    if kind == "rescored":
        return rescored(around, drafter("llama", vocab), top_k=2)
    return with_paths(around, paths=2, top_k=2)


def over_a_llama(
    folder: Path, kind: str, rule: str = "block", tree: str = "chain", depth: int = 2, vocab: int = 2
) -> Engine:
    lm = as_lm(tiny("llama", vocab), max_slots=SLOTS)
    known, method = TargetInfo.of(lm, None), kind.split(",")[0]
    if kind in PUBLISHED:
        PUBLISHED[kind](folder, known)
        guesser = catalog.make("drafter", f"{method}:path={folder}").bind(known)
    elif method in BLOCKS:
        guesser = block_drafter(method, known, **BLOCK_OPTIONS.get(kind, {}))
    else:
        guesser = refined(kind, known, vocab)
    return engine(lm, guesser, rule, tree, length=FixedLength(num_speculative_tokens=depth))


@pytest.mark.parametrize(
    ("kind", "rule", "tree", "depth"),
    [
        ("poss", "block", "chain", 2),
        ("poss", "recursive", "gumbel:branching=2x1", 2),
        ("griffin", "token", "chain", 2),
        ("jakiro", "block", "chain", 2),
        ("jakiro", "token", "chain", 3),
        ("jakiro", "match", "dynamic:width=2,num_nodes=4", 2),
        ("jakiro, by the gate", "recursive", "gumbel:branching=2x1", 2),
        ("jakiro, by the gate", "traversal", "gumbel:branching=2x1", 2),
        ("jakiro, by halves", "block", "chain", 2),
        ("dflash", "block", "chain", 2),
        ("dflash", "match", "lattice:num_nodes=4", 2),
        ("dflare", "token", "chain", 2),
        ("dspark", "block", "chain", 2),
        ("dspark", "recursive", "gumbel:branching=2x1", 2),
        ("jetspec", "recursive", "iid:num_paths=2", 2),
        ("domino", "block", "chain", 2),
        ("domino", "match", "dynamic:width=2,num_nodes=4", 2),
        ("dflash2", "recursive", "gumbel:branching=2x1", 2),
        ("dflash2, among few", "block", "chain", 2),
        ("xpress", "block", "chain", 3),
        ("xpress", "recursive", "gumbel:branching=2x1", 2),
        ("xpress", "match", "dynamic:width=2,num_nodes=4", 2),
    ],
)
def test_whole_runs_over_a_real_model_keep_the_law(tmp_path, kind, rule, tree, depth):
    assert_lossless(walk(over_a_llama(tmp_path, kind, rule, tree, depth), most=4))


@pytest.mark.parametrize(("kind", "rule", "tree"), REFINED)
def test_whole_runs_of_refined_drafts_over_three_tokens_keep_the_law(tmp_path, kind, rule, tree):
    assert_lossless(walk(over_a_llama(tmp_path, kind, rule, tree, vocab=3), most=3))


def test_windows_that_are_passed_within_a_run_keep_the_law(tmp_path):
    assert_lossless(walk(over_a_llama(tmp_path, "dflash, in windows"), (1, 0, 1, 1, 0), most=4))


@pytest.mark.parametrize("kind", ["poss", "jakiro, by the gate", *BLOCKS, "rescored", "paths"])
def test_two_requests_of_a_batch_keep_the_law_together(tmp_path, kind):
    assert pair(over_a_llama(tmp_path, kind), [(1, 0, 1, 1, 0), (0, 1)], most=3).error < BOUND


def test_a_lossy_rule_behind_the_deepest_guesses_is_caught(tmp_path):
    assert walk(over_a_llama(tmp_path, "jakiro", "lenient"), most=4).error > 1e-4


@pytest.mark.parametrize(("kind", "rule", "tree"), REFINED)
def test_the_gate_enumerates_a_refined_draft(kind, rule, tree):
    made = refined(kind, TargetInfo.of(target(1), None), 64).on_tables(2, seed=1)
    assert law_error(tables(2, verifier(rule), drafter=made, tree=catalog.make("tree", tree))) < BOUND


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_gate_enumerates_lattices(kind):
    made = block_drafter(kind, TargetInfo.of(target(1), None)).on_tables(3, seed=1)
    tree = catalog.make("tree", "lattice:num_nodes=4")
    assert law_error(tables(3, catalog.make("verifier", "match"), drafter=made, tree=tree)) < 1e-12
