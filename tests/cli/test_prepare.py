"""What `outrider prepare` refuses, in a sentence, before anything is compiled."""

import pytest

from outrider.core import progress
from outrider.embedded import EMBEDDED_DRAFT
from outrider.lm.forwards.forward import ForwardChoice
from outrider.lm.model import LanguageModel
from tests.cli.test_cli import run
from tests.world.compiling import needs_compiled_forwards
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import tiny


def test_only_compiled_forwards_are_prepared(monkeypatch, capsys):
    status, out, err = run(monkeypatch, capsys, "prepare", "--forward", "eager")
    assert (status, out) == (2, "")
    assert "prepare makes compiled forwards; leave out --forward eager" in err


@needs_compiled_forwards
@pytest.mark.parametrize(("name", "reason"), [("mamba2", "recurrent layers"), ("bloom", "bias")])
def test_a_model_that_cannot_be_compiled_is_refused(name, reason, monkeypatch, capsys, tmp_path):
    made = tiny_recurrent(name) if name == "mamba2" else tiny(name)
    made.save_pretrained(tmp_path)
    status, out, err = run(monkeypatch, capsys, "prepare", "--target", str(tmp_path), "--drafter", "ngram")
    assert (status, out) == (2, "")
    assert reason in err


def test_an_unknown_kind_of_forward_is_a_sentence(monkeypatch, capsys):
    status, _, err = run(monkeypatch, capsys, "generate", "--prompt", "a", "--forward", "compild")
    assert status == 2
    assert "unknown forward 'compild'; did you mean 'compiled'? Available: eager, packed, compiled, replayed" in err


@needs_compiled_forwards
def test_a_cache_folder_that_cannot_be_written_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null")
    status, out, err = run(monkeypatch, capsys, "prepare", "--drafter", "ngram")
    assert (status, out) == (2, "")
    assert "compiled forwards are kept in /dev/null/forwards" in err
    assert "which cannot be written" in err


@needs_compiled_forwards
@pytest.mark.parametrize("drafter", ["model", "first:suffix,model", "first:suffix,union:ngram,model"])
def test_all_that_takes_long_is_said_meanwhile(monkeypatch, capsys, drafter):
    said = []

    def noting(result):
        def call(*args, **named):
            said.append(progress._display and progress._display.tasks[-1].what)
            return result

        return call

    monkeypatch.setattr(LanguageModel, "prepare", noting(None))
    monkeypatch.setattr("outrider.cli.prepare.choose", noting(ForwardChoice(forward="eager", pad_to=1)))
    monkeypatch.setattr("outrider.cli.prepare.measured", noting(None))
    status, _, err = run(monkeypatch, capsys, "prepare", "--drafter", f"{drafter}:path={EMBEDDED_DRAFT}")
    assert status == 0, err
    target, draft, steps = said[:2], said[2:4], said[4:]
    assert target == ["target: compiling its forward", "target: timing its forwards"]
    assert [what.partition(": ")[2] for what in draft] == [what.partition(": ")[2] for what in target]
    # The drafts of a union have one length, which nothing chooses by costs.
    assert steps == ["timing steps of target and drafter, for up to half a minute"] * ("union" not in drafter)
