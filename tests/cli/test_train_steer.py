"""`outrider train steer`: from a pair and a corpus to a steered drafter."""

import json

import pytest

import outrider
from outrider.drafters.steering import read_steering
from tests.cli.runs import run
from tests.cli.test_train import FEW, pair  # noqa: F401 (a fixture)


@pytest.mark.parametrize("more", [(), ("--rank", "2", "--frozen", "--positions", "gaps", "--taps", "3x1")])
def test_one_command_trains_a_steered_drafter(monkeypatch, capsys, tmp_path, pair, more) -> None:  # noqa: F811
    status, out, err = run(monkeypatch, capsys, "train", "steer", *pair, *FEW, *more, "--json")
    assert status == 0, err
    assert json.loads(out)["after"]["block_efficiency"] >= 1
    config = read_steering(str(tmp_path / "out")).config
    assert (config.rank, config.taps) == ((2, (3, 1)) if more else (None, (2, 1)))
    for name in ("steered", "model"):
        engine = outrider.load(str(tmp_path / "target"), drafter=f"{name}:path={tmp_path / 'out'}")
        [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=outrider.Sampling(temperature=0))
        assert made.num_draft_tokens > 0
        [plain] = engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=outrider.Sampling(temperature=0))
        assert made.tokens == plain.tokens


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--taps", "3,1"), "taps must be numbers with x between them"),
        (("--taps", "99"), "taps must be in 0..3"),
        (("--rank", "0"), "rank must be >= 1"),
        (("--positions", "gap"), "use plain, padding or gaps"),
        (("--divergence", "kl"), "unknown divergence"),
    ],
)
def test_wrong_options_get_one_sentence(monkeypatch, capsys, tmp_path, pair, wrong, message) -> None:  # noqa: F811
    status, _, err = run(monkeypatch, capsys, "train", "steer", *pair, *FEW, *wrong)
    assert status == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out" / "model.safetensors").exists()
