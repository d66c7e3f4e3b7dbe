"""The training loop: what it learns, what it repeats, what it keeps, and what stops it."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from accelerate import tracking
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from safetensors.torch import load_file

from outrider.core.types import InputError
from outrider.learning.learner import Loss
from outrider.training.loop.journal import read
from outrider.training.loop.settings import TRACKERS, TrainSettings
from outrider.training.loop.steps import FOLDER, train
from outrider.training.loop.watch import Evaluation
from tests.training.learners import Bigram, batches, documents

SETTINGS = TrainSettings(
    steps=12, batch_size=4, max_length=16, learning_rate=0.03, warmup=3, save_every=4, watch_every=4, log_every=1
)


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model.safetensors")


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in read(out / FOLDER / "log.jsonl") if line["kind"] == "step"]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_loss_falls(tmp_path: Path) -> None:
    train(Bigram(dropout=0), batches(), replace(SETTINGS, steps=60), tmp_path)
    found = losses(tmp_path)
    assert len(found) == 60
    assert sum(found[-5:]) < 0.8 * sum(found[:5]), found


def test_one_seed_gives_the_same_weights_bit_for_bit_and_another_seed_others(tmp_path: Path) -> None:
    for name, seed in [("one", 0), ("two", 0), ("other", 1)]:
        train(Bigram(), batches(seed=seed), replace(SETTINGS, seed=seed), tmp_path / name)
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    assert not same(weights(tmp_path / "one"), weights(tmp_path / "other"))


def test_first_step_is_that_of_plain_adamw_on_the_mean_over_learnt_tokens(tmp_path: Path) -> None:
    ours = Bigram(dropout=0)
    train(ours, batches(), replace(SETTINGS, steps=1, warmup=0, clip=0.5, weight_decay=0.1), tmp_path)
    plain = Bigram(dropout=0)
    batch = batches().batch(0)
    loss = plain(batch)
    (loss.total / loss.weight).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    matrices = [plain.embed.weight, plain.head.weight]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [plain.head.bias], "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=0.03, betas=(0.9, 0.95)).step()
    for name, tensor in plain.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], tensor, atol=1e-7), name
    assert losses(tmp_path)[0] == pytest.approx(float(loss.total.detach() / loss.weight))


@pytest.mark.parametrize("micro_batch_size", [1, 3, 4])
def test_rows_of_a_step_may_be_run_in_parts(tmp_path: Path, micro_batch_size: int) -> None:
    train(Bigram(dropout=0), batches(), SETTINGS, tmp_path / "whole")
    train(Bigram(dropout=0), batches(), replace(SETTINGS, micro_batch_size=micro_batch_size), tmp_path / "parts")
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-4)


def test_weights_of_a_loss_scale_the_gradient(tmp_path: Path) -> None:
    class Doubled(Bigram):
        def forward(self, batch):
            loss = super().forward(batch)
            return Loss(total=2 * loss.total, weight=2 * loss.weight)

    train(Bigram(dropout=0), batches(), SETTINGS, tmp_path / "one")
    train(Doubled(dropout=0), batches(), SETTINGS, tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_rate_zero_changes_no_weight(tmp_path: Path) -> None:
    before = {name: tensor.clone() for name, tensor in Bigram().state_dict().items()}
    train(Bigram(), batches(), replace(SETTINGS, learning_rate=0.0), tmp_path)
    assert same(weights(tmp_path), before)


def test_frozen_weights_stay_and_are_in_no_checkpoint(tmp_path: Path) -> None:
    learner = Bigram()
    learner.embed.weight.requires_grad_(False)
    before = learner.embed.weight.clone()
    train(learner, batches(), SETTINGS, tmp_path)
    (file,) = (tmp_path / FOLDER).glob("step-*.pt")
    assert torch.equal(weights(tmp_path)["embed.weight"], before)
    assert set(torch.load(file)["weights"]) == {"head.weight", "head.bias"}


def test_a_run_that_stopped_at_any_step_goes_on_bit_for_bit(tmp_path: Path) -> None:
    class Stopping(Bigram):
        limit = 10**9

        def forward(self, batch):
            if batch.step == self.limit:
                raise KeyboardInterrupt
            return super().forward(batch)

    watch = Evaluation(documents(4, seed=9), depth=2)
    train(Bigram(), batches(), SETTINGS, tmp_path / "alone", watch)
    stopped = tmp_path / "stopped"
    for limit in (2, 6, 7, 11):
        learner = Stopping(seed=5 if limit > 6 else 0)  # The weights come from the checkpoint.
        learner.limit = limit
        with pytest.raises(KeyboardInterrupt):
            train(learner, batches(), SETTINGS, stopped, watch)
    train(Bigram(seed=7), batches(), SETTINGS, stopped, watch)
    assert same(weights(stopped), weights(tmp_path / "alone"))
    assert read(stopped / FOLDER / "log.jsonl") == read(tmp_path / "alone" / FOLDER / "log.jsonl")


def test_a_run_killed_between_checkpoints_by_steps_has_one_by_minutes_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    class Stopping(Bigram):
        def forward(self, batch):
            if batch.step == 10:
                raise KeyboardInterrupt
            return super().forward(batch)

    rare, often = replace(SETTINGS, save_every=1000), replace(SETTINGS, save_every=1000, save_minutes=0)
    train(Bigram(), batches(), rare, tmp_path / "alone")
    with pytest.raises(KeyboardInterrupt):
        train(Stopping(), batches(), often, tmp_path / "killed")
    assert len([*(tmp_path / "killed" / FOLDER).glob("step-*.pt")]) == 1
    train(Bigram(seed=7), batches(), rare, tmp_path / "killed")
    assert same(weights(tmp_path / "killed"), weights(tmp_path / "alone"))


def test_with_default_settings_a_run_of_60_seconds_killed_at_step_50_keeps_half_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    class OneSecond(Bigram):
        def forward(self, batch):
            nonlocal now
            now += 1
            if batch.step == 50:
                os.kill(os.getpid(), signal.SIGINT)
            return super().forward(batch)

    monkeypatch.setattr("outrider.training.loop.steps.time", SimpleNamespace(perf_counter=lambda: now))
    with pytest.raises(KeyboardInterrupt):
        train(OneSecond(), batches(), TrainSettings(steps=60, batch_size=4, max_length=16), tmp_path)
    [kept] = (tmp_path / FOLDER).glob("step-*.pt")
    assert 25 <= int(kept.stem.removeprefix("step-")) < 50


def test_a_run_that_has_ended_is_not_made_again(tmp_path: Path) -> None:
    first = train(Bigram(), batches(), SETTINGS, tmp_path)
    before = weights(tmp_path)
    again = train(Bigram(seed=3), batches(), SETTINGS, tmp_path)
    assert same(weights(tmp_path), before)
    assert again.step == first.step


def test_other_settings_are_refused_in_the_folder_of_a_run(tmp_path: Path) -> None:
    train(Bigram(), batches(), SETTINGS, tmp_path, about={"divergence": "fkl"})
    with pytest.raises(InputError) as raised:
        train(Bigram(), batches(), replace(SETTINGS, seed=1, save_every=2), tmp_path, about={"divergence": "rkl"})
    assert str(raised.value) == (
        f"{tmp_path} holds a run with divergence 'fkl' instead of 'rkl', seed 0 instead of 1; give these, or another "
        "folder"
    )


@pytest.mark.parametrize(
    "foreign", ["model.safetensors", "notes.txt", "training/notes.txt", "training/log.jsonl", "training"]
)
def test_a_folder_that_holds_something_else_is_refused_and_keeps_it(tmp_path: Path, foreign: str) -> None:
    place = tmp_path / "out" / foreign
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    with pytest.raises(InputError) as raised:
        train(Bigram(), batches(), SETTINGS, tmp_path / "out")
    assert str(raised.value) == f"{tmp_path / 'out'} exists already; give a new folder with --out, or remove it"
    assert place.read_text() == "mine"
    assert {each for each in (tmp_path / "out").rglob("*") if each.is_file()} == {place}


def test_a_run_without_a_checkpoint_begins_again_unless_something_else_came(tmp_path: Path) -> None:
    class Stopping(Bigram):
        def forward(self, batch):
            raise KeyboardInterrupt

    watch = Evaluation(documents(4, seed=9), depth=2)
    with pytest.raises(KeyboardInterrupt):
        train(Stopping(), batches(), SETTINGS, tmp_path / "out", watch)
    (tmp_path / "out" / FOLDER / "lock").write_text("of a killed process")
    (tmp_path / "out" / "model.safetensors").write_text("mine")
    with pytest.raises(InputError, match="exists already; give a new folder"):
        train(Bigram(), batches(), SETTINGS, tmp_path / "out", watch)
    (tmp_path / "out" / "model.safetensors").unlink()
    train(Bigram(), batches(), SETTINGS, tmp_path / "out", watch)
    train(Bigram(), batches(), SETTINGS, tmp_path / "alone", watch)
    assert same(weights(tmp_path / "out"), weights(tmp_path / "alone"))


def test_a_folder_into_which_another_process_trains_is_refused(tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    train(Bigram(), batches(), replace(SETTINGS, keep_best=False), tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with (tmp_path / FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=f"{tmp_path} is being written by another process; wait until that has"):
            train(Bigram(), batches(), SETTINGS, tmp_path)
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / FOLDER / "lock"])


def test_the_best_drafter_is_kept_and_the_last_where_nothing_is_watched(tmp_path: Path) -> None:
    class Worsening(Bigram):
        """Learns until step 4, and then the opposite."""

        def forward(self, batch):
            loss = super().forward(batch)
            return loss if batch.step < 4 else Loss(total=-loss.total, weight=loss.weight)

    watch = Evaluation(documents(4, seed=9), depth=2)
    longer = replace(SETTINGS, steps=20)
    found = train(Worsening(dropout=0), batches(), longer, tmp_path / "watched", watch)
    scores = {x["step"]: x["block_efficiency"] for x in read(found.log) if x["kind"] == "watch"}
    assert sorted(scores) == [0, 4, 8, 12, 16, 20]
    assert found.step == max(scores, key=scores.__getitem__) < 20, scores
    assert found.best is not None
    assert found.best.score == scores[found.step]
    train(Worsening(dropout=0), batches(), replace(longer, keep_best=False), tmp_path / "last", watch)
    train(Worsening(dropout=0), batches(), longer, tmp_path / "unwatched")
    assert same(weights(tmp_path / "last"), weights(tmp_path / "unwatched"))
    assert not same(weights(tmp_path / "last"), weights(tmp_path / "watched"))
    left = {each.name for each in (tmp_path / "watched" / FOLDER).iterdir()}
    assert left == {"log.jsonl", "tensorboard", "step-00000020.pt"}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_stops_the_run_with_a_sentence(tmp_path: Path, bad: float) -> None:
    class Exploding(Bigram):
        def forward(self, batch):
            loss = super().forward(batch)
            return Loss(total=loss.total * (bad if batch.step == 5 else 1), weight=loss.weight)

    with pytest.raises(InputError, match=rf"the loss is {bad} at step 6; use a lower learning rate .* of step 4"):
        train(Exploding(), batches(), SETTINGS, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_a_gradient_that_is_no_number_stops_the_run(tmp_path: Path) -> None:
    class Steep(Bigram):
        def forward(self, batch):
            loss = super().forward(batch)
            return Loss(total=loss.total + (self.head.bias[0] - self.head.bias[0].detach()).sqrt(), weight=loss.weight)

    with pytest.raises(InputError, match=r"the gradient is (inf|nan) at step 1"):
        train(Steep(), batches(), SETTINGS, tmp_path)


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="all its weights are frozen"):
        train(Bigram().requires_grad_(False), batches(), SETTINGS, tmp_path)


def test_bfloat16_products_leave_the_weights_in_float32(tmp_path: Path) -> None:
    class Seeing(Bigram):
        seen: ClassVar[set[torch.dtype]] = set()

        def forward(self, batch):
            Seeing.seen.add(F.linear(self.embed(batch.tokens), self.head.weight).dtype)
            return super().forward(batch)

    train(Seeing(), batches(), replace(SETTINGS, precision="bf16"), tmp_path)
    assert Seeing.seen == {torch.bfloat16}
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.float32}
    train(Bigram(), batches(), SETTINGS, tmp_path / "after")  # The precision of one run does not bind the next.


def test_progress_counts_down(tmp_path: Path) -> None:
    seen = []
    train(Bigram(), batches(), SETTINGS, tmp_path, Evaluation(documents(4, seed=9), depth=2), seen.append)
    assert [each.step for each in seen] == list(range(1, 13))
    assert seen[-1].seconds_left == 0
    assert all(each.watched is not None for each in seen)


def test_log_has_settings_steps_and_tensorboard_events(tmp_path: Path) -> None:
    train(Bigram(), batches(), SETTINGS, tmp_path, about={"divergence": "fkl"})
    lines = [json.loads(line) for line in (tmp_path / FOLDER / "log.jsonl").read_text().splitlines()]
    assert lines[0]["kind"] == "settings"
    assert lines[0]["divergence"] == "fkl"
    assert lines[0]["num_parameters"] == 272
    assert [line["step"] for line in lines[1:]] == list(range(1, 13))
    assert {"loss", "rate", "norm", "tokens", "right"} <= lines[1].keys()
    assert any((tmp_path / FOLDER / "tensorboard").glob("events*"))


class NotingTracker(GeneralTracker):
    """A tracker of accelerate's that keeps what it is told."""

    name = "trackio"
    requires_logging_directory = False
    noted: ClassVar[list[tuple[int | None, dict[str, Any]]]] = []
    ended: ClassVar[list[bool]] = []

    def __init__(self, run_name: str) -> None:
        super().__init__()

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.noted.append((step, values))

    def finish(self) -> None:
        self.ended.append(True)


