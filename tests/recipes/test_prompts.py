"""Long prompts beside `generate`: both ways say the same token, and figures are quotients of medians."""

import pytest

from outrider.core.types import InputError
from recipes import prompts


def test_both_ways_say_the_same_token_each_time():
    named = prompts.ways(prompts.Job(tokens=48, dtype="float32"))
    said = [named[way](list(range(48))) for way in (prompts.ENGINE, prompts.GENERATE, prompts.ENGINE)]
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 1


def test_a_prompt_has_seconds_of_both_ways_and_memory_of_each(tmp_path):
    [entry] = prompts.run(tmp_path, lengths="64", dtypes="float32", turns=1, threads=1)
    assert entry["seconds"].keys() == entry["megabytes"].keys() == {prompts.ENGINE, prompts.GENERATE}
    assert min(entry["seconds"].values()) > 0
    assert "times its memory (goal 1.2)" in (tmp_path / "table.md").read_text()


def test_figures_are_quotients_of_medians():
    head = {"tokens": 8, "dtype": "float32"}
    seconds = {prompts.ENGINE: [1.0, 9.0, 2.0], prompts.GENERATE: [4.0, 1.0, 8.0]}
    rows = [{**head, "part": "seconds", "seconds": seconds}]
    rows += [{**head, "part": prompts.ENGINE, "megabytes": 6.0}, {**head, "part": prompts.GENERATE, "megabytes": 4.0}]
    [entry] = prompts.summarise(rows)
    assert (entry["time"], entry["memory"]) == (0.5, 1.5)


def test_an_unknown_dtype_is_told():
    with pytest.raises(InputError, match="--dtypes must be float32 or bfloat16"):
        prompts.run(None, dtypes="float8")
