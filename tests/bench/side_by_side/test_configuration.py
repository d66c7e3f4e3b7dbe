"""Configurations are read from words, files and grids; what is wrong with one is a sentence."""

import pytest

from outrider import InputError, Setup
from outrider.bench.side_by_side.configuration import Axis, grid, parse_configuration, read_configurations


def test_values_keep_their_own_commas_and_equal_signs():
    found = parse_configuration("name=mine,drafter=suffix:min_match=2,max_nodes=8,length=fixed:4,allow_lossy=true")
    assert found.name == "mine"
    assert found.setup(Setup(max_slots=3)) == Setup(
        drafter="suffix:min_match=2,max_nodes=8", length="fixed:4", allow_lossy=True, max_slots=3
    )
    assert parse_configuration("length=fixed:4").name == "length=fixed:4"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lenght=fixed:4", r"unknown option of a configuration 'lenght'; did you mean 'length'\?"),
        ("target=somewhere", "unknown option of a configuration 'target'"),
        ("length=fixed:4,length=fixed:5", "gives length twice"),
        ("length=fixed:4,name=plain (no drafting)", r"not 'plain \(no drafting\)'"),
        ("allow_lossy=perhaps", "allow_lossy must be true or false"),
    ],
)
def test_wrong_words_are_told_by_a_sentence(text, sentence):
    with pytest.raises(InputError, match=sentence):
        parse_configuration(text)


def test_files_hold_a_table_for_each_name(tmp_path):
    toml, json = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('[short]\nlength = "fixed:2"\n[wide]\ntree = "iid:2"\n')
    json.write_text('{"short": {"length": "fixed:2"}, "wide": {"tree": "iid:2"}}')
    assert read_configurations(toml) == read_configurations(json)
    assert [each.name for each in read_configurations(toml)] == ["short", "wide"]
    toml.write_text('[short]\nlenght = "fixed:2"\n')
    with pytest.raises(InputError, match=r"a\.toml: unknown option of a configuration 'lenght'"):
        read_configurations(toml)
    toml.write_text('length = "fixed:2"\n')
    with pytest.raises(InputError, match=r"must hold a table of options for each name"):
        read_configurations(toml)


def test_a_grid_has_every_combination_once():
    axes = [Axis.parse("length=fixed:1..3|goodput|fixed:2"), Axis.parse("verifier=token|block")]
    found = grid(axes)
    assert len({each.name for each in found}) == len(found) == 8
    assert found[0].options == {"length": "fixed:1", "verifier": "token"}
    assert all(each.swept for each in found)
    with pytest.raises(InputError, match="one option twice"):
        grid([axes[0], axes[0]])
    with pytest.raises(InputError, match="at most 1000 configurations, got 8000"):
        grid([Axis.parse(f"{name}=fixed:1..20") for name in ("length", "tree", "verifier")])
    for text, sentence in (("length=", "names no value"), ("length=fixed:5..2", "must ascend"), ("size=1", "unknown")):
        with pytest.raises(InputError, match=sentence):
            Axis.parse(text)
