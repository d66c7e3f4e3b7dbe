"""Jakiro: an EAGLE head whose second output learns to guess one token further."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.eagle import eagle_config
from outrider.heads.files import write_head
from outrider.heads.jakiro import JakiroFile, JakiroHead, jakiro_tensors
from outrider.learning.batch import Batch
from outrider.learning.divergences import Divergence
from outrider.learning.objective import Places
from outrider.training.eagle import Eagle, eagle_head


class Jakiro(Eagle):
    r"""EAGLE-1's losses for $h_1$, and in each pass the same losses for $h_2$, which guesses one token further.

    Args:
        head: The head, in float32.
        contrast: Weight of the losses of $h_2$; those of $h_1$ have the weight 1.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2502.06282
    """

    head: JakiroHead

    def __init__(
        self,
        head: JakiroHead,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        num_guesses: int = 1,
        decay: float = 1.0,
        regression: float = 10.0,
        noise: float = 0.0,
        seed: int = 0,
        contrast: float = 0.5,
    ) -> None:
        super().__init__(
            head,
            target,
            loss=loss,
            num_guesses=num_guesses,
            decay=decay,
            regression=regression,
            noise=noise,
            seed=seed,
        )
        if contrast < 0:
            raise InputError(f"contrast must be >= 0, got {contrast}")
        self._contrast = contrast

    def drafted(self, batch: Batch, count: int) -> Iterator[Float[Tensor, "rows length parts"]]:
        """As `guesses`, but the last of several guesses is that of $h_2$."""
        head_output = None
        for head_output in self.guesses(batch, max(1, count - 1)):
            yield head_output
        if count > 1 and head_output is not None:
            yield self.head.further(head_output)

    def beside(
        self, batch: Batch, hidden: Float[Tensor, "rows length parts"], number: int, places: Places
    ) -> Float[Tensor, ""]:
        """The distances of $h_1$ from the next features, and all losses of $h_2$."""
        further, behind = self.head.further(hidden), Places.of(batch, number + 1)
        values, _ = self._values(batch, further, number + 1, behind)
        contrast = values + super().beside(batch, further, number + 1, behind)
        return super().beside(batch, hidden, number, places) + self._contrast * contrast

    def write(self, folder: Path) -> None:
        """Write the head with the names of its authors' tensors."""
        write_head(folder, eagle_config(self.head, self.shape, self.dtype), jakiro_tensors(self.head), self.dtype)


def jakiro_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    unrolled: int = 1,
    decay: float = 1.0,
    regression: float = 10.0,
    noise: float = 0.0,
    bias: bool = False,
    expert_size: int | None = None,
    contrast: float = 0.5,
    mixture: str = "features",
    begin: str | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Jakiro:
    """The learner for a new Jakiro head of a target, or for a head on disk.

    Args:
        unrolled: Passes that are learnt; each also learns the guess of $h_2$.
        bias: Whether the fusion has a bias.
        expert_size: Width of each expert's feed-forward; None: the target's hidden size.
        contrast: As for `Jakiro`.
        mixture: What is mixed; with `begin`, what the head on disk says.
        begin: Directory or hub id of a head to train further; the sizes are its own.

    Raises:
        InputError: A size makes no sense, or the head on disk does not fit the target.
    """
    head = eagle_head(
        target,
        JakiroFile,
        bias=bias,
        intermediate_size=None,
        begin=begin,
        seed=seed,
        expert_size=expert_size,
        mixture=mixture,
    )
    return Jakiro(
        cast(JakiroHead, head).train().to(device or target.device),
        target,
        loss=loss,
        num_guesses=unrolled,
        decay=decay,
        regression=regression,
        noise=noise,
        seed=seed,
        contrast=contrast,
    )
