"""What settings change in logits before temperature and filters: penalties, biases, processors, in that order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.inputs import InputError
from outrider.core.processors import Processor, is_blind
from outrider.core.texts import Before, texts_table
from outrider.core.types import Sampling
from outrider.core.uploads import column, row_type, upload


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """The changes of rows with given settings. What they need on the device is uploaded once for many calls.

    Attributes:
        per_row: The settings of each row.
        penalties: Of the rows that have some; None if no row has.
        biases: Of all rows; None if there are none.
        per_row_processors: The processors that are asked row by row, for each row.
        together: The processors that end every row's list and read no tokens. They get all rows at once.
    """

    per_row: Sequence[Sampling]
    penalties: "Penalties | None"
    biases: "_Biases | None"
    per_row_processors: Sequence[Sequence[Processor]]
    together: Sequence[Processor]

    @classmethod
    def of(cls, per_row: Sequence[Sampling], like: Float[Tensor, "n vocab"]) -> "Adjustment | None":
        """The changes of rows of these settings; None if there are none. Logits will be as `like`."""
        if not any(s.reads_prefix or s.logit_bias or s.processors for s in per_row):
            return None
        together = _together(per_row)
        return cls(
            per_row=per_row,
            penalties=Penalties.of(per_row, like),
            biases=_Biases.of(per_row, like),
            per_row_processors=[s.processors[: len(s.processors) - len(together)] for s in per_row],
            together=together,
        )

    def __call__(self, logits: Float[Tensor, "n vocab"], before: Callable[[], Before]) -> Float[Tensor, "n vocab"]:
        """The changed logits, in float32 or float64. The logits stay as they are.

        Args:
            before: Returns the text before each row; called only if a row's settings read it.
        """
        has_processors, dtype = any(self.per_row_processors), row_type(logits)
        if has_processors or self.penalties is not None or self.biases is not None:
            scores = logits.to(dtype, copy=True, memory_format=torch.contiguous_format)
        else:
            scores = logits.to(dtype)
        texts = before() if any(s.reads_prefix for s in self.per_row) else None
        if self.penalties is not None and texts is not None:
            self.penalties.take(scores, texts)
        if self.biases is not None:
            scores.view(-1).index_add_(0, self.biases.places, self.biases.values)
        if has_processors:
            scores = torch.stack([self._processed(row, part, texts) for row, part in enumerate(scores)])
        for processor in self.together:
            scores = processor(torch.empty(len(scores), 0, dtype=torch.long, device=scores.device), scores)
        return scores

    def _processed(self, row: int, scores: Float[Tensor, " vocab"], texts: Before | None) -> Float[Tensor, " vocab"]:
        """A row after its own processors. They may change it in place."""
        if texts is not None and self.per_row_processors[row] and self.per_row[row].reads_prefix:
            seen = texts.whole(row, scores.device)
        else:
            seen = torch.empty(0, dtype=torch.long, device=scores.device)
        for processor in self.per_row_processors[row]:
            scores = _run_processor(processor, seen, scores)
        return scores


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """The penalties of some rows, one per row of a column.

    Attributes:
        rows: The penalised rows.
        first: The place of each row's first token in the flat scores.
        repetition: Divides positive and multiplies other logits of tokens in the text.
        frequency: Taken off for each time that the token stands in the output; None if no row counts.
        presence: Taken off once if it stands there; None if no row counts.
    """

    rows: Int[np.ndarray, " k"]
    first: Int[Tensor, "k 1"]
    repetition: Float[Tensor, "k 1"]
    frequency: Float[Tensor, "k 1"] | None
    presence: Float[Tensor, "k 1"] | None

    @classmethod
    def of(cls, per_row: Sequence[Sampling], like: Float[Tensor, "n vocab"]) -> "Penalties | None":
        """The penalties of rows of these settings; None if there are none. Logits will be as `like`."""
        rows = np.array([row for row, s in enumerate(per_row) if s.penalises], dtype=np.int64)
        if not len(rows):
            return None
        penalised, dtype = [per_row[row] for row in rows.tolist()], row_type(like)
        counts = any(s.counts_output for s in penalised)
        return cls(
            rows=rows,
            first=upload(rows[:, None] * like.shape[1], like.device),
            repetition=column([s.repetition_penalty for s in penalised], dtype, like.device),
            frequency=column([s.frequency_penalty for s in penalised], dtype, like.device) if counts else None,
            # A number times a truth value is a float32 in torch, so this is one at every type of the scores.
            presence=column([s.presence_penalty for s in penalised], torch.float32, like.device) if counts else None,
        )

    def take(self, scores: Float[Tensor, "n vocab"], before: Before) -> None:
        """Take the penalties, in place. Only the tokens of each row's text are read and written."""
        device, owners, flat = scores.device, before.owners[self.rows], scores.view(-1)
        requests, place = np.unique(owners, return_inverse=True)
        texts = [before.texts[request] for request in requests.tolist()]
        table = texts_table(texts, device, scores.shape[1], counted=self.frequency is not None)
        at = upload(place, device)
        ids, paths = table.ids.index_select(0, at), before.paths[self.rows]
        room = ids.shape[1]
        path = before.tokens[upload(paths, device)] if paths.size else ids[:, :0]
        everything = torch.cat([ids, path], 1) if paths.size else ids
        places = everything + self.first
        old = flat.take(places)
        new = torch.where(old > 0, old / self.repetition, old * self.repetition)
        if table.counts is not None and self.frequency is not None and self.presence is not None:
            counts = table.counts.view(-1).take(everything + (at * table.counts.shape[1])[:, None])
            if paths.size:
                drafted = np.arange(paths.shape[1]) < before.lengths[self.rows, None]
                equal = (path[:, :, None] == path[:, None, :]) & upload(drafted, device)[:, None, :]
                counts[:, room:] += equal.sum(-1)
            new = new - self.frequency * counts.to(new.dtype) - self.presence * (counts > 0)
        # A token of the path may stand in the text too: what counts the path is written last.
        flat.put_(places[:, :room], new[:, :room])
        if paths.size:
            flat.put_(places[:, room:], new[:, room:])


