"""Naive single-sequence twins of the chain verifiers, written straight from the papers, with plain loops and floats."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Row = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Uniforms:
    """The random numbers of one step: one per position to accept with, one per slot to recover with."""

    accept: Sequence[float]
    recover: Sequence[float]


def draw(weights: np.ndarray, uniform: float) -> int:
    """Inverse CDF."""
    reached = 0.0
    for token, weight in enumerate(weights):
        reached += float(weight)
        if uniform * float(weights.sum()) < reached:
            return token
    return int(np.flatnonzero(weights)[-1])


def token(p: np.ndarray, q: np.ndarray, drafted: Sequence[int], u: Uniforms) -> list[int]:
    """Leviathan et al. 2023, algorithm 1."""
    for i, x in enumerate(drafted):
        if not u.accept[i] * q[i, x] < p[i, x]:
            left = np.maximum(p[i] - q[i], 0)
            return [*drafted[:i], draw(left if left.sum() > 0 else p[i], u.recover[0])]
    return [*drafted, draw(p[len(drafted)], u.recover[0])]


def block(p: np.ndarray, q: np.ndarray, drafted: Sequence[int], u: Uniforms) -> list[int]:
    """Sun et al. 2024, algorithm 2."""
    gamma = len(drafted)
    weight, tau, weights = 1.0, 0, [1.0]
    for i, x in enumerate(drafted, 1):
        weight = min(1.0, weight * p[i - 1, x] / q[i - 1, x])
        weights.append(weight)
        if i == gamma:
            h = weight
        else:
            mass = float(np.maximum(weight * p[i] - q[i], 0).sum())
            h = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
        if u.accept[i - 1] < h:
            tau = i
    if tau == gamma:
        return [*drafted, draw(p[gamma], u.recover[0])]
    left = np.maximum(weights[tau] * p[tau] - q[tau], 0)
    return [*drafted[:tau], draw(left if left.sum() > 0 else p[tau], u.recover[0])]


def match(p: np.ndarray, q: np.ndarray, drafted: Sequence[int], u: Uniforms) -> list[int]:
    """Draw from the target; go on while the draw is what was drafted."""
    emitted = []
    for i in range(len(drafted) + 1):
        emitted.append(draw(p[i], u.recover[i]))
        if i == len(drafted) or emitted[-1] != drafted[i]:
            break
    return emitted
