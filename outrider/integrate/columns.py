"""The outputs of a batch, column by column, as `generate` has them after each token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from outrider.core.types import Step
from outrider.integrate.batch import GenerateBatch


@dataclass(kw_only=True)
class Columns:
    """The new tokens of a batch; changes in place.

    A column holds one new token of every row. Drafting advances rows unevenly, so a column is settled when every row
    that has not ended has reached it. Then the same happens as in `generate`, in the same order: ended rows get
    padding, criteria are called for all rows, the streamer gets the column. Tokens that a row drew beyond its end are
    dropped.

    Attributes:
        tokens: The tokens that each row has drawn, settled or not.
        logits: Their raw logits, if wanted.
        over: Rows whose requests have ended; they draw no more tokens.
        ended: Rows that ended in a settled column. If rows are not padded, they continue until all rows end.
        sequences: The prompts and the settled columns.
        raw: The raw logits of the settled columns, if wanted; 0 where a row is padded.
        scores: The processed scores of the settled columns, if wanted; 0 where a row is padded.
    """

    batch: GenerateBatch
    streamer: BaseStreamer | None
    tokens: list[list[int]] = field(init=False)
    logits: list[list[Float[Tensor, " vocab"]]] = field(init=False)
    over: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    sequences: Int[Tensor, "rows length"] = field(init=False)
    raw: list[Float[Tensor, "rows vocab"]] = field(default_factory=list)
    scores: list[Float[Tensor, "rows vocab"]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in self.batch.input_ids]
        self.logits = [[] for _ in self.batch.input_ids]
        self.sequences = self.batch.input_ids

    @property
    def complete(self) -> bool:
        """Whether every row has ended."""
        return len(self.ended) == len(self.tokens)

    @property
    def padded(self) -> set[int]:
        """Rows that are padded from now on."""
        return self.ended if self.batch.pads else set()

    def keep_logits(self, step: Step) -> None:
        """Take the logits of a step; `add` takes its tokens."""
        if step.logits is not None:
            self.logits[int(step.request)].extend(step.logits)

    def add(self, row: int, tokens: Sequence[int], over: bool) -> None:
        """Take the tokens that a row has drawn, and whether the row has ended."""
        self.tokens[row].extend(tokens)
        if over:
            self.over.add(row)

    def settle(self) -> None:
        """Settle the columns that all rows have reached."""
        place = self.sequences.shape[1] - self.batch.input_ids.shape[1]
        while not self.complete and all(
            len(row_tokens) > place for row, row_tokens in enumerate(self.tokens) if row not in self.padded
        ):
            self._settle(place)
            place += 1

    def _settle(self, place: int) -> None:
        padded, home = self.padded, self.sequences.device
        if self.batch.keeps_logits:
            self._settle_logits(place)
        drawn = [self.batch.pad if row in padded else row_tokens[place] for row, row_tokens in enumerate(self.tokens)]
        self.sequences = torch.cat([self.sequences, torch.tensor(drawn, device=home)[:, None]], 1)
        last = {row for row in self.over if len(self.tokens[row]) == place + 1}
        if self.batch.callers_criteria:
            scores = tuple(self.scores) if self.batch.keeps_scores else None
            answers = StoppingCriteriaList(self.batch.callers_criteria)(self.sequences, scores)
            last |= set(answers.nonzero().flatten().tolist())
        self.ended = self.ended | last
        if self.streamer is not None:
            self.streamer.put(torch.tensor(drawn))

    def _settle_logits(self, place: int) -> None:
        """The column's raw and processed scores; the batch's own processors see all rows, as in `generate`."""
        zeros = torch.zeros_like(next(rows[place] for rows in self.logits if len(rows) > place))
        padded = self.padded
        raw = torch.stack([zeros if row in padded else rows[place] for row, rows in enumerate(self.logits)])
        raw = raw.to(self.sequences.device)
        self.raw.append(raw)
        if self.batch.keeps_scores:
            scores = raw.clone()
            for processor in self.batch.processors:
                scores = processor(self.sequences, scores)
            self.scores.append(scores.index_fill(0, torch.tensor(sorted(padded), device=raw.device).long(), 0.0))
