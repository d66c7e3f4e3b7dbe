"""A drafter over tables whose guesses depend on the target's features, and on how often it was asked."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.core.types import Frontier, Guess, Request, Running
from outrider.drafters.protocol import Drafter, Observed, Rows


@dataclass(kw_only=True)
class Heard:
    """The features of a request's positions, the draft's paths, and how many drafts there were; changes in place."""

    features: list[np.ndarray] = field(default_factory=list)
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)
    drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class FeatureTable(Drafter):
    """Guesses by the newest feature, the tokens behind it, and the number of drafts so far: not context-pure.

    Attributes:
        vocab_size: Width of the rows.
        seed: Another one guesses otherwise.
    """

    vocab_size: int
    seed: int = 0

    @property
    def rows(self) -> Rows:
        return "sampled"

    @property
    def context_pure(self) -> bool:
        return False

    @property
    def taps(self) -> tuple[int, ...]:
        return (0,)

    def open(self, request: Request) -> Heard:
        return Heard()

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        for state in states:
            heard = state.drafter_state
            assert len(heard.features) == len(state.tokens) - 1, "a draft begins where all features are known"
            heard.drafts += 1
            heard.paths = {0: (state.tokens[-1],)}
        return Guess(logits=torch.stack([self._row(state, 0) for state in states]))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        rows = []
        for owner, node, parent, token in zip(
            frontier.owners.tolist(),
            frontier.nodes.tolist(),
            frontier.parents.tolist(),
            frontier.tokens.tolist(),
            strict=True,
        ):
            heard = states[owner].drafter_state
            heard.paths[node] = (*heard.paths[parent], token)
            rows.append(self._row(states[owner], node))
        return Guess(logits=torch.stack(rows))

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        for i, state in enumerate(states):
            seen = observed.taps[0][observed.offsets[i] : observed.offsets[i + 1]]
            state.drafter_state.features += list(seen.numpy())

    def needs(self, state: object, length: int) -> int:
        return min(len(state.features), length)

    def reuse(self, state: object, request: Request, length: int) -> Heard:
        return Heard(features=state.features[:length])

    def fork(self, state: object, request: Request, length: int) -> Heard:
        return self.reuse(state, request, length)

    def _row(self, state: Running, node: int) -> torch.Tensor:
        heard: Heard = state.drafter_state
        path = heard.paths[node]
        weights = np.random.default_rng([self.seed, heard.drafts % 3, len(path), *path])
        mixed = weights.normal(size=(self.vocab_size, len(heard.features[-1]))) @ heard.features[-1]
        return torch.from_numpy(mixed)
