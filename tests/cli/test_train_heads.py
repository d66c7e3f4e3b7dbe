"""`outrider train medusa` and its kin: from a target and a corpus to a head that drafts."""

import json

import pytest

import outrider
from outrider import catalog
from outrider.heads.medusa import read_medusa
from tests.cli.runs import run
from tests.cli.test_train import FEW, pair  # noqa: F401 (a fixture)

MORE: dict[str, tuple[str, ...]] = {
    "medusa": ("--draft-vocab", "20", "--tree-nodes", "5", "--capture", "--slot-balanced"),
    "eagle": ("--unrolled", "2", "--bias", "--noise", "0", "--regression", "0"),
    "eagle3": ("--draft-vocab", "20", "--taps", "0x1x3", "--unrolled", "3", "--fc-norm", "--norm-output"),
}
"""Other options than the usual ones, for each head."""


def without_drafter(pair: tuple[str, ...]) -> tuple[str, ...]:  # noqa: F811
    at = pair.index("--drafter")
    return (*pair[:at], *pair[at + 2 :])


@pytest.mark.parametrize(("kind", "more"), [*MORE.items(), ("eagle3", ())])
def test_one_command_trains_a_head(monkeypatch, capsys, tmp_path, pair, kind, more) -> None:  # noqa: F811
    options = (*without_drafter(pair), *FEW, *more)
    status, out, err = run(monkeypatch, capsys, "train", kind, *options, "--json")
    assert status == 0, err
    record = json.loads(out)
    assert record["after"]["block_efficiency"] >= 1
    place = str(tmp_path / "out")
    assert catalog.name_of(catalog.make("drafter", place)) == kind
    tree = record.get("tree", "chain")
    engine = outrider.load(str(tmp_path / "target"), drafter=place, tree=tree, length="fixed:2")
    greedy = outrider.Sampling(temperature=0)
    [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)
    assert made.num_draft_tokens > 0
    [plain] = engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)
    assert made.tokens == plain.tokens


def test_medusa_heads_are_as_many_as_the_depth_and_come_with_a_tree(monkeypatch, capsys, tmp_path, pair) -> None:  # noqa: F811
    options = (*without_drafter(pair), *FEW, "--layers", "2", "--shared", "--regenerate")
    status, _, err = run(monkeypatch, capsys, "train", "medusa", *options)
    assert status == 0, err
    assert "tree: fixed:children=" in err
    config = read_medusa(str(tmp_path / "out")).config
    assert (config.num_heads, config.num_hidden_layers, config.original_lm_head) == (2, 2, True)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--divergence", "kl"), "unknown divergence"),
        (("--decay", "0"), "decay must be > 0"),
        (("--draft-vocab", "999"), "the draft vocabulary must have 1..64 tokens, got 999"),
        (("--begin", "/nowhere"), "there is no head in /nowhere"),
        (("--watch-temperature", "2"), "watch_temperature must be 1 or 0, got 2"),
        (("--held-out", "/nowhere"), "/nowhere"),
    ],
)
@pytest.mark.parametrize("kind", MORE)
def test_wrong_options_get_one_sentence(monkeypatch, capsys, tmp_path, pair, kind, wrong, message) -> None:  # noqa: F811
    if kind == "eagle" and "--draft-vocab" in wrong:
        message = "an EAGLE-1 head guesses with the target's own output layer"
    status, _, err = run(monkeypatch, capsys, "train", kind, *without_drafter(pair), *FEW, *wrong)
    assert status == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out" / "config.json").exists()
