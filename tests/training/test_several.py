"""Heads of every kind, and a draft model, with weights that FSDP2 divides among two processes.

The processes are told what `accelerate launch` tells them, and talk over gloo. `test_processes` has copies of weights.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from outrider.training.loop.journal import read
from outrider.training.loop.steps import FOLDER
from tests.training import several
from tests.training.test_processes import DIVIDED, launch_environment
from tests.world.forked import rank_environments, started, statuses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in one process."""
    out = tmp_path_factory.mktemp("alone")
    assert statuses(started(several.main, str(out))) == [0]
    return out


def test_two_processes_learn_what_one_learns(alone: Path, tmp_path: Path) -> None:
    told = launch_environment(*DIVIDED)
    assert statuses(*(started(several.main, str(tmp_path), **told | rank) for rank in rank_environments(2))) == [0, 0]
    for name in several.NAMES:
        one, two = (read(out / name / FOLDER / "log.jsonl") for out in (alone, tmp_path))
        assert (two[0]["num_processes"], two[0]["divided"]) == (2, True)
        for ours, theirs in zip(one[1:], two[1:], strict=True):
            assert (ours["kind"], ours["step"]) == (theirs["kind"], theirs["step"])
            for figure in ("loss", "norm", "block_efficiency"):
                if figure in ours:
                    assert ours[figure] == pytest.approx(theirs[figure], rel=1e-4), (name, ours, theirs)
        ours, theirs = (load_file(out / name / "model.safetensors") for out in (alone, tmp_path))
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert torch.allclose(tensor, theirs[key], atol=1e-3), (name, key, (tensor - theirs[key]).abs().max())
