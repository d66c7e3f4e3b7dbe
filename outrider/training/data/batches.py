"""Batches of documents, each a function of a seed and a step alone, so that a run can continue at any step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Purpose, corpus_generator
from outrider.core.types import InputError
from outrider.learning.batch import PADDING, Document, TrainBatch
from outrider.learning.top_rows import TopRows


@dataclass(frozen=True, kw_only=True)
class CapturedStates:
    """What was captured of the target along one document.

    Attributes:
        hidden: States by tap.
        rows: The likeliest tokens after each token, with the mass of the rest; None if they were not captured.
        logits: Logits after each token; None if they were not captured.
    """

    hidden: Mapping[int, Float[Tensor, "length hidden"]]
    rows: TopRows | None = None
    logits: Float[Tensor, "length vocab"] | None = None


@runtime_checkable
class HasStates(Protocol):
    """States of the target by the number of the document."""

    def states(self, number: int, first: int = 0, last: int | None = None) -> CapturedStates:
        """The states of tokens `first` to before `last` of a document."""
        ...


class Batches:
    """The batches of a run.

    Every document comes once before any comes again. A document longer than `max_length` is cut to a part of that
    length, drawn from all parts that have a token to learn.

    Args:
        documents: The corpus.
        batch_size: Rows of the global batch.
        max_length: Most tokens of a row.
        seed: Of the order and of the parts.
        captured: States of the target along the documents; None if they were not captured.

    Raises:
        InputError: A number is too small, or a document has no token that a drafter can learn.

    Example:
        >>> corpus = [Document(tokens=np.arange(9), start=4), Document(tokens=np.arange(3), start=0)]
        >>> batch = Batches(corpus, batch_size=2, max_length=8, seed=0).batch(0)
        >>> batch.tokens.shape, batch.lengths.sort().values.tolist(), batch.rows
        (torch.Size([2, 8]), [3, 8], range(0, 2))
    """

    def __init__(
        self,
        documents: Sequence[Document],
        *,
        batch_size: int,
        max_length: int,
        seed: int,
        captured: HasStates | None = None,
    ) -> None:
        for name, value, least in (("batch_size", batch_size, 1), ("max_length", max_length, 2), ("seed", seed, 0)):
            if value < least:
                raise InputError(f"{name} must be >= {least}, got {value}")
        if not documents:
            raise InputError("the corpus is empty")
        self.documents, self.captured = documents, captured
        self.batch_size, self.max_length, self.seed = batch_size, max_length, seed
        self._order = lru_cache(maxsize=2)(self._permutation)

    def batch(self, step: int) -> TrainBatch:
        """The global batch of a step. Raises InputError if a document has no token that a drafter can learn."""
        parts = [self._part(step * self.batch_size + row) for row in range(self.batch_size)]
        length = max(len(part.tokens) for part in parts)
        tokens = torch.full((self.batch_size, length), PADDING)
        learnt = torch.zeros(self.batch_size, length, dtype=torch.bool)
        for row, part in enumerate(parts):
            tokens[row, : len(part.tokens)] = torch.from_numpy(part.tokens)
            learnt[row, max(part.start, 1) : len(part.tokens)] = True
        lengths = torch.tensor([len(part.tokens) for part in parts])
        bare = TrainBatch(tokens=tokens, learnt=learnt, lengths=lengths, step=step, rows=range(self.batch_size))
        return bare if self.captured is None else _with_states(bare, [self._states(part) for part in parts])

    @staticmethod
    def share(batch: TrainBatch, part: range) -> TrainBatch:
        """Some rows of a batch, no wider than they need.

        Args:
            part: Numbers of the rows in the global batch, as in `TrainBatch.rows`.
        """
        if part.step != 1 or not set(part) <= set(batch.rows) or not part:
            raise ValueError(f"the rows must be some of {batch.rows}, one after the other, got {part}")
        begin = part.start - batch.rows.start
        lengths = batch.lengths[begin : begin + len(part)]
        where = (slice(begin, begin + len(part)), slice(0, int(lengths.max())))
        top, logits = batch.rows_of_target, batch.logits_of_target
        return TrainBatch(
            tokens=batch.tokens[where],
            learnt=batch.learnt[where],
            lengths=lengths,
            step=batch.step,
            rows=part,
            hidden={tap: states[where] for tap, states in batch.hidden.items()},
            rows_of_target=None if top is None else top[where],
            logits_of_target=None if logits is None else logits[where],
        )

    def _permutation(self, epoch: int) -> Int[np.ndarray, " documents"]:
        return corpus_generator(Purpose.ORDER, seed=self.seed, index=epoch).permutation(len(self.documents))

    def _part(self, place: int) -> "_Part":
        """The tokens of the row at a place in the stream of all rows of all steps."""
        epoch, within = divmod(place, len(self.documents))
        number = int(self._order(epoch)[within])
        document = self.documents[number]
        length, start = len(document.tokens), max(document.start, 1)
        if start >= length:
            raise InputError(
                f"document {number} has no token to learn: it has {length} tokens and its prompt has {document.start}"
            )
        first, last = max(0, start + 1 - self.max_length), length - self.max_length
        if last > 0:
            dice = corpus_generator(Purpose.CROP, seed=self.seed, index=place)
            first = int(dice.integers(first, last, endpoint=True))
        tokens = document.tokens[first : first + self.max_length]
        return _Part(number=number, first=first, tokens=tokens, start=max(document.start - first, 0))

    def _states(self, part: "_Part") -> CapturedStates:
        if self.captured is None:
            raise ValueError("no states were captured")
        return self.captured.states(part.number, part.first, part.first + len(part.tokens))


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part of a document.

    Attributes:
        number: Of the document.
        first: Index of the part's first token in the document.
        start: Index of the first token to learn in the part.
    """

    number: int
    first: int
    tokens: Int[np.ndarray, " length"]
    start: int


def _with_states(batch: TrainBatch, states: Sequence[CapturedStates]) -> TrainBatch:
    """A batch with captured states."""
    length = batch.tokens.shape[1]
    tops = [each.rows for each in states if each.rows is not None]
    whole = [each.logits for each in states if each.logits is not None]
    return replace(
        batch,
        hidden={tap: _stack([each.hidden[tap] for each in states], length) for tap in states[0].hidden},
        rows_of_target=TopRows(
            tokens=_stack([top.tokens for top in tops], length),
            log_probs=_stack([top.log_probs for top in tops], length),
            log_rest=_stack([top.log_rest for top in tops], length),
        )
        if tops
        else None,
        logits_of_target=_stack(whole, length) if whole else None,
    )


def _stack(tensors: Sequence[Tensor], length: int) -> Tensor:
    """Tensors of different lengths as one, with zeros behind each."""
    stacked = tensors[0].new_zeros(len(tensors), length, *tensors[0].shape[1:])
    for row, tensor in enumerate(tensors):
        stacked[row, : len(tensor)] = tensor
    return stacked
