"""TETRIS: draft longer than can be verified, and verify the most promising tokens of the whole batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Step
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class TetrisLength(CheckedOptions):
    r"""Each request drafts `num_speculative_tokens + extra` tokens; of all tokens of the batch, the best are verified,
    `num_speculative_tokens` per request on average.

    A token's value estimates the chance that it and all tokens before it are accepted. The criterion `predictable` is
    $\min_{k \le j} (\sum_{l<k} \log q(x_l) + \log \hat a_k)$ with $\hat a$ the largest probability of the row, which
    does not read the token itself. So whether a token is verified does not depend on which token it is. The published
    criterion, `original`, is $\sum_{l \le j} \log q(x_l)$: it drops drawn tokens because of their own probability and
    is not lossless above temperature 0.

    A request's draws do not depend on the other requests, but the number of tokens that are verified does. So a seed
    repeats an output only in the same batch.

    References:
        Wu et al. 2025, TETRIS. https://arxiv.org/abs/2502.15197
    """

    constant: ClassVar[bool] = False

    num_speculative_tokens: int = option(4, least=1)
    extra: int = option(2, least=0)
    criterion: Literal["predictable", "original"] = "predictable"

    @property
    def lossy(self) -> str | None:
        if self.criterion == "predictable":
            return None
        return "it drops drawn tokens because of which tokens they are; use criterion=predictable"

    def open(self) -> None:
        return None

    def limit(self, state: object) -> int:
        return self.num_speculative_tokens + self.extra

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> None:
        return None

    def note(self, level: Level, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n 2"]:
        """Log of each token's own probability, and of the row's largest, at temperature 1."""
        if level.proposed is not None:
            return torch.zeros(len(tokens), 2, device=tokens.device)
        chosen = level.scores.gather(1, tokens[:, None].to(level.scores.device))
        return torch.cat([chosen, level.scores.amax(-1, keepdim=True)], 1)

    def share(self, notes: Float[np.ndarray, "requests depth 2"]) -> Int[np.ndarray, " requests"]:
        values = self.values(notes)
        count = min(self.num_speculative_tokens * len(values), int((values > -np.inf).sum()))
        # Of equal values the shallower wins, so that each request keeps the beginning of its draft.
        depth, request = np.meshgrid(np.arange(values.shape[1]), np.arange(len(values)))
        best = np.lexsort([request.ravel(), depth.ravel(), -values.ravel()])[:count]
        return np.bincount(best // values.shape[1], minlength=len(values))

    def values(self, notes: Float[np.ndarray, "requests depth 2"]) -> Float[np.ndarray, "requests depth"]:
        """Log of each token's value, never rising along a draft."""
        chosen, row = notes[..., 0], notes[..., 1]
        if self.criterion == "original":
            return chosen.cumsum(1)
        before = np.concatenate([np.zeros((len(chosen), 1)), chosen.cumsum(1)[:, :-1]], 1)
        return np.minimum.accumulate(before + row, axis=1)
