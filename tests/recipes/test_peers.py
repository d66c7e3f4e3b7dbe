"""The recipe on other engines measures by `outrider bench`, and says what it cannot measure."""

import json

import pytest

from outrider import InputError
from recipes import peers


def test_the_quick_form_measures_every_load_beside_transformers(tmp_path):
    peers.main(environments=tmp_path, out=tmp_path / "out", temperatures="0", dtype="float32", threads=1, **peers.QUICK)
    lines = (tmp_path / "out" / "temperature-0" / "rows.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    own = {"plain", "default", "suffix"}
    assert {row["method"] for row in rows if row["load"] == "concurrency 2"} == own | {"transformers"}
    assert {row["method"] for row in rows} == own | {
        *("transformers", "transformers, prompt lookup", "transformers, assisted")
    }
    # Past end tokens, so that all answers are equally long.
    assert {row["tokens"] for row in rows} == {8, 16}


def test_what_is_not_known_is_refused(tmp_path):
    for options, name in (
        ({"peers": "tensorflow"}, "peer"),
        ({"model": "small"}, "model"),
        ({"dtype": "int8"}, "dtype"),
    ):
        with pytest.raises(InputError, match=f"unknown {name} "):
            peers.main(environments=tmp_path, **options)
