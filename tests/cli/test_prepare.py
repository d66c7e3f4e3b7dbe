"""What `outrider prepare` refuses, in a sentence, before anything is compiled."""

import pytest

from tests.cli.test_cli import run
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import tiny


def test_only_compiled_forwards_are_prepared(monkeypatch, capsys):
    status, out, err = run(monkeypatch, capsys, "prepare", "--forward", "eager")
    assert (status, out) == (2, "")
    assert "prepare makes compiled forwards; leave out --forward eager" in err


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


def test_a_cache_folder_that_cannot_be_written_is_a_sentence(monkeypatch, capsys):
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null")
    status, out, err = run(monkeypatch, capsys, "prepare", "--drafter", "ngram")
    assert (status, out) == (2, "")
    assert "compiled forwards are kept in /dev/null/forwards" in err
    assert "which cannot be written" in err
