"""Positions at which a draft model sees the tokens of its training texts, and acceptance by position.

A text that is shorter than the contexts of its use trains the first positions alone. A draft model with a table of
absolute positions then has rows in the table that were never trained: there, texts begin at drawn positions (random
padding, https://arxiv.org/abs/2305.04859). For rotary positions that changes nothing, because attention depends on
differences alone. What is rare there is a large distance, and drawn gaps between tokens train it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Purpose, step_generator
from outrider.core.option import check, option
from outrider.core.types import InputError
from outrider.learning.batch import TrainBatch, on_device


@runtime_checkable
class Positions(Protocol):
    """The positions of a batch's tokens. A row's draws are keyed by the seed, the step and the number of the row."""

    def __call__(self, batch: TrainBatch) -> Int[Tensor, "rows length"]:
        """The position of each token, padding included; each row increases."""
        ...


@dataclass(frozen=True, kw_only=True)
class RandomPadding:
    r"""Each text of $n$ tokens begins at a position $r$ drawn uniformly from $0 \ldots N - n$.

    For draft models with a table of absolute positions, such as GPT-2 and OPT. It changes nothing under rotary
    positions, up to rounding.

    Attributes:
        limit: $N$, the number of positions.
        seed: Of the draws.

    References:
        Tao et al. 2023, https://arxiv.org/abs/2305.04859
    """

    limit: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check_limit(self.limit)

    def __call__(self, batch: TrainBatch) -> Int[Tensor, "rows length"]:
        """The positions of the tokens. Padding behind a text stays below the limit."""
        _check_room(batch, self.limit)
        first = []
        for row, count in zip(batch.rows, batch.host.lengths.tolist(), strict=True):
            dice = step_generator(Purpose.PADDING, seed=self.seed, step=batch.step, row=row)
            first.append(int(dice.integers(0, self.limit - count, endpoint=True)))
        places = torch.tensor(first)[:, None] + torch.arange(batch.tokens.shape[1])
        return on_device(places.clamp_max(self.limit - 1).numpy(), batch.tokens.device)


@dataclass(frozen=True, kw_only=True)
class RandomGaps:
    """Positions jump at drawn places of a text, so that distances of a long context are trained on short texts.

    For draft models with rotary positions. The last tokens stay together, because drafting goes on from near tokens.

    Attributes:
        limit: The number of positions.
        num_gaps: Jumps in a text, at most.
        together: Tokens at the end of a text that have no jump between them.
        seed: Of the draws.
    """

    limit: int
    num_gaps: int = option(2, least=1)
    together: int = option(32, least=1)
    seed: int = 0

    def __post_init__(self) -> None:
        _check_limit(self.limit)
        check(self)

    def __call__(self, batch: TrainBatch) -> Int[Tensor, "rows length"]:
        """The positions of the tokens. A text with no more tokens than `together` has no jump."""
        _check_room(batch, self.limit)
        width = batch.tokens.shape[1]
        rows = [
            self._row(batch.step, row, count, width)
            for row, count in zip(batch.rows, batch.host.lengths.tolist(), strict=True)
        ]
        return on_device(np.stack(rows), batch.tokens.device)

    def _row(self, step: int, row: int, count: int, width: int) -> Int[np.ndarray, " width"]:
        dice, places = step_generator(Purpose.GAPS, seed=self.seed, step=step, row=row), np.arange(width)
        # A jump before token i moves it and all later tokens. The last `together` tokens move as one.
        allowed = np.arange(1, count - self.together + 1)
        if not len(allowed) or count == self.limit:
            return places.clip(max=self.limit - 1)
        where = dice.choice(allowed, size=min(self.num_gaps, len(allowed)), replace=False)
        # Of all skipped positions, each gap gets what lies between two drawn borders.
        skipped = int(dice.integers(1, self.limit - count, endpoint=True))
        borders = np.sort(dice.integers(0, skipped, size=len(where) - 1, endpoint=True))
        sizes = np.diff(np.concatenate([[0], borders, [skipped]]))
        for place, size in zip(where.tolist(), sizes.tolist(), strict=True):
            places[place:] += size
        return places.clip(max=self.limit - 1)


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Acceptance at the positions of a range.

    Attributes:
        first: The first position.
        end: The position behind the last; None: no end.
        count: How many rows there are.
        acceptance: Their mean; None if there are none.
    """

    first: int
    end: int | None
    count: int
    acceptance: float | None


def acceptance_by_position(
    acceptance: Float[np.ndarray, " n"], positions: Int[np.ndarray, " n"], borders: Sequence[int] = (512, 1024, 2048)
) -> list[Bucket]:
    """Mean acceptance in buckets of absolute position.

    Args:
        acceptance: Of each row: its probability, or whether the token was accepted.
        positions: The absolute position of each row's token.
        borders: Where buckets end, in increasing order; the last bucket has no end.

    Raises:
        InputError: The borders do not increase from above 0.

    Example:
        >>> buckets = acceptance_by_position(np.array([1.0, 0.5, 0.0]), np.array([3, 9, 12]), borders=(10,))
        >>> [(bucket.first, bucket.end, bucket.count, bucket.acceptance) for bucket in buckets]
        [(0, 10, 2, 0.75), (10, None, 1, 0.0)]
    """
    if any(high <= low for low, high in zip([0, *borders], borders, strict=False)):
        raise InputError(f"borders must increase from above 0, got {list(borders)}")
    which = np.searchsorted(np.array(borders), positions, side="right")
    buckets = []
    for i, (first, end) in enumerate(zip([0, *borders], [*borders, None], strict=True)):
        values = acceptance[which == i]
        mean = float(values.mean()) if len(values) else None
        buckets.append(Bucket(first=first, end=end, count=len(values), acceptance=mean))
    return buckets


def positions_of(name: str, limit: int, seed: int) -> Positions | None:
    """The positions that are named `padding` or `gaps`, with a limit; `plain` is None.

    Raises:
        InputError: There is no such name.
    """
    if name == "plain":
        return None
    if name == "padding":
        return RandomPadding(limit=limit, seed=seed)
    if name == "gaps":
        return RandomGaps(limit=limit, seed=seed)
    raise InputError(f"unknown positions {name!r}; use plain, padding or gaps")


def _check_limit(limit: int) -> None:
    if limit < 1:
        raise InputError(f"the number of positions must be >= 1, got {limit}")


def _check_room(batch: TrainBatch, limit: int) -> None:
    longest = int(batch.host.lengths.max())
    if longest > limit:
        raise InputError(f"a text of {longest} tokens does not fit into {limit} positions; lower max_length")
