"""What a run of training is told."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.core.inputs import InputError
from outrider.core.option import Bounds, check, option

FREE = ("micro_batch_size", "save_every", "save_minutes", "log_every", "device", "tracker")
"""Settings that may change when a run goes on. They change its weights by rounding at most."""
PRECISIONS = ("no", "bf16", "fp16")
SCHEDULES = ("cosine", "constant")
TENSORBOARD = "tensorboard"
TRACKERS = (TENSORBOARD, "wandb", "mlflow", "trackio", "swanlab", "comet_ml", "clearml", "dvclive", "aim")
"""The experiment trackers that accelerate knows."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How a drafter is trained.

    Attributes:
        steps: Optimizer steps.
        learning_rate: The highest learning rate.
        warmup: Steps in which the learning rate rises from 0.
        schedule: What follows the warm-up: `cosine` falls to `min_lr_ratio`, `constant` stays.
        min_lr_ratio: The last learning rate of `cosine`, as a fraction of the highest.
        batch_size: Rows of an optimizer step, over all processes.
        micro_batch_size: Rows that a process runs at once; None runs its whole share. Gradients add up.
        max_length: Most tokens of a row.
        clip: The longest gradient; a longer one is scaled down. None never scales.
        weight_decay: AdamW's decay of matrices; vectors, such as norms and biases, do not decay.
        beta1: AdamW's average of gradients.
        beta2: AdamW's average of squared gradients.
        precision: `no` computes in the weights' own dtype; `bf16` and `fp16` compute most products in that dtype. The
            weights themselves stay float32. None is `bf16` on a GPU that computes in it, and elsewhere `no`.
        seed: Of the order of the data and of every draw.
        save_every: Most steps between checkpoints.
        save_minutes: Most minutes between checkpoints. The first ones of a run come sooner, from ten seconds on.
        watch_every: Steps between measurements of acceptance.
        log_every: Steps between lines of the log.
        keep_best: Keep the drafter with the highest block efficiency, not the last.
        device: `cpu` stays on the CPU; None uses the GPU where there is one.
        tracker: Where curves go besides the log: `tensorboard`, to files in the run's folder, or another tracker that
            accelerate knows and that is installed, such as `wandb` or `mlflow`; several with commas between them.
    """

    steps: int = option(1000, least=1)
    learning_rate: float = option(3e-4, least=0)
    warmup: int = option(50, least=0)
    schedule: str = option("cosine", among=SCHEDULES)
    min_lr_ratio: float = option(0.1, least=0, most=1)
    batch_size: int = option(32, least=1)
    micro_batch_size: int | None = option(None, least=1)
    max_length: int = option(512, least=2)
    clip: float | None = option(1.0, above=0, finite=False)
    weight_decay: float = option(0.01, least=0)
    beta1: float = option(0.9, least=0, below=1)
    beta2: float = option(0.95, least=0, below=1)
    precision: str | None = option(None, among=PRECISIONS)
    seed: int = option(0, least=0)
    save_every: int = option(200, least=1)
    save_minutes: float = option(3.0, least=0)
    watch_every: int = option(200, least=1)
    log_every: int = option(10, least=1)
    keep_best: bool = True
    device: str | None = None
    tracker: str = "tensorboard"

    def __post_init__(self) -> None:
        check(self)
        for each in self.trackers:
            Bounds(among=TRACKERS).check("tracker", each)
        if self.device not in (None, "cpu"):
            raise InputError(
                f"device must be cpu or left out, got {self.device!r}; choose among GPUs with CUDA_VISIBLE_DEVICES"
            )

    @property
    def trackers(self) -> list[str]:
        """The names of the trackers.

        Example:
            >>> TrainSettings(tracker="tensorboard,wandb").trackers
            ['tensorboard', 'wandb']
        """
        return list(dict.fromkeys(each.strip() for each in self.tracker.split(",")))

    def rate(self, step: int) -> float:
        r"""The learning rate of a step, from 0.

        In the warm-up of $w$ steps it is $\eta (t + 1) / w$. Then `cosine` is
        $\eta (f + (1 - f) (1 + \cos \pi x) / 2)$, with $f$ the final rate and $x$ the share of the other steps
        that is done.

        Example:
            >>> settings = TrainSettings(steps=12, learning_rate=1.0, warmup=2, min_lr_ratio=0.0)
            >>> [round(settings.rate(step), 3) for step in (0, 1, 2, 7, 11)]
            [0.5, 1.0, 1.0, 0.5, 0.024]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        if self.schedule == "constant":
            return self.learning_rate
        share = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (self.min_lr_ratio + (1 - self.min_lr_ratio) * (1 + math.cos(math.pi * share)) / 2)

    def fixed(self) -> dict[str, Any]:
        """The settings that must stay the same when a run goes on."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in FREE}


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], place: object) -> None:
    """Raise InputError unless a run that goes on has the settings it began with.

    Args:
        before: What the run began with.
        now: What it was told this time.
        place: The run's folder, for the message.
    """
    other = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if other:
        differences = ", ".join(f"{name} {before.get(name)!r} instead of {now.get(name)!r}" for name in other)
        raise InputError(f"{place} holds a run with {differences}; give these, or another folder")
