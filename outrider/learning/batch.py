"""The texts that a drafter learns from, and the batch of one step, as tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from outrider.core.types import InputError
from outrider.learning.top_rows import TopRows

PADDING = 0
"""The token id behind the end of a row. No token of the row sees it."""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text as token ids.

    Attributes:
        tokens: The token ids.
        start: Index of the first token that a drafter learns to guess. The tokens before it are a prompt. 0: there is
            no prompt. The number of tokens: there is only a prompt.
        domain: The kind of text, where the corpus names one.
    """

    tokens: Int[np.ndarray, " length"]
    start: int
    domain: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start <= len(self.tokens):
            raise InputError(f"start must be in 0..{len(self.tokens)}, the number of tokens, got {self.start}")

    @property
    def prompt(self) -> Int[np.ndarray, " prompt"]:
        """The tokens before `start`."""
        return self.tokens[: self.start]


@dataclass(frozen=True, kw_only=True)
class HostRows:
    """What the host knows of a batch, so that places are chosen without waiting for a device.

    Attributes:
        tokens: The token ids.
        learnt: Whether a drafter learns to guess the token.
        lengths: Tokens of each row without padding.
    """

    tokens: Int[np.ndarray, "rows length"]
    learnt: Bool[np.ndarray, "rows length"]
    lengths: Int[np.ndarray, " rows"]


@dataclass(frozen=True, kw_only=True)
class FewRows:
    """The target's logits of some tokens, at some places of a batch.

    Attributes:
        logits: Of these tokens.
        covered: Whether the likeliest of all tokens is one of them.
        numbers: For each place of the batch, which of these rows it has.
    """

    logits: Float[Tensor, "n few"]
    covered: Bool[Tensor, " n"]
    numbers: Int[Tensor, "rows length"]

    def at(
        self, rows: Int[Tensor, " m"], places: Int[Tensor, " m"]
    ) -> tuple[Float[Tensor, "m few"], Bool[Tensor, " m"]]:
        """Logits at some places, and whether the likeliest token is among these there."""
        numbers = self.numbers[rows, places]
        return self.logits.index_select(0, numbers), self.covered[numbers]


@dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """Rows of one optimizer step: the global batch, or a share of it. Rows are padded on the right.

    Attributes:
        tokens: The token ids.
        learnt: Whether a drafter learns to guess the token; never at index 0. Logits at index j - 1 guess token j.
        lengths: Tokens of each row without padding.
        step: Number of the optimizer step, from 0.
        rows: Numbers of these rows in the global batch. A random draw for a row is keyed by seed, step and this number.
        hidden: Captured states of the target by tap; empty if none were captured. 0 in the padding.
        rows_of_target: Captured likeliest tokens of the target's logits; None if they were not captured.
        logits_of_target: The target's captured logits; None if they were not captured.
        few_of_target: The target's logits of the tokens that a head can guess; None if they were not made.
        known: What the host knows of the rows, for a batch on a device; None if it must be copied from there.
    """

    tokens: Int[Tensor, "rows length"]
    learnt: Bool[Tensor, "rows length"]
    lengths: Int[Tensor, " rows"]
    step: int
    rows: range
    hidden: Mapping[int, Float[Tensor, "rows length hidden"]] = field(default_factory=dict)
    rows_of_target: TopRows | None = None
    logits_of_target: Float[Tensor, "rows length vocab"] | None = None
    few_of_target: FewRows | None = None
    known: HostRows | None = None

    @property
    def host(self) -> HostRows:
        """The rows on the host."""
        if self.known is not None:
            return self.known
        return HostRows(
            tokens=self.tokens.cpu().numpy(), learnt=self.learnt.cpu().numpy(), lengths=self.lengths.cpu().numpy()
        )

    def to(self, device: torch.device) -> "TrainBatch":
        """The batch on a device. From pinned memory a GPU copies it by itself."""
        if device == self.tokens.device:
            return self
        moved = self._each(lambda tensor: tensor.to(device, non_blocking=device.type == "cuda"))
        return replace(moved, known=self.host)

    def pinned(self) -> "TrainBatch":
        """The batch in memory of the host from which a GPU copies by itself."""
        return self._each(_pinned)

    def _each(self, change: Callable[[Tensor], Tensor]) -> "TrainBatch":
        """The batch with every tensor changed."""
        top, logits = self.rows_of_target, self.logits_of_target
        if top is not None:
            top = TopRows(tokens=change(top.tokens), log_probs=change(top.log_probs), log_rest=change(top.log_rest))
        return replace(
            self,
            tokens=change(self.tokens),
            learnt=change(self.learnt),
            lengths=change(self.lengths),
            hidden={tap: change(states) for tap, states in self.hidden.items()},
            rows_of_target=top,
            logits_of_target=None if logits is None else change(logits),
        )


def on_device(values: Shaped[np.ndarray, "..."], device: torch.device) -> Tensor:
    """Numbers of the host on a device. The host does not wait for the copy.

    Example:
        >>> on_device(np.arange(3), torch.device("cpu"))
        tensor([0, 1, 2])
    """
    tensor = torch.from_numpy(values)
    return _pinned(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _pinned(tensor: Tensor) -> Tensor:
    """The tensor in pinned memory, as one piece: a GPU copies pieces by way of other memory."""
    return tensor.contiguous().pin_memory()
