"""A language model given by a table: every prefix has its own row. For proofs; nothing here is fast."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float

from outrider.lm.protocol import Extension, Segment

Row = Callable[[tuple[int, ...]], Float[np.ndarray, " vocab"]]


def random_rows(vocab: int, seed: int, concentration: float = 1.0, context: int | None = None) -> Row:
    """Rows drawn from a symmetric Dirichlet law, one per prefix, in float64.

    Args:
        context: How many of the newest tokens a row depends on; None means all of them, 0 none.
    """
    table: dict[tuple[int, ...], np.ndarray] = {}

    def row(prefix: tuple[int, ...]) -> Float[np.ndarray, " vocab"]:
        seen = prefix if context is None else prefix[len(prefix) - context :]
        if seen not in table:
            dice = np.random.default_rng([seed, len(seen), *seen])
            table[seen] = dice.dirichlet(np.full(vocab, concentration))
        return table[seen]

    return row


class TabularLM:
    """Answers `extend` with the log of a table's row for each prefix, in float64.

    Args:
        row: The distribution after a prefix; zeros are allowed.
        vocab_size: Width of the rows.

    Example:
        >>> lm = TabularLM(lambda prefix: np.array([0.25, 0.75]), vocab_size=2)
        >>> slot = lm.open()
        >>> lm.extend([Segment(slot=slot, tokens=torch.tensor([1]))]).logits.exp()
        tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """

    def __init__(self, row: Row, vocab_size: int, max_context: int = 1 << 20) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self.max_slots = 1 << 30
        self.crops = True
        self.device = torch.device("cpu")
        self._row = row
        self._committed: dict[int, tuple[int, ...]] = {}
        self._pending: dict[int, list[tuple[int, ...]]] = {}
        self._opened = 0

    def open(self) -> int:
        self._opened += 1
        self._committed[self._opened] = ()
        self._pending[self._opened] = []
        return self._opened

    def length(self, slot: int) -> int:
        return len(self._committed[slot])

    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        rows = []
        for segment in segments:
            committed, pending = self._committed[segment.slot], self._pending[segment.slot]
            fresh = []
            for i, token in enumerate(segment.tokens.tolist()):
                parent = len(pending) - 1 if segment.parents is None else int(segment.parents[i])
                pending.append((*(pending[parent] if parent >= 0 else committed), token))
                fresh.append(pending[-1])
            rows += [self._row(prefix) for prefix in fresh[len(fresh) - segment.num_wanted :]]
        stacked = torch.from_numpy(np.stack(rows)) if rows else torch.zeros(0, self.vocab_size, dtype=torch.float64)
        return Extension(logits=stacked.log(), taps={})

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        for slot, path in paths.items():
            if path:
                self._committed[slot] = self._pending[slot][path[-1]]
            self._pending[slot] = []

    def truncate(self, slot: int, length: int) -> None:
        self._committed[slot] = self._committed[slot][:length]
        self._pending[slot] = []

    def release(self, slot: int) -> None:
        del self._committed[slot], self._pending[slot]