@dataclass(frozen=True, kw_only=True)
class _Biases:
    """Numbers that are added to some logits, and the places of these in the flat logits."""

    places: Int[Tensor, " m"]
    values: Float[Tensor, " m"]

    @classmethod
    def of(cls, per_row: Sequence[Sampling], like: Float[Tensor, "n vocab"]) -> "_Biases | None":
        if not any(s.logit_bias for s in per_row):
            return None
        width = like.shape[1]
        places = [row * width + token for row, s in enumerate(per_row) for token in s.logit_bias]
        values = [value for s in per_row for value in s.logit_bias.values()]
        return cls(
            places=upload(np.array(places), like.device),
            values=torch.tensor(values, dtype=row_type(like)).to(like.device, non_blocking=True),
        )


def _together(per_row: Sequence[Sampling]) -> Sequence[Processor]:
    """The processors that end every row's list and read no tokens."""
    lists = list({id(s.processors): s.processors for s in per_row}.values())
    count = 0
    for last in zip(*(reversed(processors) for processors in lists), strict=False):
        if not is_blind(last[0]) or any(processor is not last[0] for processor in last):
            break
        count += 1
    return lists[0][len(lists[0]) - count :]


def _run_processor(
    processor: Processor, seen: Int[Tensor, " seen"], scores: Float[Tensor, " vocab"]
) -> Float[Tensor, " vocab"]:
    """What a processor makes of one row. Raises InputError where that is no row of the same tokens."""
    processed = processor(seen[None], scores[None])
    if not isinstance(processed, Tensor) or processed.shape != (1, len(scores)):
        name = getattr(processor, "__name__", type(processor).__name__)
        shape = f"shape {tuple(processed.shape)}" if isinstance(processed, Tensor) else repr(processed)
        raise InputError(f"the logits processor {name} must return scores of shape (1, {len(scores)}), got {shape}")
    return processed[0]
