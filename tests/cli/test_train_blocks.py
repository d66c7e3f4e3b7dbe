"""`outrider train dflash` and its kin: sizes and options of their own. What all heads share is in test_train_heads."""

import json

import pytest

import outrider
from outrider import catalog
from outrider.lm.hf.checkpoint import read_config
from tests.cli.runs import run
from tests.cli.test_train import FEW, pair  # noqa: F401 (a fixture)
from tests.cli.test_train_heads import without_drafter

SMALL = ("--layers", "1", "--block-size", "4")
MORE = {
    "dflash": ("--taps", "2x1", "--divergence", "ce", "--weighting", "survival", "--mask-token-id", "3"),
    "dflare": ("--gamma", "2", "--num-anchors", "3", "--regenerate"),
    "dspark": ("--markov", "rnn", "--markov-rank", "5", "--divergence", "tvd", "--hard", "0.05"),
}


@pytest.mark.parametrize("kind", MORE)
def test_one_command_trains_a_head_and_trains_it_on(monkeypatch, capsys, tmp_path, pair, kind) -> None:  # noqa: F811
    options = (*without_drafter(pair), *FEW, *SMALL, *MORE[kind], "--json")
    status, out, err = run(monkeypatch, capsys, "train", kind, *options)
    assert status == 0, err
    assert json.loads(out)["after"]["block_efficiency"] >= 1
    place = str(tmp_path / "out")
    config = read_config(place)
    assert (config["speculators_model_type"], config["block_size"]) == (kind, 4)
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(tmp_path / "target")
    if kind == "dflash":
        assert (config["aux_hidden_state_layer_ids"], config["mask_token_id"]) == ([2, 1], 3)
    if kind == "dspark":
        assert (config["markov_head_type"], config["markov_rank"]) == ("rnn", 5)
    assert catalog.name_of(catalog.make("drafter", place)) == kind
    engine = outrider.load(str(tmp_path / "target"), drafter=f"{kind}:path={place}", tree="lattice", length="fixed:3")
    greedy = outrider.Sampling(temperature=0)
    [made] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)
    assert made.num_draft_tokens > 0
    [plain] = engine.plain().generate([[5, 6, 7]], max_new_tokens=8, sampling=greedy)
    assert made.tokens == plain.tokens
    if kind != "dspark":
        return
    further = tuple(each.replace(place, str(tmp_path / "further")) for each in options)
    status, out, err = run(monkeypatch, capsys, "train", kind, *further, "--begin", place)
    assert status == 0, err
    assert read_config(str(tmp_path / "further"))["block_size"] == 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (("--taps", "3,1"), "taps must be numbers with x between them"),
        (("--taps", "9"), "taps must be in 0..3"),
        (("--block-size", "2"), "guesses 1 tokens, and --depth is 2; give a smaller --depth or a larger --block-size"),
        (("--layers", "0"), "the head must have a layer"),
        (("--gamma", "0"), "gamma must be > 0"),
        (("--weighting", "all"), "weighting must be decay or survival"),
        (("--hard", "2"), "hard must be in 0..1"),
        (("--num-anchors", "0"), "num_anchors must be >= 1"),
        (("--mask-token-id", "999"), "mask_token_id must be in 0..63"),
        (("--divergence", "kl"), "unknown divergence"),
        (("--begin", "/nowhere"), "there is no head in /nowhere"),
        (("--draft-vocab", "5"), "No such option"),
    ],
)
def test_wrong_options_get_one_sentence(monkeypatch, capsys, tmp_path, pair, wrong, message) -> None:  # noqa: F811
    status, _, err = run(monkeypatch, capsys, "train", "dflash", *without_drafter(pair), *FEW, *wrong)
    assert status == 2
    assert message in " ".join(err.split())
    assert not (tmp_path / "out" / "config.json").exists()
