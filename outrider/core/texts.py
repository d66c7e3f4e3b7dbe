"""The text before each row, on the device: the committed text of its request, and drafted tokens behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.types import Running
from outrider.core.uploads import upload

ROOM = 64
"""Distinct tokens that a new text has room for; the room doubles."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TextTable:
    """The texts of some requests, one per row; changes in place.

    Attributes:
        ids: The distinct tokens of each text. The rest of a row repeats one of them.
        counts: How often each token stands in each output; None if nobody asked.
    """

    ids: Int[Tensor, "requests room"]
    counts: Int[Tensor, "requests vocab"] | None


class CommittedText:
    """What a request's settings read of its committed tokens, on a device; changes in place.

    Each step takes in the new tokens alone. Penalties read a row of a table that all requests of a batch share; while
    the batch stays the same, the table stays too. Processors read the whole text.

    Args:
        tokens: The committed tokens, prompt first. The owner of the list appends to it.
        num_prompt: How many of them are the prompt.

    Example:
        >>> text = CommittedText(tokens=[7, 5, 7], num_prompt=1)
        >>> table = texts_table([text], torch.device("cpu"), vocab_size=8, counted=True)
        >>> table.ids[0, :2].tolist(), table.counts.tolist()
        ([7, 5], [[0, 0, 0, 0, 0, 1, 0, 1]])
    """

    def __init__(self, *, tokens: Sequence[int], num_prompt: int) -> None:
        self.tokens, self.num_prompt = tokens, num_prompt
        self._distinct: dict[int, None] = {}
        self._num_read = self._num_whole = 0
        self._table: TextTable | None = None
        self._row = 0
        self._whole: Int[Tensor, " room"] | None = None

    def followed_by(self, tokens: Sequence[int]) -> "CommittedText":
        """A text of its own with more tokens."""
        other = CommittedText(tokens=tokens, num_prompt=self.num_prompt)
        if self._table is not None:
            row, counts = slice(self._row, self._row + 1), self._table.counts
            other._table = TextTable(
                ids=self._table.ids[row].clone(), counts=None if counts is None else counts[row].clone()
            )
            other._distinct, other._num_read = dict(self._distinct), self._num_read
        return other

    def whole(self, device: torch.device) -> Int[Tensor, " tokens"]:
        """The whole text."""
        count, before = len(self.tokens), self._whole
        if before is None or before.device != device:
            self._num_whole, before = 0, torch.empty(0, dtype=torch.long, device=device)
        if len(before) < count:
            before = torch.cat([before, before.new_empty(count)])
        self._whole = before
        if self._num_whole < count:
            self._whole[self._num_whole : count] = torch.tensor(self.tokens[self._num_whole :]).to(
                device, non_blocking=True
            )
            self._num_whole = count
        return self._whole[:count]


def text_of(state: Running) -> CommittedText:
    """The text of a running request, which it keeps from step to step."""
    if state.text is None:
        state.text = CommittedText(tokens=state.tokens, num_prompt=len(state.request.prompt))
    text = state.text
    if not isinstance(text, CommittedText):
        raise TypeError(f"a request's text must be a Text, got {type(text).__name__}")
    return text


def texts_table(texts: Sequence[CommittedText], device: torch.device, vocab_size: int, counted: bool) -> TextTable:
    """The table of some texts, with all their tokens taken in; nothing is copied from the device.

    Args:
        counted: Whether the counts are wanted.
    """
    fits = _shared(texts, device, counted)
    new: list[list[int]] = []
    for text in texts:
        if not fits and _outdated(text, device, counted):
            text._table, text._distinct, text._num_read = None, {}, 0
        fresh = dict.fromkeys(text.tokens[text._num_read :])
        new.append([token for token in fresh if token not in text._distinct])
    most = max(len(text._distinct) + len(added) for text, added in zip(texts, new, strict=True))
    table = texts[0]._table
    if table is None or not fits or most > table.ids.shape[1]:
        table = _assembled(texts, device, vocab_size, counted, most)
    _take_in(table, texts, new)
    return table


def _shared(texts: Sequence[CommittedText], device: torch.device, counted: bool) -> bool:
    """Whether the texts are the rows of one table that will do, in order."""
    table = texts[0]._table
    return (
        table is not None
        and table.ids.device == device
        and len(table.ids) == len(texts)
        and (table.counts is not None or not counted)
        and all(text._table is table and text._row == row for row, text in enumerate(texts))
    )


def _outdated(text: CommittedText, device: torch.device, counted: bool) -> bool:
    table = text._table
    return table is not None and (table.ids.device != device or (counted and table.counts is None))


