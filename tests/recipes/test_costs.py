"""The cost recipes at tiny sizes: every case is timed, files are whole, and figures are those computed by hand."""

import json

import numpy as np
import pytest
import torch

from outrider import Sampling
from recipes import tree_cost, verify_cost


def test_verifying_is_timed_for_every_known_case(tmp_path):
    entries = verify_cost.run(
        tmp_path, vocab=64, hidden=64, layers=1, nodes=8, context=4, batches=(1, 2), rounds=2, depth=2, threads=1
    )
    cases = {(c.verifier, c.tree) for c in verify_cost.known_cases()}
    assert {"token", "block", "match"} <= {verifier for verifier, _ in cases}
    assert {(e["verifier"], e["tree"]) for e in entries} == cases
    assert len(entries) == len(cases) * 2 * 2 * 2
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == verify_cost.count_timings(2, 2)
    assert (tmp_path / "table.md").read_text().count("| token | chain |") == 8
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("case", verify_cost.known_cases(), ids=lambda case: f"{case.verifier}-{case.tree}")
def test_drafts_are_what_a_guesser_near_the_target_grows(case):
    near = verify_cost.Near(logits=verify_cost.target_logits("peaked", 3 * 64, 64).view(3, 64, 64))
    draft = verify_cost.draft_of(near, case.tree, min(case.depth, 4), Sampling(temperature=0.8))
    logits = near.of(draft)
    assert draft.num_requests == 3
    assert logits.shape == (len(draft.tokens), 64)
    assert torch.equal(logits[draft.offsets[:-1]], near.logits[:, 0])
    assert int(draft.depths.max()) == min(case.depth, 4)


def test_a_share_is_of_the_forward_of_its_own_round():
    rows = []
    for round_, forward in enumerate((1.0, 2.0, 4.0)):
        place = {"requests": 1, "kind": "random", "sampling": "T", "round": round_}
        ours = {"verifier": "token", "tree": "chain", "nodes": 4, "accepted": 1}
        rows += [
            place | ours | {"rows_seconds": forward / 10, "verify_seconds": forward / 10},
            place | {"forward_seconds": forward},
        ]
    [entry] = verify_cost.summarise(rows)
    assert (entry["share"]["median"], entry["share"]["high"]) == pytest.approx((0.2, 0.2))
    assert entry["forward_seconds"]["median"] == 2


def test_trees_are_timed_against_bare_forwards(tmp_path):
    model = tree_cost.random_llama(hidden=32, layers=1, heads=4, kv_heads=2, vocab=64, context=64)
    entries = tree_cost.run(tmp_path, {"tiny": model}, contexts=(8,), sizes=(1, 3), rounds=2, threads=1)
    assert [(e["nodes"], e["tree"]) for e in entries] == [(n, t) for n in (1, 3) for t in tree_cost.TREES]
    lines = (tmp_path / "rows.jsonl").read_text().splitlines()
    assert len(lines) == 2 * 2 * (len(tree_cost.TREES) + 2)
    assert all(json.loads(line)["seconds"] > 0 for line in lines)
    assert "| tiny | 8 | 3 |" in (tmp_path / "table.md").read_text()
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert not list(tmp_path.glob("*.new"))


def test_the_faster_bare_way_is_compared_with():
    seconds = {"bare, no mask": [2.0, 2.0, 2.0], "bare, causal mask": [1.0, 1.0, 4.0]}
    seconds |= {"chain": [1.0, 1.0, 4.0], "binary": [1.2, 1.2, 9.9], "random": [2.0, 2.0, 2.0]}
    rows = [
        {"model": "m", "context": 1, "nodes": 32, "way": way, "round": i, "seconds": s}
        for way, each in seconds.items()
        for i, s in enumerate(each)
    ]
    entries = {e["tree"]: e for e in tree_cost.summarise(rows)}
    assert entries["binary"]["bare"] == "bare, causal mask"
    assert [entries[t]["ratio"]["median"] for t in tree_cost.TREES] == pytest.approx([1.0, 1.2, 2.0])


def test_parents_come_before_their_children():
    for tree in ("binary", "random"):
        parents = tree_cost.parents_of(tree, 64)
        assert parents[0] == -1
        assert (parents[1:] >= 0).all()
        assert (parents[1:] < np.arange(1, 64)).all()
    assert tree_cost.parents_of("chain", 64) is None
