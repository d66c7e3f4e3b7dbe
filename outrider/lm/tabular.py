"""A language model given by a table: every prefix has its own row. For proofs; nothing here is fast."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType

import numpy as np
import torch
from jaxtyping import Float
from torch import nn

from outrider.lm.protocol import Extension, Segment

Row = Callable[[tuple[int, ...]], Float[np.ndarray, " dim"]]
"""A vector for every prefix."""


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


def random_features(dim: int, seed: int) -> Row:
    """A vector for every prefix, drawn from the standard normal law, in float64."""

    @cache
    def feature(prefix: tuple[int, ...]) -> Float[np.ndarray, " dim"]:
        return np.random.default_rng([seed, len(prefix), *prefix]).normal(size=dim)

    return feature


TABLE_FEATURES = 3
"""Width of the vectors that stand for hidden states in proofs."""


class TabularLM:
    """Answers `extend` with the log of a table's row for each prefix, in float64.

    A segment's features are added to the logits of its nodes. So they are as wide as the logits.

    Args:
        row: The distribution after a prefix; zeros are allowed.
        vocab_size: Width of the rows.
        feature: The vector that replaces the hidden state at the end of a prefix, for every tap.

    Example:
        >>> lm = TabularLM(lambda prefix: np.array([0.25, 0.75]), vocab_size=2)
        >>> slot = lm.open()
        >>> lm.extend([Segment(slot=slot, tokens=torch.tensor([1]))]).logits.exp()
        tensor([[0.2500, 0.7500]], dtype=torch.float64)
    """

    max_slots = 1 << 30
    crops = True
    device = torch.device("cpu")
    dtype = torch.float64
    chains_only = None
    modules: Mapping[str, nn.Module] = MappingProxyType({})

    def __init__(self, row: Row, vocab_size: int, max_context: int = 1 << 20, feature: Row | None = None) -> None:
        self.vocab_size = vocab_size
        self.max_context = max_context
        self._row = row
        self._feature = feature
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
        rows, prefixes, added = [], [], []
        for segment in segments:
            committed, pending = self._committed[segment.slot], self._pending[segment.slot]
            fresh = []
            for i, token in enumerate(segment.tokens.tolist()):
                parent = len(pending) - 1 if segment.parents is None else int(segment.parents[i])
                pending.append((*(pending[parent] if parent >= 0 else committed), token))
                fresh.append(pending[-1])
            wanted = segment.wanted
            rows += [self._row(fresh[i]) for i in wanted]
            prefixes += fresh
            if segment.features is not None and wanted:
                added.append(segment.features[wanted.start : wanted.stop])
        stacked = torch.from_numpy(np.array(rows)) if rows else torch.zeros(0, self.vocab_size, dtype=torch.float64)
        logits = stacked.log() + torch.cat(added) if added else stacked.log()
        return Extension(logits=logits, taps=self._taps(prefixes, taps))

    def _taps(
        self, prefixes: Sequence[tuple[int, ...]], taps: Sequence[int]
    ) -> dict[int, Float[torch.Tensor, "nodes dim"]]:
        if not taps:
            return {}
        if self._feature is None:
            raise ValueError("this table has no features to tap; give it some")
        dim = len(self._feature(()))
        seen = torch.from_numpy(np.array([self._feature(prefix) for prefix in prefixes]).reshape(len(prefixes), dim))
        return dict.fromkeys(taps, seen)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        for slot, path in paths.items():
            if path:
                self._committed[slot] = self._pending[slot][path[-1]]
            self._pending[slot] = []

    def truncate(self, slot: int, length: int) -> None:
        self._committed[slot] = self._committed[slot][:length]
        self._pending[slot] = []

    def copy(self, source: int, length: int) -> int:
        slot = self.open()
        self._committed[slot] = self._committed[source][:length]
        return slot

    def release(self, slot: int, *, clean: bool = False) -> None:
        del self._committed[slot], self._pending[slot]

    def cast(self, dtype: torch.dtype) -> "TabularLM":
        return self


class TabularHead(TabularLM):
    r"""A head given by a table: its logits depend on the features that it reads, and it outputs features of its own.

    With the feature $f$ and the token $x$ of a node it outputs $\tanh(f + e_x)$, where $e$ is a random table. Features
    are as wide as the logits. Those of a target's hidden states are a random projection of them.

    Attributes:
        module: What a drafter asks of a head's module.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__(random_rows(vocab_size, seed), vocab_size)
        self.module = TabularFusion(vocab_size, seed)

    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        extension = super().extend(segments, taps)
        features = torch.cat([s.features for s in segments if s.features is not None])
        head_output = torch.tanh(features + self.module.table[torch.cat([s.tokens for s in segments])])
        return replace(extension, features=head_output)


class TabularFusion(nn.Module):
    """The random projections of `TabularHead`."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        super().__init__()
        dice = torch.Generator().manual_seed(seed)
        self.table = torch.randn(vocab_size, vocab_size, dtype=torch.float64, generator=dice)
        self.projection = torch.randn(TABLE_FEATURES, vocab_size, dtype=torch.float64, generator=dice)

    def fuse(self, states: Float[torch.Tensor, "*batch dim"]) -> Float[torch.Tensor, "*batch vocab"]:
        """Features from tapped states."""
        return states @ self.projection

    def next_feature(self, head_output: Float[torch.Tensor, "*batch vocab"]) -> Float[torch.Tensor, "*batch vocab"]:
        """What was output, as it is."""
        return head_output

    def further(self, head_output: Float[torch.Tensor, "*batch vocab"]) -> Float[torch.Tensor, "*batch vocab"]:
        """What guesses one token further."""
        return head_output @ self.table

    def logits(self, hidden: Float[torch.Tensor, "*batch vocab"]) -> Float[torch.Tensor, "*batch vocab"]:
        """Logits of what guesses one token further."""
        return hidden