def test_another_tracker_of_accelerate_gets_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "trackio", NotingTracker)
    monkeypatch.setattr(tracking, "_available_trackers", [LoggerType.TRACKIO])
    train(Bigram(), batches(), replace(SETTINGS, tracker="trackio"), tmp_path)
    both = train(Bigram(), batches(), replace(SETTINGS, tracker="tensorboard,trackio"), tmp_path / "both")
    assert any((both.log.parent / "tensorboard").glob("events*"))
    steps = [step for step, values in NotingTracker.noted if "step/loss" in values]
    assert (steps, NotingTracker.ended) == ([*range(1, 13), *range(1, 13)], [True, True])
    assert not (tmp_path / FOLDER / "tensorboard").exists()


def test_trackers_are_those_of_accelerate_and_must_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert set(TRACKERS) == set(LoggerType.list()) - {"all"}
    with pytest.raises(InputError, match=r"tracker must be one of tensorboard, wandb, .* got 'wandbb'"):
        replace(SETTINGS, tracker="wandbb")
    monkeypatch.setattr(tracking, "_available_trackers", [])
    with pytest.raises(InputError, match="the tracker wandb is not installed"):
        train(Bigram(), batches(), replace(SETTINGS, tracker="wandb"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_settings_name_what_is_wrong() -> None:
    for values, message in [
        ({"steps": 0}, "steps must be >= 1, got 0"),
        ({"learning_rate": float("nan")}, "learning_rate must be >= 0, got nan"),
        ({"precision": "fp8"}, "precision must be one of no, bf16, fp16, got 'fp8'"),
        ({"clip": 0}, "clip must be > 0, got 0"),
        ({"device": "tpu"}, "device must be cpu or left out, got 'tpu'; choose among GPUs with CUDA_VISIBLE_DEVICES"),
    ]:
        with pytest.raises(InputError) as raised:
            TrainSettings(**values)
        assert str(raised.value) == message
