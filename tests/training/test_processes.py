"""Runs in processes of their own: killed at random moments, several at once, and on a full disk."""

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.training.loop import checkpoint
from outrider.training.loop.journal import read
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import FOLDER, place, train
from tests.training import runner
from tests.training.learners import Bigram, batches
from tests.world.forked import rank_environments, started, statuses, telling
from tests.world.full_disk import small_files

ROOT = Path(__file__).parent.parent.parent
STEPS, SAVE_EVERY = 400, 3


LAUNCH = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
COPIES = ["--multi_gpu"]
"""`accelerate launch --cpu` starts one process whatever their number; `--multi_gpu` starts them without a GPU too."""
DIVIDED = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"]
DIVIDED += ["--fsdp_min_num_params", "50"]


def launch_environment(*kind: str) -> dict[str, str]:
    """What `accelerate launch` tells its processes of how they share the work."""
    arguments = launch_command_parser().parse_args([*kind, *LAUNCH, "--num_processes", "2", "any.py"])
    prepared = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    return {name: value for name, value in prepared.items() if os.environ.get(name) != value}


def run(out: Path, *arguments: str) -> int:
    """The exit status of a run in one process."""
    return statuses(started(runner.main, str(out), *arguments))[0]


def launch(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The exit status and the output of a module in two processes that `accelerate launch` starts."""
    launched = ["accelerate.commands.launch", *COPIES, *LAUNCH, "--num_processes", "2", "-m"]
    command = [sys.executable, "-m", *launched, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_a_run_killed_at_five_random_moments_ends_with_the_weights_of_one_left_alone(tmp_path: Path) -> None:
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert run(alone, str(STEPS), str(SAVE_EVERY)) == 0
    dice, kills, reached = random.Random(0), 0, []
    while kills < 5:
        # A checkpoint every third step, so that some kills hit the writing of one.
        found = run(killed, str(STEPS), str(SAVE_EVERY), str(dice.uniform(0.01, 0.25)))
        assert found == -signal.SIGKILL
        kills += 1
        steps = [int(each.stem.removeprefix("step-")) for each in (killed / FOLDER).glob("step-*.pt")]
        reached.append(max(steps, default=0))
        assert not (killed / "config.json").exists(), "a half-trained drafter can be loaded"
    assert reached == sorted(reached), reached
    assert reached[-1] > 0, reached
    assert run(killed, str(STEPS), str(SAVE_EVERY)) == 0
    ours, theirs = load_file(killed / "model.safetensors"), load_file(alone / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
    assert read(killed / FOLDER / "log.jsonl") == read(alone / FOLDER / "log.jsonl")


@pytest.mark.slow
def test_the_command_trains_in_two_processes_as_its_page_says(tmp_path: Path) -> None:
    data, out = tmp_path / "texts.jsonl", tmp_path / "head"
    data.write_text("".join(json.dumps({"tokens": [5 + (i + j) % 40 for j in range(20)]}) + "\n" for i in range(12)))
    few = ("--steps", "2", "--batch-size", "2", "--max-length", "24", "--depth", "2", "--device", "cpu")
    target = ("--target", str(EMBEDDED_TARGET), "--data", str(data))
    found = launch("outrider", "train", "medusa", *target, *few, "--out", str(out))
    assert found.returncode == 0, found.stderr
    assert read(out / FOLDER / "log.jsonl")[0]["num_processes"] == 2
    assert found.stderr.count("trained parameters") == 1, "only the first process speaks"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [COPIES, DIVIDED], ids=["copies", "divided"])
def test_two_processes_have_the_loss_curve_of_one(tmp_path: Path, kind: list[str]) -> None:
    one, two, arguments = tmp_path / "one", tmp_path / "two", ("20", "8", "0", "0")
    assert run(one, *arguments) == 0
    if kind is COPIES:
        found = launch("tests.training.runner", str(two), *arguments)
        assert found.returncode == 0, found.stderr
    else:
        told = launch_environment(*kind)
        assert statuses(
            *(started(runner.main, str(two), *arguments, **told | rank) for rank in rank_environments(2))
        ) == [0, 0]
    logs = [[line for line in read(out / FOLDER / "log.jsonl") if line["kind"] == "step"] for out in (one, two)]
    assert read(two / FOLDER / "log.jsonl")[0]["num_processes"] == 2
    assert read(two / FOLDER / "log.jsonl")[0]["divided"] == (kind is DIVIDED)
    assert len(logs[0]) == len(logs[1]) == 20
    for ours, theirs in zip(*logs, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["right"] == pytest.approx(theirs["right"])
        for name in ("loss", "norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4), (ours, theirs)
    for name, tensor in load_file(one / "model.safetensors").items():
        assert torch.allclose(tensor, load_file(two / "model.safetensors")[name], atol=1e-4), name
    # A run may go on in another number of processes.
    assert run(two, *arguments) == 0


def refused(said: Connection, out: str, rank: dict[str, str]) -> None:
    """Tell why a run does not start."""
    os.environ.update(rank)
    try:
        runner.main(out, "2", "2", "0", "0")
    except InputError as error:
        said.send(str(error))


def test_rows_must_be_dealt_evenly_to_processes(tmp_path: Path) -> None:
    with ExitStack() as several:
        told = [several.enter_context(telling(refused, str(tmp_path), rank))[1] for rank in rank_environments(3)]
        message = "batch_size must be a multiple of the number of processes, got 4 and 3"
        assert all(message in each.recv() for each in told)


def placed(said: Connection, slow: bool, rank: dict[str, str]) -> None:
    """Tell when a process has its device; a slow one joins the others half a second late."""
    os.environ.update(rank)
    if slow:
        join = torch.distributed.init_process_group

        def join_late(*arguments: Any, **options: Any) -> None:
            join(*arguments, **options)
            time.sleep(0.5)
            said.send(time.monotonic())

        torch.distributed.init_process_group = join_late
    place(TrainSettings(device="cpu"))
    said.send(time.monotonic())


def test_no_process_goes_on_before_all_have_joined() -> None:
    with ExitStack() as several:
        ranks = enumerate(rank_environments(2))
        first, second = (several.enter_context(telling(placed, slow == 1, rank))[1] for slow, rank in ranks)
        assert second.recv() <= first.recv()


def ended(said: Connection, rank: dict[str, str]) -> None:
    """Tell whether a process that trains belongs to a group, and whether it still does behind its exit handlers."""
    os.environ.update(rank)
    place(TrainSettings(device="cpu"))
    belongs = torch.distributed.is_initialized()
    atexit._run_exitfuncs()
    said.send((belongs, torch.distributed.is_initialized()))


def test_processes_leave_their_group_before_the_interpreter_ends() -> None:
    with ExitStack() as several:
        told = [several.enter_context(telling(ended, rank))[1] for rank in rank_environments(2)]
        assert [each.recv() for each in told] == [(True, False)] * 2


def limited(path: Path, size: int, state: dict) -> str:
    """What is said when a checkpoint does not fit into the largest file that the process may write."""
    with small_files(size), pytest.raises(InputError) as raised:
        checkpoint.save(path, 2, state)
    return str(raised.value)


def test_a_full_disk_gets_a_sentence_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"weights": torch.ones(10)})
    message = limited(tmp_path, 50_000, {"weights": torch.ones(100_000)})
    assert message.startswith(f"{tmp_path / 'step-00000002.pt'} cannot be written: ")
    assert message.endswith("; nothing of it was kept. Free space, then start again")
    assert [each.name for each in tmp_path.iterdir()] == ["step-00000001.pt"]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert torch.equal(checkpoint.read(newest)["weights"], torch.ones(10))


def test_half_a_folder_never_stands_under_its_name(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="best cannot be written: No space left on device"):
        checkpoint.write_folder(tmp_path / "best", fails)
    assert not list(tmp_path.iterdir())
    checkpoint.write_folder(tmp_path / "best", lambda folder: (folder / "a").write_text("1"))
    checkpoint.write_folder(tmp_path / "best", lambda folder: (folder / "b").write_text("2"))
    assert [each.name for each in (tmp_path / "best").iterdir()] == ["b"]


def test_a_damaged_checkpoint_gets_a_sentence(tmp_path: Path) -> None:
    settings = TrainSettings(steps=4, batch_size=4, max_length=16, save_every=2)
    train(Bigram(), batches(), settings, tmp_path)
    (file,) = (tmp_path / FOLDER).glob("step-*.pt")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(InputError, match=r"the checkpoint .* cannot be read: .*; delete it to begin again"):
        train(Bigram(), batches(), settings, tmp_path)