def _assembled(
    texts: Sequence[CommittedText], device: torch.device, vocab_size: int, counted: bool, most: int
) -> TextTable:
    """A table of the rows that the texts have, and of empty ones for new texts."""
    room = ROOM
    while room < most:
        room *= 2
    rows, counts = list[Tensor](), list[Tensor]()
    for text in texts:
        before = text._table
        if before is None:
            rows.append(torch.full((room,), text.tokens[0], device=device))
        else:
            row_ids = before.ids[text._row, :room]
            rows.append(
                row_ids if len(row_ids) == room else torch.cat([row_ids, row_ids[:1].expand(room - len(row_ids))])
            )
        if counted and (before is None or before.counts is None):
            counts.append(torch.zeros(vocab_size, dtype=torch.int32, device=device))
        elif counted and before is not None and before.counts is not None:
            counts.append(before.counts[text._row])
    table = TextTable(ids=torch.stack(rows), counts=torch.stack(counts) if counted else None)
    for row, text in enumerate(texts):
        text._table, text._row = table, row
    return table


def _take_in(table: TextTable, texts: Sequence[CommittedText], new: Sequence[Sequence[int]]) -> None:
    """Write the new distinct tokens of each text into its row, and count the new tokens of its output."""
    room, places, tokens, output_places = table.ids.shape[1], list[int](), list[int](), list[int]()
    for row, (text, fresh) in enumerate(zip(texts, new, strict=True)):
        first = row * room + len(text._distinct)
        places += range(first, first + len(fresh))
        tokens += fresh
        text._distinct.update(dict.fromkeys(fresh))
        if table.counts is not None:
            width = table.counts.shape[1]
            output_places += [row * width + token for token in text.tokens[max(text._num_read, text.num_prompt) :]]
        text._num_read = len(text.tokens)
    if not places and not output_places:
        return
    where, what, counted = upload(np.array([*places, *tokens, *output_places]), table.ids.device).split(
        [len(places), len(places), len(output_places)]
    )
    if places:
        table.ids.view(-1).index_copy_(0, where, what)
    if table.counts is not None and output_places:
        ones = torch.ones(len(output_places), dtype=torch.int32, device=table.ids.device)
        table.counts.view(-1).index_add_(0, counted, ones)


@dataclass(frozen=True, kw_only=True, eq=False)
class Before:
    """The text before each of n rows: a text of some, and a path of drafted tokens behind it.

    Attributes:
        texts: One per request.
        owners: The request of each row.
        tokens: The draft's tokens, on the device.
        paths: For each row, the places among these of the tokens on its path, from its own token upwards. The rest of a
            row holds a place whose token stands in the text.
        lengths: How many tokens each path has.
    """

    texts: Sequence[CommittedText]
    owners: Int[np.ndarray, " n"]
    tokens: Int[Tensor, " nodes"]
    paths: Int[np.ndarray, "n depth"]
    lengths: Int[np.ndarray, " n"]

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> "Before":
        """Texts with nothing drafted behind them, one per row."""
        count = len(outputs)
        return cls(
            texts=[
                CommittedText(tokens=[*prompt, *output], num_prompt=len(prompt))
                for prompt, output in zip(prompts, outputs, strict=True)
            ],
            owners=np.arange(count),
            tokens=torch.zeros(0, dtype=torch.long),
            paths=np.zeros((count, 0), dtype=np.int64),
            lengths=np.zeros(count, dtype=np.int64),
        )

    def whole(self, row: int, device: torch.device) -> Int[Tensor, " tokens"]:
        """The text before one row."""
        text, length = self.texts[int(self.owners[row])].whole(device), int(self.lengths[row])
        if not length:
            return text
        path = self.paths[row, :length][::-1].copy()
        return torch.cat([text, self.tokens[upload(path, device)].to(text)])


def climbed(
    nodes: Int[np.ndarray, " n"], parents: Int[np.ndarray, " nodes"], depths: Int[np.ndarray, " nodes"]
) -> Int[np.ndarray, "n depth"]:
    """The path from each of some nodes upwards, the root left out; the rest of a row is the root.

    Example:
        >>> climbed(np.array([0, 2]), parents=np.array([-1, 0, 1]), depths=np.array([0, 1, 2])).tolist()
        [[0, 0], [2, 1]]
    """
    paths = np.empty((len(nodes), int(depths[nodes].max(initial=0))), dtype=np.int64)
    for column in range(paths.shape[1]):
        paths[:, column] = nodes
        nodes = np.where(depths[nodes] > 0, parents[nodes], nodes)
    return paths
