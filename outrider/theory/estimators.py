"""Expected acceptance of token verification, block verification and the best rule, from one trace of chains."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from outrider.core.types import InputError


@dataclass(frozen=True, kw_only=True)
class ExpectedAccepted:
    """Expected accepted draft tokens per step under each rule, given the chains that were drafted.

    In every single step token <= block <= bound. Block efficiency is one more than any of them.

    Attributes:
        token: Under token verification, per step.
        block: Under block verification, per step.
        bound: Under the best rule that is lossless over one block, per step.
    """

    token: Float[np.ndarray, " steps"]
    block: Float[np.ndarray, " steps"]
    bound: Float[np.ndarray, " steps"]


def expected_accepted(log_ratios: Float[np.ndarray, "steps gamma"]) -> ExpectedAccepted:
    r"""Expected accepted tokens of three rules from one trace, without a second run and without random numbers.

    A step drafted $x_1 \ldots x_\gamma$ from the draft rows q. The trace has all of them, accepted or not. With
    $r_j = p_j(x_j) / q_j(x_j)$, $S_i = \sum_{j \le i} \log r_j$ and $S_0 = 0$ the expectation of $\tau$ over the rule's
    random decisions is

    - token verification: $\sum_i \prod_{j \le i} \min(1, r_j)$,
    - block verification: $\sum_i \exp(S_i - \max_{0 \le k \le i} S_k)$,
    - the bound: $\sum_i \min(1, \exp(S_i))$, whose mean over chains is $\sum_i \sum_x \min(p(x_{1..i}), q(x_{1..i}))$.

    All three rules judge the same chains, so their differences have far less noise than those between three runs. The
    chains start where the recorded run's steps started; another rule would have started its own steps elsewhere.

    Args:
        log_ratios: $\log r_j$ of each step. -inf stands for a token that the target rules out; this token and all after
            it count nothing. NaN pads the end of a chain shorter than gamma and counts nothing either.

    Raises:
        InputError: If there are no steps, if a ratio is +inf (a drafted token has q > 0), or if NaN stands before a
            number.

    Example:
        >>> found = expected_accepted(np.log([[0.5, 2.0], [2.0, 0.5]]))
        >>> found.token.tolist(), found.block.tolist(), found.bound.tolist()
        ([1.0, 1.5], [1.5, 1.5], [1.5, 2.0])

    References:
        Leviathan et al. 2023. https://arxiv.org/abs/2211.17192
        Sun et al. 2024, block verification. https://arxiv.org/abs/2403.10444
    """
    padding = np.isnan(log_ratios)
    if not len(log_ratios):
        raise InputError("log_ratios must hold at least one step, got none; record a run first")
    if (padding[:, :-1] & ~padding[:, 1:]).any():
        raise InputError("NaN pads the end of a shorter chain, but stands before a number; use -inf for a ratio of 0")
    if np.isposinf(log_ratios).any():
        raise InputError("a log ratio is +inf, but a drafted token has q > 0; take q from the row it was drawn from")
    log_r = np.where(padding, -np.inf, log_ratios).astype(np.float64)
    s = np.cumsum(log_r, axis=1)
    highest = np.maximum.accumulate(np.maximum(s, 0), axis=1)
    return ExpectedAccepted(
        token=np.exp(np.cumsum(np.minimum(log_r, 0), axis=1)).sum(1),
        block=np.exp(s - highest).sum(1),
        bound=np.exp(np.minimum(s, 0)).sum(1),
    )
