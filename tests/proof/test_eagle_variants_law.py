"""The law of PosS, GRIFFIN and Jakiro in whole runs over a real model. The law of all heads on tables is in
test_head_law.
"""

from functools import partial
from pathlib import Path

import pytest

from outrider import catalog
from outrider.lengths.fixed import FixedLength
from outrider.lm.open import as_lm
from outrider.lm.target_info import TargetInfo
from tests.proof.tiny_runs import BOUND, SLOTS, assert_lossless, engine, pair, tiny, walk
from tests.world.published_eagle_variants import griffin, jakiro, poss

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
HEADS = {
    "poss": partial(poss, count=2),
    "griffin": griffin,
    "jakiro": jakiro,
    "jakiro, by the gate": partial(jakiro, mixture="gate"),
    "jakiro, by halves": partial(jakiro, mixture="half"),
}


def over_a_llama(folder: Path, kind: str, rule: str = "block", tree: str = "chain", depth: int = 2):
    lm = as_lm(tiny("llama", 2), max_slots=SLOTS)
    known = TargetInfo.of(lm, None)
    HEADS[kind](folder, known)
    drafter = catalog.make("drafter", f"{kind.split(',')[0]}:path={folder}").bind(known)
    return engine(lm, drafter, rule, tree, length=FixedLength(num_speculative_tokens=depth))


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
    ],
)
def test_whole_runs_over_a_real_model_keep_the_law(tmp_path, kind, rule, tree, depth):
    assert_lossless(walk(over_a_llama(tmp_path, kind, rule, tree, depth), most=4))


@pytest.mark.parametrize("kind", ["poss", "jakiro, by the gate"])
def test_two_requests_of_a_batch_keep_the_law_together(tmp_path, kind):
    assert pair(over_a_llama(tmp_path, kind), [(1, 0, 1, 1, 0), (0, 1)], most=3).error < BOUND


def test_a_lossy_rule_behind_the_deepest_guesses_is_caught(tmp_path):
    assert walk(over_a_llama(tmp_path, "jakiro", "lenient"), most=4).error > 1e-4
