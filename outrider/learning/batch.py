"""The texts that a drafter learns from, and the batch of one step, as tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
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
class Batch:
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
    """

    tokens: Int[Tensor, "rows length"]
    learnt: Bool[Tensor, "rows length"]
    lengths: Int[Tensor, " rows"]
    step: int
    rows: range
    hidden: Mapping[int, Float[Tensor, "rows length hidden"]] = field(default_factory=dict)
    rows_of_target: TopRows | None = None
    logits_of_target: Float[Tensor, "rows length vocab"] | None = None

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device."""
        top, logits = self.rows_of_target, self.logits_of_target
        if top is not None:
            top = TopRows(
                tokens=top.tokens.to(device), log_probs=top.log_probs.to(device), log_rest=top.log_rest.to(device)
            )
        return replace(
            self,
            tokens=self.tokens.to(device),
            learnt=self.learnt.to(device),
            lengths=self.lengths.to(device),
            hidden={tap: states.to(device) for tap, states in self.hidden.items()},
            rows_of_target=top,
            logits_of_target=None if logits is None else logits.to(device),
        )
