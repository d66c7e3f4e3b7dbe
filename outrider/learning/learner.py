"""What is trained: a torch module with a loss, which can write the drafter and say how good its drafts are."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Float, Real
from torch import Tensor, nn

from outrider.core.inputs import InputError
from outrider.learning.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of some rows, as sums.

    The loop divides by the weight of the whole step, over all processes and micro-batches.

    Attributes:
        total: Sum over the learnt tokens, times their weights.
        weight: Sum of the weights.
        parts: Other sums for the log. They are divided by the same weight.
    """

    total: Float[Tensor, ""]
    weight: Real[Tensor, ""]
    parts: Mapping[str, Real[Tensor, ""]] = field(default_factory=dict)


class Learner(nn.Module):
    """What is trained: all its parameters that require a gradient. Every one of them takes part in every loss.

    What is not trained, such as the target, is no submodule, so that it is neither saved nor divided among processes;
    a tuple hides it from torch. A learner that is watched also has the method of `Judging`.
    """

    captured_taps: tuple[int, ...] = ()
    """The hidden states of the target that spare it the target's forwards, if they come with its batches."""

    @abstractmethod
    def forward(self, batch: TrainBatch) -> Loss:
        """The loss of rows. A random draw for a row is keyed by the seed, the step and the number of the row."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the drafter into an empty folder, as a user loads it."""

    def pack(self) -> None:
        """Run the models' forwards along the texts of a step without padding: several texts stand in one row, and none
        sees another. This changes no loss but by rounding.

        Raises:
            InputError: The learner or one of the models cannot do so.
        """
        raise InputError("this drafter is trained on rows of one text each; leave out --pack")

    def findings(self, out: Path, batches: Iterable[TrainBatch]) -> Mapping[str, str]:
        """What is found out about the drafter after its training, in words for a person, by name; by default nothing.

        Args:
            out: The folder with the drafter that was kept.
            batches: The watched texts.
        """
        return {}


@dataclass(frozen=True, kw_only=True)
class JudgedDrafts:
    r"""Drafts along given texts. A row is a step of the decoding loop that begins at a place of a text.

    Attributes:
        log_ratios: $\log q(y) / p(y)$ of the text's tokens, at temperature 1.
        agrees: Whether the drafter's likeliest token is the target's, after the text's own tokens.
    """

    log_ratios: Float[np.ndarray, "steps depth"]
    agrees: Bool[np.ndarray, "steps depth"]


@runtime_checkable
class Judging(Protocol):
    """A learner whose drafts can be judged along texts."""

    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        """The drafts of this many tokens that begin at every place of the batch where so many tokens are learnt."""
        ...
