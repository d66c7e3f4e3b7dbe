"""outrider train steer: train a draft model together with the module that steers it by the target's hidden states."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.cli.train_distill import Task as DistillTask
from outrider.cli.train_distill import run_with
from outrider.learning.batch import Document
from outrider.training.steer import Steered, steered_learner


@dataclass(frozen=True, kw_only=True)
class Task(DistillTask):
    """What was asked for.

    Attributes:
        rank: Rank of the steering; None: a full matrix.
        taps: The target's hidden states that steer; None takes three.
        frozen: Whether the draft model stays as it is.
    """

    rank: int | None
    taps: tuple[int, ...] | None
    frozen: bool


def run(task: Task) -> None:
    """Train, write the steered draft model and the report, and print what was reached."""

    def make(
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        device: torch.device,
        documents: Sequence[Document],
    ) -> Steered:
        return steered_learner(
            str(task.drafter),
            target,
            tokenizer,
            loss=task.divergence,
            num_speculative_tokens=task.depth,
            device=device,
            rank=task.rank,
            taps=task.taps,
            frozen=task.frozen,
            positions=task.positions,
            seed=task.settings.seed,
        )

    taps = None if task.taps is None else list(task.taps)
    about = {"rank": task.rank, "taps": taps, "frozen": task.frozen, "positions": task.positions}
    run_with(task, make, regenerated=task.texts == "target", about={**about, "texts": task.texts}, name="steered")
