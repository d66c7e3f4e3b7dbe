"""A small constraint over tokens, for proofs: after a trigger token only some tokens may come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.sampling import pack


@dataclass(frozen=True, kw_only=True)
class After:
    """What may follow each token of the output; tokens that are not named may be followed by all.

    Attributes:
        vocab: Width of the vocabulary.
        followers: Per token of the output, what may come next.
        first: What the output may begin with; None is anything.
    """

    vocab: int
    followers: Mapping[int, frozenset[int]]
    first: frozenset[int] | None = None

    def allowed(self, output: Sequence[int]) -> list[bool]:
        """Which tokens may follow an output."""
        some = self.followers.get(output[-1]) if output else self.first
        return [some is None or token in some for token in range(self.vocab)]

    def fits(self, output: Sequence[int]) -> bool:
        """Whether every token of an output was allowed where it stands."""
        return all(self.allowed(output[:i])[token] for i, token in enumerate(output))

    def open(self) -> list[int]:
        return []

    def masks(self, state: list[int], tokens: Sequence[int], parents: Sequence[int]) -> Int[Tensor, "nodes words"]:
        rows, paths = [], []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append([] if parent < 0 else [*paths[parent], token])
            rows.append(self.allowed([*state, *paths[-1]]) if self.fits([*state, *paths[-1]]) else [True] * self.vocab)
        return pack(torch.tensor(rows))

    def commit(self, state: list[int], tokens: Sequence[int]) -> None:
        state.extend(tokens)
