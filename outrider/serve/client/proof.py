"""A proof over HTTP: greedy outputs are the likeliest tokens, and drawn tokens fit the log-probabilities."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from outrider.proof.statistics import LEAST_DEGREES, P_BOUND, ChiSquare, chi_square, tested
from outrider.serve.client.answers import AnswerToken, complete, score, tokenize
from outrider.serve.client.remote import Remote, RemoteError

NUM_TOKENS = 32
"""Tokens of a greedy output."""
DRAWN_TOKENS = 4
"""Tokens of a drawn output."""
TOP = 20
"""How many likeliest tokens are told apart; what most servers tell."""
RANKS = 4
"""How many likeliest tokens are told apart at every place."""
AT_ONCE = 16
"""Outputs that one request asks for."""
LEAST_EXPECTED = 5.0
"""Tokens that are expected less often are counted together."""
MOST_NOISE = 0.1
"""Largest rounding, in nats, of a server that works."""
EXACT = 1e-5
"""Smaller gaps, in nats, are ties whatever the rounding is."""
DRAFTS = "vllm:spec_decode_num_draft_tokens_total"


@dataclass(frozen=True, kw_only=True)
class Parting:
    """A token of a greedy output that is not the likeliest one.

    Attributes:
        gap: Log-probability of the likeliest token minus that of this one.
    """

    prompt: int
    position: int
    token: int
    gap: float


@dataclass(frozen=True, kw_only=True)
class GreedyCheck:
    """Greedy outputs, scored by the server where it drafts nothing.

    Attributes:
        noise: Largest difference between the log-probabilities of generation and of scoring.
        partings: Tokens that are not the likeliest ones.
    """

    num_tokens: int
    noise: float
    partings: tuple[Parting, ...]

    @property
    def differences(self) -> list[Parting]:
        """Tokens that rounding does not explain: two log-probabilities are off by the noise each."""
        return [each for each in self.partings if each.gap > 2 * min(self.noise, MOST_NOISE) + EXACT]

    @property
    def holds(self) -> bool:
        """Whether all tokens are the likeliest ones, and the server tells the same twice."""
        return not self.differences and self.noise <= MOST_NOISE


@dataclass(frozen=True, kw_only=True)
class DrawnCheck:
    """Drawn outputs against what the server says about its own distribution.

    Attributes:
        first: First tokens, against the probabilities after their prompt.
        ranks: All tokens, by how likely they were at their places.
        num_draft_tokens: Tokens that the server drafted meanwhile; None if it does not tell.
    """

    first: ChiSquare
    ranks: ChiSquare
    num_draft_tokens: int | None

    @property
    def p_value(self) -> float:
        """The smaller p-value of the two tests, corrected for their number."""
        return min(1.0, 2 * min(self.first.p_value, self.ranks.p_value))

    @property
    def verdict(self) -> Literal["fits", "differs", "inconclusive"]:
        """Whether the outputs fit, differ, or are too few or too similar to tell."""
        if self.p_value <= P_BOUND:
            return "differs"
        return "inconclusive" if self.doubt else "fits"

    @property
    def doubt(self) -> str | None:
        """Why the test is weak; None if it is not."""
        if self.num_draft_tokens == 0:
            return "nothing was drafted"
        if self.first.degrees < LEAST_DEGREES:
            return f"{self.first.degrees} degrees of freedom tell too few tokens apart; draw more"
        return None


@dataclass(frozen=True, kw_only=True)
class RemoteProof:
    """What was found out about a server.

    Attributes:
        drawn: None if nothing was drawn.
    """

    greedy: GreedyCheck
    drawn: DrawnCheck | None

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the server."""
        return self.greedy.holds and (self.drawn is None or self.drawn.verdict != "differs")


def prove(
    remote: Remote,
    prompts: Sequence[str],
    *,
    num_draws: int,
    seed: int = 0,
    progress: Callable[[int], None] = lambda amount: None,
) -> RemoteProof:
    """Check a server over HTTP.

    Args:
        num_draws: Outputs to draw, over all prompts; 0 draws none.
        progress: Called with how many outputs have come.
    """
    greedy = check_greedy(remote, prompts, progress)
    if not num_draws:
        return RemoteProof(greedy=greedy, drawn=None)
    return RemoteProof(greedy=greedy, drawn=check_drawn(remote, prompts, num_draws, seed, progress))


def check_greedy(remote: Remote, prompts: Sequence[str], progress: Callable[[int], None]) -> GreedyCheck:
    """Generate greedily, and let the server score what came."""
    partings, noise, count = list[Parting](), 0.0, 0
    for number, prompt in enumerate(prompts):
        tokens = tokenize(remote, {"prompt": prompt})
        [output] = complete(remote, tokens, temperature=0, max_tokens=NUM_TOKENS, logprobs=1)
        scored = score(remote, [*tokens, *(place.token for place in output)], top=1)[len(tokens) - 1 :]
        for position, (emitted, read) in enumerate(zip(output, scored, strict=True)):
            noise = max(noise, abs(emitted.logprob - read.logprob))
            if read.gap > 0:
                partings.append(Parting(prompt=number, position=position, token=read.token, gap=read.gap))
        count += len(output)
        progress(1)
    return GreedyCheck(num_tokens=count, noise=noise, partings=tuple(partings))


