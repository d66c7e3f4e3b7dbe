"""What races tell of the noise of a position: the exact joint law of several draws that share it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float

KEPT = 4096
"""Races whose outcome is kept."""
NEGLIGIBLE = 1e-14
"""An outcome with a smaller share is a rounding error, and is left out."""


@dataclass(frozen=True, kw_only=True)
class RaceNoise:
    r"""What is known of the noise of a position: the standard exponentials $E$ that are possible after some races.

    With weights $w$ the token with the smallest $E_x / w_x$ wins, so a race tells on which side of some planes through
    the origin $E$ lies. $E / \sum E$ is uniform on the simplex of all tokens. So what is known is a union of simplices
    within it, and its probability is their volume: the absolute determinant of the corners of each.

    Attributes:
        simplices: The corners of each simplex, one per column.
    """

    simplices: tuple[Float[np.ndarray, "vocab vocab"], ...]

    @classmethod
    def unknown(cls, vocab_size: int) -> "RaceNoise":
        """Before any race."""
        return cls(simplices=(np.eye(vocab_size),))

    @property
    def probability(self) -> float:
        """Of this noise, before any race."""
        return float(sum(abs(np.linalg.det(corners)) for corners in self.simplices))

    def race(self, weights: Sequence[float]) -> Mapping[int, tuple[float, "RaceNoise"]]:
        """For each possible winner, its probability and what is known afterwards.

        Example:
            >>> won = RaceNoise.unknown(2).race([0.25, 0.75])
            >>> {token: round(chance, 6) for token, (chance, _) in won.items()}
            {0: 0.25, 1: 0.75}
            >>> [round(chance, 6) for chance, _ in won[0][1].race([0.5, 0.5]).values()]
            [1.0]
        """
        return _race(self, tuple(weights))

    def below(self, plane: Float[np.ndarray, " vocab"]) -> "RaceNoise":
        """The part where the product with the plane's normal is at most 0."""
        parts = (part for corners in self.simplices for part in _below(corners, plane @ corners))
        return RaceNoise(simplices=tuple(parts))

    def __hash__(self) -> int:
        return hash(tuple(corners.tobytes() for corners in self.simplices))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RaceNoise):
            return NotImplemented
        ours, theirs = ([corners.tobytes() for corners in each.simplices] for each in (self, other))
        return ours == theirs


@lru_cache(maxsize=KEPT)
def _race(noise: RaceNoise, weights: tuple[float, ...]) -> Mapping[int, tuple[float, RaceNoise]]:
    """`RaceNoise.race`. The same race is run in many worlds."""
    running = [token for token, weight in enumerate(weights) if weight > 0]
    outcomes: dict[int, tuple[float, RaceNoise]] = {}
    whole = noise.probability
    for token in running:
        left = noise
        for other in running:
            if other != token:
                plane = np.zeros(len(weights))
                plane[token], plane[other] = weights[other], -weights[token]
                left = left.below(plane)
        chance = left.probability / whole
        if chance > NEGLIGIBLE:
            outcomes[token] = chance, left
    return outcomes


def _below(
    corners: Float[np.ndarray, "vocab vocab"], sides: Float[np.ndarray, " vocab"]
) -> list[Float[np.ndarray, "vocab vocab"]]:
    """The parts of a simplex where a linear function that takes these values at the corners is at most 0.

    An edge from below to above is cut where the function is 0. The point of the cut takes the place of either end,
    which gives two simplices with fewer such edges.
    """
    low, high = int(sides.argmin()), int(sides.argmax())
    if sides[high] <= 0:
        return [corners]
    if sides[low] >= 0:
        return []
    share = sides[high] / (sides[high] - sides[low])
    cut = share * corners[:, low] + (1 - share) * corners[:, high]
    parts = []
    for end in (high, low):
        moved, values = corners.copy(), sides.copy()
        moved[:, end], values[end] = cut, 0.0
        parts += _below(moved, values)
    return parts
