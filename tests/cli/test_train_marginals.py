"""`outrider train blockwise` and `parallel`: from a target and a corpus to a head that drafts."""

import json

import pytest

import outrider
from outrider import catalog
from tests.cli.runs import run
from tests.cli.test_train import FEW, pair  # noqa: F401 (a fixture)
from tests.cli.test_train_heads import without_drafter

GREEDY = outrider.Sampling(temperature=0)


def test_blockwise_heads_draft_raw_with_a_rescorer_and_by_paths(monkeypatch, capsys, tmp_path, pair) -> None:  # noqa: F811
    more = ("--one-head", "--ngram-least", "1", "--tree-nodes", "5", "--intermediate-size", "12")
    status, out, err = run(monkeypatch, capsys, "train", "blockwise", *without_drafter(pair), *FEW, *more, "--json")
    assert status == 0, err
    record = json.loads(out)
    place, target = str(tmp_path / "out"), str(tmp_path / "target")
    assert catalog.name_of(catalog.make("drafter", place)) == "blockwise"
    refined = {
        place: record["tree"],
        f"blockwise:path={place},rescorer={tmp_path / 'draft'},lam=0.3": "chain",
        f"blockwise:path={place},paths=4": "dynamic:width=4,num_nodes=8",
    }
    for drafter, tree in refined.items():
        engine = outrider.load(target, drafter=drafter, tree=tree, length="fixed:2")
        [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY)
        assert made.num_draft_tokens > 0
        assert made.tokens == engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY)[0].tokens


@pytest.mark.parametrize("more", [(), ("--form", "medusa", "--slots", "3", "--num-groups", "2", "--layers", "2")])
def test_a_parallel_head_drafts(monkeypatch, capsys, tmp_path, pair, more) -> None:  # noqa: F811
    status, _, err = run(monkeypatch, capsys, "train", "parallel", *without_drafter(pair), *FEW, *more, "--json")
    assert status == 0, err
    place = str(tmp_path / "out")
    assert catalog.name_of(catalog.make("drafter", place)) == "parallel"
    engine = outrider.load(str(tmp_path / "target"), drafter=place, length="fixed:4")
    assert engine.parts.drafter.max_depth == (4 if more else 2)
    [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY)
    assert made.num_draft_tokens > 0
    assert made.tokens == engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY)[0].tokens


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("blockwise", ("--ngram-order", "7"), "must be in 1..4, got 7"),
        ("blockwise", ("--begin", "/nowhere"), "there is no head in /nowhere"),
        ("parallel", ("--form", "dflash"), "unknown form 'dflash'"),
        ("parallel", ("--slots", "-1"), "must have >= 0 mask slots, got -1"),
        ("parallel", ("--depth", "3", "--slots", "1"), "so a depth of 3 cannot be watched"),
    ],
)
def test_wrong_options_get_one_sentence(monkeypatch, capsys, tmp_path, pair, kind, wrong, message) -> None:  # noqa: F811
    status, _, err = run(monkeypatch, capsys, "train", kind, *without_drafter(pair), *FEW, *wrong)
    assert status == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out" / "config.json").exists()