def check_drawn(
    remote: Remote,
    prompts: Sequence[str],
    num_draws: int,
    seed: int,
    progress: Callable[[int], None],
) -> DrawnCheck:
    """Draw outputs at temperature 1, the same number after each prompt, and test their tokens.

    There the law is that of the raw logits, whose log-probabilities servers tell.
    """
    before = drafted(remote)
    firsts, ranks = list[ChiSquare](), _Ranks()
    shares = np.array_split(np.arange(num_draws), len(prompts))
    for prompt, share in zip(prompts, shares, strict=True):
        drawn: list[list[AnswerToken]] = []
        while len(drawn) < len(share):
            drawn += complete(
                remote,
                prompt,
                n=min(AT_ONCE, len(share) - len(drawn)),
                max_tokens=DRAWN_TOKENS,
                temperature=1.0,
                logprobs=TOP,
                seed=seed + len(drawn),
            )
            progress(min(AT_ONCE, len(share)))
        if drawn:
            firsts.append(first_tokens(drawn))
            ranks.add(place for output in drawn for place in output)
        seed += num_draws
    after = drafted(remote)
    return DrawnCheck(
        first=_sum(firsts),
        ranks=ranks.test(),
        num_draft_tokens=None if before is None or after is None else after - before,
    )


def first_tokens(outputs: Sequence[Sequence[AnswerToken]]) -> ChiSquare:
    """The test of first tokens after one prompt: the likeliest ones each, all others together, or with the rarest of
    these where they are too few.
    """
    law = probabilities(outputs[0][0])
    counts = Counter(output[0].token for output in outputs)
    many = [token for token, share in law.items() if share * len(outputs) >= LEAST_EXPECTED]
    observed = [float(counts[token]) for token in many]
    expected = [law[token] * len(outputs) for token in many]
    rest = len(outputs) - sum(expected)
    others = len(outputs) - sum(observed)
    if rest > LEAST_EXPECTED / 2 or not many:
        observed.append(others)
        expected.append(rest)
    else:
        observed[-1] += others
        expected[-1] += rest
    return chi_square(observed, expected)


def probabilities(place: AnswerToken) -> dict[int, float]:
    """The probabilities of the likeliest tokens, the likeliest one first."""
    probabilities = {token: math.exp(value) for token, value in place.top.items()}
    return dict(sorted(probabilities.items(), key=lambda each: -each[1]))


def drafted(remote: Remote) -> int | None:
    """Tokens that the server has drafted so far; None if it does not tell."""
    try:
        lines = remote.text("/metrics").splitlines()
    except RemoteError:
        return None
    counters = [line for line in lines if line.startswith(DRAFTS)]
    return round(sum(float(line.rsplit(" ", 1)[-1]) for line in counters)) if counters else None


class _Ranks:
    r"""The test of tokens at all places, by their rank among the likeliest tokens there.

    At each place, the indicator of the token's rank minus the probabilities of the ranks has mean 0 under the law,
    whatever came before. So the sum over places, $S$, has mean 0 and the covariance $\sum_t (\mathrm{diag}(p_t) - p_t
    p_t^\top)$, and $S^\top C^+ S$ has about a chi-square distribution.
    """

    def __init__(self) -> None:
        self._excess: Float[np.ndarray, " ranks"] = np.zeros(RANKS)
        self._covariance: Float[np.ndarray, "ranks ranks"] = np.zeros((RANKS, RANKS))
        self._count = 0

    def add(self, places: Iterable[AnswerToken]) -> None:
        """Add tokens."""
        for place in places:
            law = list(probabilities(place).items())[:RANKS]
            shares = np.zeros(RANKS)
            shares[: len(law)] = [share for _, share in law]
            seen = np.array([float(token == place.token) for token, _ in law] + [0.0] * (RANKS - len(law)))
            self._excess += seen - shares
            self._covariance += np.diag(shares) - np.outer(shares, shares)
            self._count += 1

    def test(self) -> ChiSquare:
        """The test of all tokens so far."""
        statistic = float(self._excess @ np.linalg.pinv(self._covariance) @ self._excess)
        return tested(statistic, int(np.linalg.matrix_rank(self._covariance)), self._count)


def _sum(tests: Sequence[ChiSquare]) -> ChiSquare:
    """Independent tests as one."""
    return tested(
        sum(each.statistic for each in tests),
        sum(each.degrees for each in tests),
        sum(each.num_draws for each in tests),
    )
