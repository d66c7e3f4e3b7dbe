"""How often each rule accepts: the probability that one of n tokens drafted at a node survives, in closed form.

Every function takes target rows and draft rows of one shape, in float32 or float64, and the number n of drafted tokens.
It returns one probability per row, in float64. It raises `InputError` for the same input as
`outrider.optimal_acceptance`, which is the upper bound of all these functions for draws from the same law.
"""

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import InputError
from outrider.theory.optimum import checked
from outrider.theory.race import outside

BISECTIONS = 80
"""How often the interval that holds K-SEQ's rho is halved: more often than a float64 has digits."""

MOST_BRANCHES = 100_000
"""Most branches that `recursive_without_replacement` follows; it refuses rows that need more."""


def match_acceptance(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "..."], n: int
) -> Float[Tensor, "*batch"]:
    r"""Match, n independent draws. An output drawn from p is among them with probability $\sum_x p(x) (1 - (1 -
    q(x))^n)$.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> match_acceptance(p, q, n=2)
        tensor(0.5130, dtype=torch.float64)
    """
    rows = checked(target_probs, draft_probs, n)
    return (rows.p * (1 - (1 - rows.q) ** n)).sum(-1)


def coupled_acceptance(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "..."]
) -> Float[Tensor, "*batch"]:
    r"""Coupled, one draw that shares the target's noise: $\sum_x 1 / \sum_y \max(p_y / p_x, q_y / q_x)$.

    In the order of rising $q / p$, the first quotient is the larger one for y up to x, and the second one behind x. So
    x adds $p_x q_x / (q_x P_x + p_x Q_x)$, with $P_x$ the target's mass up to x and $Q_x$ the draft's mass behind x.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> coupled_acceptance(p, q)
        tensor(0.6667, dtype=torch.float64)

    References:
        Daliri et al. 2024, coupling without communication. https://arxiv.org/abs/2408.07978
    """
    rows = checked(target_probs, draft_probs, 1)
    order = (rows.q / rows.p).nan_to_num(0.0, torch.inf).argsort(-1)
    p, q = rows.p.gather(-1, order), rows.q.gather(-1, order)
    below, behind = p.cumsum(-1), q.sum(-1, keepdim=True) - q.cumsum(-1)
    return torch.where(p * q > 0, p * q / (q * below + p * behind), 0.0).sum(-1)


def recursive_with_replacement(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "..."], n: int
) -> Float[Tensor, "*batch"]:
    r"""Recursive rejection, n independent draws.

    Each draw is judged by $P$, the rest of the target row. It passes with probability $b = \sum_x \min(P, q)$. After a
    refusal $P \leftarrow (P - q)_+$, normalised, which does not depend on the refused token. So the acceptance is $1 -
    \prod_i (1 - b_i)$.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> recursive_with_replacement(p, q, n=3)
        tensor(0.8480, dtype=torch.float64)

    References:
        Miao et al. 2024, multi-step speculative sampling. https://arxiv.org/abs/2305.09781
    """
    rows = checked(target_probs, draft_probs, n)
    left, refused = rows.p, torch.ones_like(rows.p[..., 0])
    for _ in range(n):
        residual = (left - rows.q).clamp_min(0)
        mass = residual.sum(-1)
        refused = refused * mass
        left = torch.where(mass[..., None] > 0, residual / mass[..., None], left)
    return 1 - refused


def recursive_without_replacement(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "..."], n: int
) -> Float[Tensor, "*batch"]:
    r"""Recursive rejection, n draws without replacement, by following every draw that can be refused.

    Let $P$ be the rest of the target row and $Q$ the rest of the draft row. A draw passes with probability $\sum_x
    \min(P, Q)$. It is x and refused with probability $(Q - P)_+(x)$; then $P \leftarrow (P - Q)_+$ and $Q(x) \leftarrow
    0$, both normalised. Sorting sums the last draw over all branches at once, so two draws cost $V \log V$. Each
    further draw multiplies the cost by up to the number of tokens in the support of q. The result is exact, but the
    function is meant for n = 2, small vocabularies, or rows cut by top-k or top-p.

    Raises:
        InputError: Also for more branches than `MOST_BRANCHES`.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> recursive_without_replacement(p, q, n=2)
        tensor(0.8750, dtype=torch.float64)

    References:
        Jeon et al. 2024, recursive rejection sampling. https://arxiv.org/abs/2402.14160
    """
    rows = checked(target_probs, draft_probs, n)
    vocab = rows.p.shape[-1]
    target, draft = (side.cpu().reshape(-1, vocab).numpy() for side in (rows.p, rows.q))
    rates = []
    for p, q in zip(target, draft, strict=True):
        support = int((q > 0).sum())
        draws = min(n, support)
        branches = math.perm(support, max(0, draws - 2))
        if branches > MOST_BRANCHES:
            raise InputError(
                f"{n} draws without replacement from {support} tokens branch up to {branches} times, "
                f"and at most {MOST_BRANCHES} branches are followed; cut the rows by top-k or top-p, or take n = 2"
            )
        rates.append(_follow(p, q, draws))
    return torch.tensor(rates, dtype=torch.float64, device=rows.p.device).reshape(rows.p.shape[:-1])


