"""`outrider generate --learn`."""

import json
import re

import pytest

from outrider.cli.learn import summary
from outrider.core.types import Sampling
from outrider.training.online.learning import Learning
from tests.cli.runs import done, refused, run
from tests.world.models import engine
from tests.world.tokenizers import byte_level
from tests.world.zoo import tiny

PROMPTS = ["--prompt", "Once upon a time", "--prompt", "One day", "-n", "2", "--max-new-tokens", "12"]
GREEDY = [*PROMPTS, "--length", "fixed:4", "--temperature", "0", "--max-slots", "1", "--json"]


def test_learning_reports_both_ends_of_the_stream_and_changes_no_greedy_output(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "kept"
    learnt = ["--learn", "--learn-interval", "1", "--learn-rate", "1e-3", "--learn-snapshots", str(folder)]
    status, out, err = run(monkeypatch, capsys, "generate", *GREEDY, *learnt)
    assert status == 0, err
    found = re.search(r"learnt in (\d) optimizer steps from 4 outputs: \d+% of draft tokens accepted", err)
    assert found is not None, err
    plain = done(monkeypatch, capsys, "generate", *GREEDY)
    assert [json.loads(line)["tokens"] for line in out.splitlines()] == [
        json.loads(line)["tokens"] for line in plain.splitlines()
    ]
    last = folder / f"step-{int(found[1]):06d}"
    assert len(done(monkeypatch, capsys, "generate", *GREEDY, "--drafter", f"model:path={last}").splitlines()) == 4


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_a_draft_model_with_another_vocabulary_is_refused_before_any_weights_are_read(
    monkeypatch, capsys, tmp_path, command
):
    # The folders have tokenizers and no weights.
    for name, tokenizer in (("target", byte_level(300)), ("draft", byte_level(280))):
        tiny("llama").config.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    given = ("--target", str(tmp_path / "target"), "--drafter", f"model:path={tmp_path / 'draft'}", "--learn")
    prompt = ("--prompt", "Once") if command == "generate" else ("--allow-no-key",)
    status, _, err = run(monkeypatch, capsys, command, *given, *prompt)
    assert (status, "this draft model has another vocabulary than the target" in err) == (2, True), err


def test_no_acceptance_is_reported_where_nothing_was_drafted():
    learning = Learning(engine("model"))
    one, other = (
        engine(drafter).generate([[3, 4, 5]] * 4, max_new_tokens=8, sampling=Sampling(temperature=0))
        for drafter in ("model", "none")
    )
    accepted = f"{sum(o.num_accepted_tokens for o in one) / sum(o.num_draft_tokens for o in one):.0%}"
    begin = "learnt in 0 optimizer steps from"
    always = "; where nothing is drafted, nothing is learnt: --length fixed:4 always drafts"
    assert summary(learning, [*one, *other]) == (
        f"{begin} 8 outputs: {accepted} of draft tokens accepted in the first quarter of the outputs, nothing drafted "
        f"in the last{always}"
    )
    assert summary(learning, other[:2]) == f"{begin} 2 outputs{always}"
    assert summary(learning, one) == (
        f"{begin} 4 outputs: {accepted} of draft tokens accepted in the first quarter of the outputs, {accepted} of "
        "draft tokens accepted in the last"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--learn-interval", "2"], "--learn-interval says how to learn; give --learn too"),
        (["--learn", "--learn-interval", "0"], "interval must be >= 1, got 0"),
        (["--learn", "--learn-divergence", "fk"], "unknown divergence 'fk'"),
        (["--learn", "--learn-drafts", "2", "--compare"], "--compare measures one draft model"),
        (["--learn", "--drafter", "ngram"], "the drafter ngram has no weights to train"),
    ],
)
def test_wrong_options_of_learning_end_with_a_sentence(monkeypatch, capsys, options, message):
    assert message in " ".join(refused(monkeypatch, capsys, "generate", *GREEDY, *options).split())
