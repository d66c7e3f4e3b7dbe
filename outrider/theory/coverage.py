"""How many steps a given text takes: the expectation over drafts and coins, from the rows along the text alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from outrider.core.option import Bounds
from outrider.core.types import InputError

Rule = Literal["token", "block"]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Expectations over all ways in which steps can emit one text.

    Attributes:
        steps: Expected steps that begin before the bound.
        tokens: Expected tokens that these steps emit.
    """

    steps: float
    tokens: float


def survival(log_ratios: Float[np.ndarray, " gamma"], rule: Rule) -> Float[np.ndarray, " bounds"]:
    r"""Probability that a step accepts at least 0, 1, ..., $\gamma$ tokens, given that it emits the text.

    A chain drafts the text's next tokens $y_1 \ldots y_i$ with probability $\prod q_j(y_j)$, the rule accepts them with
    probability $w_i$, and the target generates them with probability $\prod p_j(y_j)$. With
    $S_i = \sum_{j \le i} \log p_j(y_j) / q_j(y_j)$ the probability is therefore

    - token verification: $\prod_{j \le i} \min(1, q_j / p_j)$,
    - block verification: $\exp(-\max_{0 \le k \le i} S_k)$.

    Example:
        >>> ratios = np.log([2.0, 0.5])
        >>> survival(ratios, "token").tolist(), survival(ratios, "block").tolist()
        ([1.0, 0.5, 0.5], [1.0, 0.5, 0.5])
    """
    if rule == "token":
        return np.exp(-np.concatenate([[0.0], np.cumsum(np.maximum(log_ratios, 0))]))
    return np.exp(-np.maximum.accumulate(np.concatenate([[0.0], np.cumsum(log_ratios)])))


def coverage(
    log_ratios: Float[np.ndarray, " text"], gamma: int, rule: Rule, *, before: int | None = None, ended: bool = False
) -> Coverage:
    r"""Expected steps that a text takes with chains of $\gamma$ tokens under a rule that keeps the target's law.

    A lossless rule emits texts with the target's law, whatever the drafts are. So the steps of a run can be counted on
    a text that the target generated alone: the expected number of steps is the sum of the probabilities that a step
    begins at each place. No token is drafted and no random number is drawn. The mean over texts equals the mean over
    runs and has less noise, and lengths and rules can be compared on the same texts. Block efficiency is the sum of
    `tokens` over all texts, divided by the sum of `steps`.

    Let u be `survival` from place s on. A step at s ends after i + 1 tokens with probability $u_i - u_{i+1}$, and after
    $\gamma + 1$ tokens with probability $u_\gamma$. The next step begins there.

    Args:
        log_ratios: $\log p(y) / q(y)$ of each token of the text, where p is the target's row after the tokens before it
            and q the drafter's. inf stands for a token that the drafter rules out.
        before: Only steps that begin at one of the text's first `before` places are counted. By default these are all
            places with room for a whole draft.
        ended: Whether the text's last token is an end token, so that no step goes beyond it.

    Raises:
        InputError: gamma is below 1, or a step could begin so late that the text ends before its tokens.

    Example:
        >>> coverage(np.zeros(5), 1, "token"), coverage(np.full(3, np.inf), 2, "block", before=1)
        (Coverage(steps=2.0, tokens=4.0), Coverage(steps=1.0, tokens=1.0))

    References:
        Leviathan et al. 2023. https://arxiv.org/abs/2211.17192
        Sun et al. 2024, block verification. https://arxiv.org/abs/2403.10444
    """
    length = len(log_ratios)
    bound = length - gamma if before is None and not ended else length if before is None else before
    Bounds(least=1).check("gamma", gamma)
    if not ended and bound + gamma > length:
        raise InputError(
            f"steps of {gamma} draft tokens in a text of {length} tokens must begin before {length - gamma}, "
            f"got before={bound}"
        )
    places = range(min(bound, length))
    return expected_coverage([survival(log_ratios[place : place + gamma], rule) for place in places], length)


def expected_coverage(survivals: Sequence[Float[np.ndarray, " bounds"]], length: int) -> Coverage:
    """Expected steps of a text and the tokens that they emit, from `survival` at each place where a step may begin.

    Args:
        length: Tokens of the text.
    """
    bound = len(survivals)
    chances = begun(survivals, length)
    places = np.minimum(np.arange(len(chances)), length)
    return Coverage(steps=float(chances[:bound].sum()), tokens=float(chances[bound:] @ places[bound:]))


def begun(survivals: Sequence[Float[np.ndarray, " bounds"]], length: int) -> Float[np.ndarray, " places"]:
    """Chance that a step begins at each place of a text, or that the last step ends there.

    Args:
        survivals: `survival` at each place where a step may begin.
        length: Tokens of the text. Places behind it stand for steps that would emit more.
    """
    chances = np.zeros(length + max(map(len, survivals), default=1) + 1)
    chances[0] = 1.0
    for place, lasts in enumerate(survivals):
        ends = np.append(-np.diff(lasts), lasts[-1])
        chances[place + 1 : place + 1 + len(ends)] += chances[place] * ends
    return chances
