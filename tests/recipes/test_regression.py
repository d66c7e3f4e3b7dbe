"""Recordings of outputs: repeated ones are identical, and a difference is named."""

import copy
import json

import pytest

from outrider import InputError
from recipes import regression
from recipes.regression import Configuration, first_difference, main, read, run

FEW = (Configuration(), Configuration(tree="gumbel:branching=2x1", verifier="recursive"))


@pytest.fixture(scope="module")
def recording():
    """Two prompts in two configurations."""
    return run(2, 6, FEW)


def test_a_second_recording_is_identical(recording):
    assert first_difference(recording, json.loads(json.dumps(run(2, 6, FEW)))) is None
    assert {len(outputs) for outputs in recording["outputs"].values()} == {2}
    assert len(recording["outputs"]) == len(FEW) * len(regression.TEMPERATURES)


def test_steps_add_up_to_the_tokens(recording):
    for outputs in recording["outputs"].values():
        for output in outputs.values():
            assert sum(output["emitted"]) == len(output["tokens"])
            assert len(output["drafted"]) == len(output["accepted"]) == len(output["emitted"])


def changed(recording, kind, place, value):
    found = copy.deepcopy(recording)
    output = list(list(found["outputs"].values())[1].values())[1]
    output[kind][place:] = value
    return found


@pytest.mark.parametrize(
    ("kind", "place", "value", "sentence"),
    [
        ("tokens", 3, [-1], "tokens of token 3"),
        ("tokens", 5, [], "6 before, 5 now"),
        ("drafted", 0, [99], "drafted of step 0: 4 before, 99 now"),
        ("accepted", 0, [99], "accepted of step 0"),
    ],
)
def test_the_first_difference_is_named(recording, kind, place, value, sentence):
    found = first_difference(recording, changed(recording, kind, place, value))
    assert found is not None
    assert sentence in found
    assert list(recording["outputs"])[1] in found


def test_outputs_that_only_one_recording_has_are_differences(recording):
    fewer = {"outputs": dict(list(recording["outputs"].items())[:1])}
    assert "missing now" in first_difference(recording, fewer)
    assert "was not before" in first_difference(fewer, recording)


def test_the_command_compares_two_files_and_fails_where_they_differ(recording, tmp_path, capsys):
    for name, content in (("a", recording), ("b", changed(recording, "tokens", 0, [0]))):
        (tmp_path / name).write_text(json.dumps(content))
    main(against=tmp_path / "a", recorded=tmp_path / "a")
    assert capsys.readouterr().out == "identical: 8 outputs of 4 configurations\n"
    with pytest.raises(regression.typer.Exit):
        main(against=tmp_path / "a", recorded=tmp_path / "b")
    assert "first difference is in model chain" in capsys.readouterr().out


def test_what_is_no_recording_is_refused(tmp_path):
    (tmp_path / "a").write_text("[]")
    with pytest.raises(InputError, match="no recording"):
        read(tmp_path / "a")
    with pytest.raises(InputError, match="cannot read"):
        read(tmp_path / "b")
    with pytest.raises(InputError, match=r"in 1 \.\. 40"):
        run(0)
