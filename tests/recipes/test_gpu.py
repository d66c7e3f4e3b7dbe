"""The GPU recipe: refused where there is none; on one, identity in float32 and a table of steps."""

import json

import pytest
import torch

from outrider import InputError
from recipes import gpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_recipe_says_so_and_writes_nothing(tmp_path):
    with pytest.raises(InputError, match="needs a CUDA device"):
        gpu.run(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_steps_are_summed_up_by_batch_and_way_against_the_time_to_read_the_weights():
    rows = [
        {"batch": 1, "compiled": compiled, "number": n, "seconds": 4.0 + n, **dict.fromkeys(gpu.PARTS, 1.0 + n)}
        for compiled in (False, True)
        for n in range(3)
    ]
    plain, compiled = gpu.summarise(rows, floor=0.5)
    assert (plain["batch"], plain["compiled"], compiled["compiled"]) == (1, False, True)
    assert plain["seconds"] == 5.0
    assert plain["target_over_floor"] == 4.0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_all_pairs_are_identical_and_steps_are_profiled(tmp_path):
    summary = gpu.run(tmp_path, steps=4, layers=2, hidden=256)
    assert all(each["holds"] for each in summary["identities"])
    assert {(each["batch"], each["compiled"]) for each in summary["steps"]} == {
        (batch, compiled) for batch in (1, 8) for compiled in (False, True)
    }
    assert json.loads((tmp_path / "summary.json").read_text())["bandwidth"] > 0
