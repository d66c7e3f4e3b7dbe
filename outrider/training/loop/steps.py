"""The one training loop: a learner, batches and settings become a trained drafter.

`accelerate` is underneath. The same function runs in one process, in several with a copy of the learner each, and with
its weights divided among them (FSDP), as `accelerate launch` says. The learning curve does not depend on the number of
processes, apart from rounding.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from outrider.core.destination import check_free, locked
from outrider.core.dice import Purpose, key_of
from outrider.core.types import InputError
from outrider.learning.learner import Judging, Learner, Loss
from outrider.training.data.batches import Batches
from outrider.training.loop import checkpoint, processes
from outrider.training.loop.journal import Journal, begins_run, trackers_of
from outrider.training.loop.optimizer import adamw
from outrider.training.loop.prefetch import Prefetch, StepData
from outrider.training.loop.settings import TENSORBOARD, TrainSettings, check_same
from outrider.training.loop.watch import Evaluation, Watched

FOLDER = "training"
"""Folder beside the drafter in which a run keeps its log and its checkpoints."""
LOCK = "lock"
OWN = ("log.jsonl", "tensorboard", "step-*.pt", "best-*", "last", "answers.jsonl", "states", LOCK, ".*")
"""What a run may have written there before its first checkpoint."""


FIRST_SAVE = 10.0
"""Seconds after which a run writes its first checkpoint. Another comes whenever the time since then doubles."""
COUNTED = ("total", "weight", "norm", "save_due")
"""Sums of a step that are no parts of the loss."""
SAVING = 0.1
"""Largest share of the time that checkpoints by minutes may take."""


@dataclass(frozen=True, kw_only=True)
class BestDrafter:
    """The best drafter until now.

    Attributes:
        step: After how many steps.
        score: Its block efficiency.
    """

    step: int
    score: float


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: Steps made.
        steps: Steps to make.
        loss: Of the last step; None before it.
        seconds_left: By the mean of this process's steps; None before the first.
        watched: The last measurement; None before it.
    """

    step: int
    steps: int
    loss: float | None
    seconds_left: float | None
    watched: Watched | None


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that has ended.

    Attributes:
        out: The folder of the drafter.
        log: The log, as JSON lines.
        step: After how many steps the drafter was written.
        watched: The last measurement; None if nothing was watched.
        best: The best measurement; None if nothing was watched.
    """

    out: Path
    log: Path
    step: int
    watched: Watched | None
    best: BestDrafter | None


def place(settings: TrainSettings) -> torch.device:
    """The device that this process trains on: where a learner puts what it does not train."""
    processes.load_whole()
    device = PartialState(cpu=settings.device == "cpu").device
    # The first process keeps the addresses of all: one that ends early, refused, would leave others without them.
    processes.wait()
    processes.leave_at_exit()
    return device


def settled(settings: TrainSettings, device: torch.device) -> TrainSettings:
    """The settings with what a device decides, so that a run says what it computed in.

    Example:
        >>> settled(TrainSettings(), torch.device("cpu")).precision
        'no'
    """
    if settings.precision is not None:
        return settings
    halves = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return replace(settings, precision="bf16" if halves else "no")


@contextmanager
def claimed(out: Path) -> Iterator[None]:
    """Hold the folder of a run until the body ends: no other process writes there, and nothing foreign is replaced.

    Of several processes of one run, the first holds it.

    Raises:
        InputError: The folder holds something else than a run, or another process holds it.
    """
    if not processes.is_first():
        yield
        return
    if not _holds_run(out):
        check_free(out)
    with locked(out / FOLDER / LOCK, out):
        yield


def _holds_run(out: Path) -> bool:
    """Whether a folder holds a run. Before its first checkpoint, a run has written nothing outside its own folder."""
    folder = out / FOLDER
    if checkpoint.steps(folder):
        return True
    if not folder.is_dir() or [each.name for each in out.iterdir()] != [FOLDER]:
        return False
    log = folder / "log.jsonl"
    is_ours = all(any(each.match(name) for name in OWN) for each in folder.iterdir())
    return is_ours and (not log.exists() or log.stat().st_size == 0 or begins_run(log))


def train(
    learner: Learner,
    batches: Batches,
    settings: TrainSettings,
    out: Path,
    watch: Evaluation | None = None,
    progress: Callable[[Progress], object] | None = None,
    *,
    about: Mapping[str, Any] | None = None,
) -> Trained:
    """Train a learner and write its drafter. A run that was cut off goes on from its last checkpoint.

    Args:
        learner: What is trained. Its weights change in place.
        batches: The data.
        out: Folder for the drafter. The log and the checkpoints are in its folder `training`.
        watch: What is measured beside; None measures nothing, and the last drafter is kept.
        progress: Called after every step, in the first process.
        about: Other values that a run must keep when it goes on, such as the name of a loss; they go to the log.

    Raises:
        InputError: The folder holds something else, or a run with other settings; another process writes into it; the
            loss is not finite, or a file cannot be written.
    """
    settings = settled(settings, place(settings))
    with claimed(out):
        run = _Run(learner, batches, settings, out, watch, dict(about or {}))
        try:
            while run.step < settings.steps:
                loss = run.advance()
                if progress is not None and run.accelerator.is_main_process:
                    progress(run.progress(loss))
            return run.finish()
        finally:
            run.close()


class _Run:
    """A run between two steps."""

    def __init__(
        self,
        learner: Learner,
        batches: Batches,
        settings: TrainSettings,
        out: Path,
        watch: Evaluation | None,
        about: dict[str, Any],
    ) -> None:
        self.settings, self.batches, self.watch, self.out = settings, batches, watch, out
        self.folder = out / FOLDER
        self.identity = settings.fixed() | about
        # An older run in this process may have had another precision.
        AcceleratorState._reset_state()
        trackers = trackers_of(settings.trackers)
        self.accelerator = Accelerator(
            mixed_precision=settings.precision,
            cpu=settings.device == "cpu",
            log_with=trackers or None,
            project_dir=str(self.folder),
        )
        processes.divide(self.accelerator)
        self.share = self._own_rows()
        optimizer = adamw(learner, settings, self.accelerator.device)
        self.learner: Learner = learner
        self.model, self.optimizer = self.accelerator.prepare(learner, optimizer)
        self.step, self.best, self.watched = 0, cast(BestDrafter | None, None), cast(Watched | None, None)
        self.spent = 0.0
        self._resume()
        self.began, self.began_at = time.perf_counter(), self.step
        self.saved, self.saved_at, self.save_seconds = self.began, self.step, 0.0
        run = self.accelerator if trackers else None
        main, events = self.accelerator.is_main_process, TENSORBOARD in settings.trackers
        self.journal = Journal(self.folder, step=self.step, accelerator=run, tensorboard=events) if main else None
        self.prefetch = self._prefetch()
        if self.step == 0:
            self._write_settings()
            self._look()

    def advance(self) -> float:
        """Make one optimizer step. Returns the loss."""
        settings, step = self.settings, self.step
        # No random state has to be saved: it begins anew at every step.
        torch.manual_seed(_seed(settings.seed, step, self.accelerator.process_index))
        rate = settings.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        added = self._backward((self.prefetch or self._data)(step))
        self._scale_gradients(added["weight"])
        sums = self._on_host(added | {"norm": self._clip()})
        weight, norm = sums["weight"], sums["norm"]
        loss = sums["total"] / weight if weight else 0.0
        if not math.isfinite(loss):
            raise self._not_finite("loss", loss)
        if not math.isfinite(norm) and self.accelerator.scaler is None:
            raise self._not_finite("gradient", norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.step % settings.log_every == 0 or self.step == settings.steps:
            parts = {name: value / weight for name, value in sums.items() if name not in COUNTED}
            self._log("step", {"loss": loss, "rate": rate, "norm": norm, "tokens": weight, **parts})
        if self.watch is not None and (self.step % settings.watch_every == 0 or self.step == settings.steps):
            self._look()
        if sums["save_due"] or self.step % settings.save_every == 0 or self.step == settings.steps:
            self._save()
        return loss

    def finish(self) -> Trained:
        """Write the drafter to its place."""
        kept = self.best if self.best is not None and self.settings.keep_best else None
        last = self.folder / "last"
        with processes.whole(self.model):
            if self.accelerator.is_main_process:
                source = last if kept is None else self.folder / f"best-{kept.step:08d}"
                if kept is None:
                    checkpoint.write_folder(last, self.learner.write)
                if source.is_dir():
                    checkpoint.publish(source, self.out)
        self.accelerator.wait_for_everyone()
        return Trained(
            out=self.out,
            log=self.folder / "log.jsonl",
            step=self.step if kept is None else kept.step,
            watched=self.watched,
            best=self.best,
        )

    def progress(self, loss: float) -> Progress:
        """How far the run is."""
        each = (time.perf_counter() - self.began) / max(1, self.step - self.began_at)
        return Progress(
            step=self.step,
            steps=self.settings.steps,
            loss=loss,
            seconds_left=each * (self.settings.steps - self.step),
            watched=self.watched,
        )

    def close(self) -> None:
        """Let go of files and of what belongs to several processes."""
        if self.prefetch is not None:
            self.prefetch.close()
        if self.journal is not None:
            self.journal.close()
        self.accelerator.free_memory()

    def _own_rows(self) -> range:
        """The rows of the global batch that this process runs."""
        rows, count = self.settings.batch_size, self.accelerator.num_processes
        if rows % count:
            raise InputError(f"batch_size must be a multiple of the number of processes, got {rows} and {count}")
        per_process = rows // count
        return range(self.accelerator.process_index * per_process, (self.accelerator.process_index + 1) * per_process)

    def _prefetch(self) -> Prefetch | None:
        """What makes data ahead; None on a CPU, which has no time left to do so while it trains."""
        device = self.accelerator.device
        if device.type != "cuda":
            return None
        # A new thread is on the first GPU, where pinning memory would take memory too. `cuda` without a number is the
        # one that this thread is on.
        index = torch.cuda.current_device() if device.index is None else device.index
        return Prefetch(self._data, self.settings.steps, partial(torch.cuda.set_device, index))

    def _data(self, step: int) -> StepData:
        """The rows of a step that this process runs; for a GPU in memory from which it copies by itself."""
        whole, size = self.batches.batch(step), self.settings.micro_batch_size or len(self.share)
        starts = range(self.share.start, self.share.stop, size)
        parts = [Batches.share(whole, range(start, min(start + size, self.share.stop))) for start in starts]
        if self.accelerator.device.type == "cuda":
            parts = [part.pinned() for part in parts]
        return StepData(parts=parts, num_learnt=int(whole.learnt.sum()))

    def _backward(self, data: StepData) -> dict[str, Tensor]:
        """Add up the gradients of the step's rows. Returns sums over all processes, on the device.

        Losses are divided by the number of learnt tokens, which every process knows beforehand, so that half-precision
        gradients do not overflow. `_scale_gradients` corrects for the weight that the losses turn out to have.
        """
        self.nominal = max(1, data.num_learnt)
        added: dict[str, Tensor] = {}
        for number, batch in enumerate(data.parts, 1):
            last = number == len(data.parts)
            with self.accelerator.no_sync(self.model) if not last else nullcontext():
                loss = cast(Loss, self.model(batch.to(self.accelerator.device)))
                self.accelerator.backward(loss.total / self.nominal)
            sums = {"total": loss.total.detach(), "weight": loss.weight, **loss.parts}
            for name, value in sums.items():
                value = torch.as_tensor(value, dtype=torch.float64, device=self.accelerator.device).detach()
                added[name] = added.get(name, torch.zeros_like(value)) + value
        # The clock of one process decides for all.
        due = self.accelerator.is_main_process and self._save_due()
        added["save_due"] = torch.tensor(float(due), dtype=torch.float64, device=self.accelerator.device)
        names = sorted(added)
        summed = cast(Tensor, self.accelerator.reduce(torch.stack([added[name] for name in names]), "sum"))
        return dict(zip(names, summed, strict=True))

    def _scale_gradients(self, weight: Tensor) -> None:
        """Make the gradient that of the mean over the step's weight: so far it is a mean over processes."""
        factor = torch.where(weight == 0, 0.0, self.accelerator.num_processes * self.nominal / weight)
        # On another device nobody waits to see that it is 1.
        scale = float(factor) if factor.device.type == "cpu" else factor
        if isinstance(scale, Tensor) or scale != 1:
            for parameter in self._trained():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)

    def _clip(self) -> Tensor:
        """Scale a long gradient down. Returns its length."""
        longest = self.settings.clip or torch.inf
        norm = self.accelerator.clip_grad_norm_(self._trained(), longest)
        if norm is None:
            return torch.zeros((), device=self.accelerator.device)
        return norm.full_tensor() if isinstance(norm, DTensor) else torch.as_tensor(norm)

    def _on_host(self, values: Mapping[str, Tensor]) -> dict[str, float]:
        """Numbers of a step in one copy, which waits for the device. The step waits nowhere else."""
        there = torch.stack([value.to(self.accelerator.device, torch.float64) for value in values.values()])
        return dict(zip(values, there.tolist(), strict=True))

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def _not_finite(self, what: str, value: float) -> InputError:
        return InputError(
            f"the {what} is {value} at step {self.step + 1}; use a lower learning rate or a longer "
            f"warm-up, in another folder; the last checkpoint is that of step {self.saved_at}"
        )

    def _look(self) -> None:
        """Measure the drafter, and keep it if it is the best."""
        if self.watch is None:
            return
        watched: Watched | None = None
        with processes.whole(self.model):
            if self.accelerator.is_main_process:
                self.learner.eval()
                with self.accelerator.autocast():
                    watched = self.watch.look(cast(Judging, self.learner), self.accelerator.device)
                if self.watch.decode is not None:
                    watched = replace(watched, decoded=self.watch.decode(self.learner))
                self.learner.train()
                score = self.watch.score(watched)
                if self.best is None or score > self.best.score:
                    self.best = BestDrafter(step=self.step, score=score)
                    if self.settings.keep_best:
                        checkpoint.write_folder(self.folder / f"best-{self.step:08d}", self.learner.write)
        self.accelerator.wait_for_everyone()
        self.watched = watched
        if watched is not None:
            self._log("watch", watched.record())

    def _save_due(self) -> bool:
        """Whether it is so long since the last checkpoint that another is worth its time."""
        wait = min(self.settings.save_minutes * 60, max(FIRST_SAVE, self.saved - self.began))
        return time.perf_counter() - self.saved >= max(wait, self.save_seconds / SAVING)

    def _save(self) -> None:
        """Write a checkpoint, then delete what it makes useless."""
        begin = time.perf_counter()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        weights, moments = get_state_dict(self.model, self.optimizer.optimizer, options=options)
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            best = None if self.best is None else {"step": self.best.step, "score": self.best.score}
            state = {
                "step": self.step,
                "identity": self.identity,
                "best": best,
                "weights": weights,
                "moments": moments,
                "scaler": None if scaler is None else scaler.state_dict(),
            }
            checkpoint.save(self.folder, self.step, state)
            kept = "" if self.best is None else f"best-{self.best.step:08d}"
            checkpoint.delete_folders(self.folder, "best-*", kept)
        self.accelerator.wait_for_everyone()
        self.saved, self.saved_at = time.perf_counter(), self.step
        self.save_seconds = self.saved - begin

    def _resume(self) -> None:
        """Go on from the newest checkpoint if there is one."""
        shared: list[Any] = [None]
        state: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            checkpoint.make_folder(self.folder)
            file = checkpoint.newest(self.folder)
            if file is not None:
                state = checkpoint.read(file)
                shared = [{name: state[name] for name in ("step", "identity", "best", "scaler")}]
        broadcast_object_list(shared)
        if shared[0] is None:
            return
        check_same(shared[0]["identity"], self.identity, self.out)
        several = self.accelerator.num_processes > 1
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=several, strict=False)
        set_state_dict(
            self.model,
            self.optimizer.optimizer,
            model_state_dict=state.get("weights", {}),
            optim_state_dict=state.get("moments", {}),
            options=options,
        )
        self.step = int(shared[0]["step"])
        self.best = None if shared[0]["best"] is None else BestDrafter(**shared[0]["best"])
        if self.accelerator.scaler is not None and shared[0]["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(shared[0]["scaler"])

    def _write_settings(self) -> None:
        count = sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)
        device = self.accelerator.device.type
        ran = {"device": device, "fused": device == "cuda", "num_processes": self.accelerator.num_processes}
        ran["divided"] = processes.is_divided(self.model)
        self._log("settings", {**self.identity, **ran, "num_parameters": count})

    def _log(self, kind: str, numbers: Mapping[str, Any]) -> None:
        if self.journal is not None:
            self.journal.add(kind, self.step, numbers)


def _seed(seed: int, step: int, process: int) -> int:
    return int(key_of(Purpose.LIBRARIES, seed, step, process).generate_state(1, np.uint64)[0] >> 1)
