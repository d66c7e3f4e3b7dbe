"""`outrider train poss` and its kin: options of their own. What all heads share is in test_train_heads."""

import json

import pytest

import outrider
from outrider import catalog
from outrider.lm.hf.checkpoint import read_config
from tests.cli.runs import run
from tests.cli.test_train import FEW, pair  # noqa: F401 (a fixture)
from tests.cli.test_train_heads import without_drafter

MORE: dict[str, tuple[str, ...]] = {
    "poss": (
        "--trunk",
        "eagle3",
        "--taps",
        "0x1x3",
        "--stride",
        "2",
        "--unrolled",
        "4",
        "--draft-vocab",
        "20",
        "--fc-norm",
    ),
    "griffin": ("--unrolled", "2", "--bias", "--align-shift", "0", "--likeliest", "5"),
    "jakiro": ("--expert-size", "12", "--mixture", "gate", "--contrast", "1"),
}


@pytest.mark.parametrize(("kind", "more"), MORE.items())
def test_one_command_trains_a_head(monkeypatch, capsys, tmp_path, pair, kind, more) -> None:  # noqa: F811
    status, out, err = run(monkeypatch, capsys, "train", kind, *without_drafter(pair), *FEW, *more, "--json")
    assert status == 0, err
    assert json.loads(out)["after"]["block_efficiency"] >= 1
    place = str(tmp_path / "out")
    assert catalog.name_of(catalog.make("drafter", place)) == kind
    assert read_config(place)["outrider_head"] == kind
    engine = outrider.load(str(tmp_path / "target"), drafter=place, length="fixed:3")
    greedy = outrider.Sampling(temperature=0)
    [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)
    assert made.num_draft_tokens > 0
    [plain] = engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)
    assert made.tokens == plain.tokens


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        ("poss", ("--trunk", "medusa"), "trunk must be eagle or eagle3"),
        ("poss", ("--taps", "low"), "taps must be numbers with x between them"),
        ("poss", ("--norm-output",), "are for trunk eagle3"),
        ("poss", ("--draft-vocab", "20"), "guesses with the target's own output layer"),
        ("griffin", ("--draft-vocab", "20"), "guesses with the target's own output layer"),
        ("griffin", ("--align-shift", "3"), "align_shift must be 1"),
        ("jakiro", ("--mixture", "both"), "mixture must be one of"),
    ],
)
def test_wrong_options_get_one_sentence(monkeypatch, capsys, tmp_path, pair, kind, wrong, message) -> None:  # noqa: F811
    status, _, err = run(monkeypatch, capsys, "train", kind, *without_drafter(pair), *FEW, *wrong)
    assert status == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out" / "config.json").exists()
