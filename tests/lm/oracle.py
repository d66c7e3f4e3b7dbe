"""A language model beside its plain, uncached twin: every node's logits against a causal run over its root path."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Extension, Segment
from outrider.lm.recurrent import RecurrentModel

POISON = 1e4


@dataclass(kw_only=True)
class Twin:
    """What a slot should hold: committed tokens, and pending tokens with their parents."""

    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    def prefix(self, node: int) -> list[int]:
        """All tokens up to and including a pending node."""
        path = []
        while node >= 0:
            path.append(self.pending[node])
            node = self.parents[node]
        return self.tokens + path[::-1]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """New nodes for one slot."""

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int] | None = None
    logits: str = "all"


def poison(lm: LanguageModel | RecurrentModel, twins: dict[int, Twin]) -> None:
    """Put large finite numbers wherever nothing of worth lies."""
    used = {lm.cache.row(s): len(t.tokens) + len(t.pending) for s, t in twins.items()}
    for storage in lm.cache.storages:
        for row in range(storage.shape[0]):
            storage[row, used.get(row, 0) :] = POISON


@dataclass(kw_only=True)
class Pair:
    """A language model and its twins, kept in step."""

    lm: LanguageModel | RecurrentModel
    reference: PreTrainedModel | None = None
    twins: dict[int, Twin] = field(default_factory=dict)
    worst: float = 0.0

    def open(self) -> int:
        slot = self.lm.open()
        self.twins[slot] = Twin()
        return slot

    def release(self, slot: int) -> None:
        self.lm.release(slot)
        del self.twins[slot]

    def commit(self, paths: dict[int, Sequence[int]]) -> None:
        self.lm.commit(paths)
        for slot, path in paths.items():
            twin = self.twins[slot]
            self.twins[slot] = Twin(tokens=twin.tokens + [twin.pending[n] for n in path])

    def truncate(self, slot: int, length: int) -> None:
        self.lm.truncate(slot, length)
        self.twins[slot] = Twin(tokens=self.twins[slot].tokens[:length])

    def plain(self, prefixes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits of the last token of each prefix, by the unmodified model (or the reference) without cache or mask.

        A run over a path serves all prefixes of it, and paths of equal length share a run.
        """
        paths: list[Sequence[int]] = []
        for prefix in sorted(prefixes, key=len, reverse=True):
            if not any(path[: len(prefix)] == prefix for path in paths):
                paths.append(prefix)
        logits: list[tuple[Sequence[int], Tensor]] = []
        for length in {len(path) for path in paths}:
            same = [path for path in paths if len(path) == length]
            with torch.no_grad():
                rows = (self.reference or self.lm.model)(input_ids=torch.tensor(same), use_cache=False).logits
            logits += zip(same, rows, strict=True)
        return [next(rows for path, rows in logits if path[: len(p)] == p)[len(p) - 1] for p in prefixes]

    def extend(self, growths: Sequence[Growth], taps: Sequence[int] = ()) -> Extension:
        """Extend both; raises AssertionError where they differ."""
        poison(self.lm, self.twins)
        extension = self.lm.extend(
            [
                Segment(
                    slot=g.slot,
                    tokens=torch.tensor(list(g.tokens), dtype=torch.long),
                    parents=None if g.parents is None else np.array(g.parents, dtype=np.int64),
                    logits=g.logits,
                )
                for g in growths
            ],
            taps,
        )
        expected = [prefix for g in growths for prefix in self._grow(g)]
        assert len(extension.logits) == len(expected)
        for row, plain, prefix in zip(extension.logits, self.plain(expected), expected, strict=True):
            difference = float((row - plain).abs().max())
            self.worst = max(self.worst, difference)
            assert difference <= 1e-9, (difference, len(prefix))
        return extension

    def _grow(self, growth: Growth) -> list[list[int]]:
        """Extend a twin; returns the prefixes of the wanted nodes."""
        twin, first = self.twins[growth.slot], len(self.twins[growth.slot].pending)
        numbers = range(first, first + len(growth.tokens))
        twin.pending += growth.tokens
        twin.parents += growth.parents if growth.parents is not None else [n - 1 for n in numbers]
        wanted = {"all": numbers, "last": numbers[-1:], "none": ()}[growth.logits]
        return [twin.prefix(n) for n in wanted]
