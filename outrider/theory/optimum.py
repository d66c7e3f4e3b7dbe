"""How often the best verifier could accept: the optimal acceptance of n drafted tokens at one node (Hu et al. 2025)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import InputError
from outrider.theory.race import Race, outside

GAP = 1e-10
"""How far the minimum found may lie above the true one."""

SPLIT = 64
"""Number of parts into which a range of prefixes is cut."""

OFF = 1e-4
"""How far the sum of a row may be from one."""


def optimal_acceptance(
    target_probs: Float[Tensor, "*batch vocab"],
    draft_probs: Float[Tensor, "..."],
    n: int,
    replacement: bool,
) -> Float[Tensor, "*batch"]:
    r"""Highest probability with which any lossless verifier can accept one of n tokens drawn from the draft row.

    A verifier couples the drafted tokens with an output drawn from the target row p; it accepts if the output is among
    them. If all drafted tokens lie in a set H, an accepted output lies in H too. So the probability of a rejection is
    at least $Q(H) - p(H)$, where $Q(H)$ is the probability that all n drafted tokens lie in H. By duality of optimal
    transport the best verifier attains the bound of the worst H:

    $$\alpha^* = 1 + \min_H\, [\, p(H) - Q(H) \,].$$

    For draws from one row q, with or without replacement, the worst H is a prefix of the tokens sorted by $p/q$, the
    smallest ratio first. With replacement $Q(H) = q(H)^n$; without replacement, `Race` computes it. The result is exact
    up to rounding and the search's tolerance of 1e-10. A row of 128,000 tokens takes tens of milliseconds; rows on
    which nearly every prefix attains the minimum take longest, because none can be skipped.

    Tokens with $q = 0$ are never drafted, and draws without replacement end when the support of q is used up. For
    n = 1 the optimum is $\sum_x \min(p, q)$, which speculative sampling reaches; for more draws it is an upper bound of
    the rules in `outrider.theory.acceptance`.

    Args:
        target_probs: Target row or rows, float32 or float64, each summing to one; computed in float64.
        draft_probs: The rows that the tokens are drawn from, in the same shape.
        n: Number of tokens drawn.
        replacement: Whether a token may be drawn more than once.

    Returns:
        One probability per row, float64, on the device of `target_probs`.

    Raises:
        InputError: If n < 1, the shapes differ, or a row is not a distribution.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> optimal_acceptance(p, q, n=2, replacement=True)
        tensor(0.8900, dtype=torch.float64)
        >>> optimal_acceptance(p, q, n=2, replacement=False)
        tensor(0.9929, dtype=torch.float64)

    References:
        Hu et al. 2025, "Towards Optimal Multi-draft Speculative Decoding", theorems on the dual and on q-convex
        functions. https://arxiv.org/abs/2502.18779
    """
    rows = checked(target_probs, draft_probs, n)
    vocab = rows.p.shape[-1]
    target, draft = (side.cpu().reshape(-1, vocab).numpy() for side in (rows.p, rows.q))
    optima = [_optimum(p, q, n, replacement) for p, q in zip(target, draft, strict=True)]
    return torch.tensor(optima, dtype=torch.float64, device=rows.p.device).reshape(rows.p.shape[:-1])


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A target and a draft row, or batches of them, in float64 and summing to one."""

    p: Float[Tensor, "*batch vocab"]
    q: Float[Tensor, "*batch vocab"]


def checked(target_probs: Float[Tensor, "..."], draft_probs: Float[Tensor, "..."], n: int) -> Rows:
    """Refuse rows that are not distributions or differ in shape; remove the rounding errors of their sums."""
    if n < 1:
        raise InputError(f"n must be >= 1 (the number of tokens drafted at a node), got {n}")
    if target_probs.shape != draft_probs.shape:
        shapes = f"{tuple(target_probs.shape)} and {tuple(draft_probs.shape)}"
        raise InputError(f"target_probs and draft_probs must have one shape, got {shapes}; cut both to one vocabulary")
    for name, rows in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        if rows.dtype not in (torch.float32, torch.float64):
            raise InputError(f"{name} must be float32 or float64, got {rows.dtype}; compute the softmax in float32")
        if rows.ndim == 0 or rows.shape[-1] == 0:
            raise InputError(f"{name} must have a last dimension of at least one token, got {tuple(rows.shape)}")
        if not bool((rows >= 0).all()):
            raise InputError(f"{name} must be probabilities, got a negative number or NaN; give rows after the softmax")
        sums = rows.double().sum(-1)
        if sums.numel() and (worst := float((sums - 1).abs().max())) > OFF:
            raise InputError(f"each row of {name} must sum to 1, got one that is off by {worst:.2g}; normalise it")
    p, q = target_probs.detach().double(), draft_probs.detach().double()
    return Rows(p=p / p.sum(-1, keepdim=True), q=q / q.sum(-1, keepdim=True))


def _optimum(p: Float[np.ndarray, " vocab"], q: Float[np.ndarray, " vocab"], n: int, replacement: bool) -> float:
    support = q > 0
    p, q = p[support], q[support]
    if not replacement and n >= len(q):
        return min(1.0, float(p.sum()))
    with np.errstate(over="ignore"):
        order = np.argsort(p / q)
    p, q = p[order], q[order]
    inside = np.concatenate([[0.0], np.cumsum(p)])
    if replacement or n == 1:
        least = float((inside + 1 - (1 - outside(q)) ** n).min())
    elif n == 2:
        least = float((inside + _escape_of_two(q)).min())
    else:
        least = _least(inside, Race.of(q, n).escape)
    return min(1.0, max(0.0, least))


def _escape_of_two(q: Float[np.ndarray, " tokens"]) -> Float[np.ndarray, " prefixes"]:
    r"""Two draws without replacement: $1 - Q(H) = (1 - q(H)) (1 + \sum_{x \in H} q(x) / (1 - q(x)))$ per prefix."""
    others = 1 - q
    top = int(q.argmax())
    others[top] = q[:top].sum() + q[top + 1 :].sum()
    return outside(q) * (1 + np.concatenate([[0.0], np.cumsum(q / others)]))


def _least(
    inside: Float[np.ndarray, " prefixes"], escape: Callable[[Int[np.ndarray, " some"]], Float[np.ndarray, " some"]]
) -> float:
    """Minimum of `inside + escape` over all prefixes, computed for few of them.

    `inside` grows with the prefix and `escape` falls. So between prefixes a and b their sum is at least
    `inside[a + 1] + escape[b]`. A range that cannot hold the minimum is dropped; every other range is cut into parts.
    """
    escaped = np.full(len(inside), math.nan)
    low, high = np.array([0]), np.array([len(inside) - 1])
    while len(low):
        edges = low[:, None] + (high - low)[:, None] * np.arange(SPLIT + 1) // SPLIT
        new = np.unique(edges)
        new = new[np.isnan(escaped[new])]
        escaped[new] = escape(new)
        best = np.nanmin(inside + escaped)
        low, high = edges[:, :-1].ravel(), edges[:, 1:].ravel()
        open_ = high - low > 1
        low, high = low[open_], high[open_]
        open_ = inside[low + 1] + escaped[high] < best - GAP
        low, high = low[open_], high[open_]
    return float(best)