def kseq_acceptance(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "..."], n: int
) -> Float[Tensor, "*batch"]:
    r"""K-SEQ, n independent draws: each passes with $\min(1, p(x) / (\rho\, q(x)))$.

    With $\beta(\rho) = \sum_x \min(p / \rho, q)$ the acceptance is $1 - (1 - \beta)^n$. The smallest valid $\rho$ in
    $[1, n]$ is the one at which the acceptance equals $\rho \beta$. A larger $\rho$ is valid too, a smaller one is not.
    So the upper end of the bisection is kept.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> kseq_acceptance(p, q, n=3)
        tensor(0.8750, dtype=torch.float64)

    References:
        Sun et al. 2023, SpecTr. https://arxiv.org/abs/2310.15141
    """
    rows = checked(target_probs, draft_probs, n)
    low = torch.ones_like(rows.p[..., 0])
    high = n * low
    for _ in range(BISECTIONS if n > 1 else 0):
        rho = (low + high) / 2
        beta = torch.minimum(rows.p / rho[..., None], rows.q).sum(-1)
        valid = 1 - (1 - beta) ** n <= rho * beta
        low, high = torch.where(valid, low, rho), torch.where(valid, rho, high)
    beta = torch.minimum(rows.p / high[..., None], rows.q).sum(-1)
    return 1 - (1 - beta) ** n


def top_plus_one_acceptance(
    target_probs: Float[Tensor, "*batch vocab"], draft_probs: Float[Tensor, "..."], n: int
) -> Float[Tensor, "*batch"]:
    r"""The n-1 likeliest tokens T of the draft row and one draw from the others, $\tilde q$: the optimum for that law.

    $p(T) + \sum_{x \notin T} \min(p(x), \tilde q(x))$. Tokens with q = 0 are not drafted.

    Example:
        >>> p, q = torch.tensor([0.3, 0.4, 0.3]), torch.tensor([0.6, 0.3, 0.1])
        >>> top_plus_one_acceptance(p, q, n=2)
        tensor(0.9500, dtype=torch.float64)

    References:
        Hu et al. 2025, the greedy scheme. https://arxiv.org/abs/2502.18779
    """
    rows = checked(target_probs, draft_probs, n)
    top = rows.q.topk(min(n - 1, rows.q.shape[-1]), dim=-1).indices
    chosen = (rows.p.gather(-1, top) * (rows.q.gather(-1, top) > 0)).sum(-1)
    others = rows.q.scatter(-1, top, 0)
    mass = others.sum(-1, keepdim=True)
    others = torch.where(mass > 0, others / mass, others)
    return chosen + torch.minimum(rows.p.scatter(-1, top, 0), others).sum(-1)


def _follow(p: Float[np.ndarray, " vocab"], q: Float[np.ndarray, " vocab"], n: int) -> float:
    """Acceptance of n draws from q, normalised, against what is left of the target."""
    passed, over, left = float(np.minimum(p, q).sum()), np.maximum(q - p, 0), np.maximum(p - q, 0)
    if n == 1 or not left.any():
        return passed
    left = left / left.sum()
    if n == 2:
        return passed + _last(left, q, over)
    for x in np.flatnonzero(over):
        rest = q.copy()
        rest[x] = 0
        if rest.any():
            passed += over[x] * _follow(left, rest / rest.sum(), n - 1)
    return passed


def _last(
    left: Float[np.ndarray, " vocab"], q: Float[np.ndarray, " vocab"], over: Float[np.ndarray, " vocab"]
) -> float:
    r"""The last draw, after token x was refused: $\sum_x over(x) \sum_{y \ne x} \min(left(y), q(y) / (1 - q(x)))$.

    The target has nothing left at a refused token, so the code need not exclude $y = x$. The tokens y are sorted by
    left / q. For each x, tokens with a ratio of up to $1 / (1 - q(x))$ contribute left(y), the others
    $q(y) / (1 - q(x))$.
    """
    refused = np.flatnonzero(over)
    others = 1 - q[refused]
    top = int(q.argmax())
    others[refused == top] = q[:top].sum() + q[top + 1 :].sum()
    refused, others = refused[others > 0], others[others > 0]
    drawn = q > 0
    left, rest = left[drawn], q[drawn]
    with np.errstate(over="ignore"):
        ratios = left / rest
    order = np.argsort(ratios)
    below = np.concatenate([[0.0], np.cumsum(left[order])])
    count = np.searchsorted(ratios[order], 1 / others, side="right")
    return float(over[refused] @ (below[count] + outside(rest[order])[count] / others))
