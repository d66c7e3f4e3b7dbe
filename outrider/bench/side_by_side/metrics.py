r"""What is told of served requests. Each function is one figure, and its docstring is the formula.

Of a request $r$: $S_r$ steps, of which $s_r$ drafted; $l_r$ drafted and $j_r$ accepted tokens, before the end cuts the
output; $o_r$ output tokens; it arrives at $t_a$, its first token comes at $t_1$ and its last one at $t_o$.

The same names mean other things in other tools. vLLM and AIPerf are named where they have the figure.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.side_by_side.served import Served, ServedStep
from outrider.core.inputs import InputError, unknown
from outrider.core.metrics import conditional_rates

PERCENTILES = (50, 90, 99)
BISECTIONS = 60


def drafting(requests: Iterable[Served]) -> list[ServedStep]:
    """All steps that drafted at least one token."""
    return [step for request in requests for step in request.steps if step.drafted]


def acceptance_length(requests: Sequence[Served]) -> float | None:
    r"""$1 + \sum_r j_r / \sum_r s_r$, over all drafting steps together. None where nothing was drafted.

    vLLM: acceptance_length. AIPerf: Token-Weighted Acceptance Length.
    """
    steps = drafting(requests)
    return 1 + sum(step.accepted for step in steps) / len(steps) if steps else None


def mean_acceptance_length(requests: Sequence[Served]) -> float | None:
    r"""The mean over requests that drafted of $1 + j_r / s_r$. Short requests weigh as much as long ones.

    vLLM: mean_acceptance_length of each request. AIPerf: Acceptance Length (avg).
    """
    each = [drafting([request]) for request in requests]
    lengths = [1 + sum(step.accepted for step in steps) / len(steps) for steps in each if steps]
    return statistics.fmean(lengths) if lengths else None


def acceptance_rate(requests: Sequence[Served]) -> float | None:
    r"""$\sum_r j_r / \sum_r l_r$. Of trees, $l$ counts all nodes.

    vLLM: acceptance_rate. AIPerf: Overall Draft Acceptance Rate.
    """
    steps = drafting(requests)
    return sum(step.accepted for step in steps) / sum(step.drafted for step in steps) if steps else None


def mean_acceptance_rate(requests: Sequence[Served]) -> float | None:
    """The mean over requests that drafted of $j_r / l_r$.

    vLLM: draft_acceptance_rate of each request. AIPerf: Draft Acceptance Rate.
    """
    each = [drafting([request]) for request in requests]
    rates = [sum(s.accepted for s in steps) / sum(s.drafted for s in steps) for steps in each if steps]
    return statistics.fmean(rates) if rates else None


def accepted_per_verified(requests: Sequence[Served]) -> float | None:
    r"""$\sum_r (j_r + s_r) / \sum_r (l_r + s_r)$: of the positions that the target computed in drafting steps, those
    that became output. AIPerf: Accepted per Verified.
    """
    steps = drafting(requests)
    if not steps:
        return None
    return sum(s.accepted + 1 for s in steps) / sum(s.drafted + 1 for s in steps)


def marginal_acceptance(requests: Sequence[Served]) -> list[float]:
    """For $i$ = 1, 2, ...: the share of all drafting steps that accepted at least $i$ tokens.

    vLLM: per_position_acceptance_rates. Steps with shorter drafts count as rejections.
    """
    steps = drafting(requests)
    deepest = max((step.accepted for step in steps), default=0)
    return [sum(step.accepted > i for step in steps) / len(steps) for i in range(deepest)]


def marginal_among_drafted(requests: Sequence[Served]) -> list[float]:
    """The same among the steps that drafted at least $i$ tokens, so that adaptive lengths do not lower it."""
    steps = drafting(requests)
    rates = []
    for i in range(max((step.drafted for step in steps), default=0)):
        deep = [step for step in steps if step.drafted > i]
        rates.append(sum(step.accepted > i for step in deep) / len(deep))
    return rates


def conditional_acceptance(requests: Sequence[Served]) -> list[float]:
    """For $i$ = 1, 2, ...: of the steps that drafted at least $i$ tokens and accepted the first $i - 1$, the share that
    accepted token $i$ as well. Of chains; of a tree, a step counts as drafted to the number of its nodes.
    """
    return conditional_rates([(step.drafted, step.accepted) for step in drafting(requests)])


def acceptance_histogram(requests: Sequence[Served]) -> list[int]:
    """How many drafting steps accepted 0, 1, 2, ... tokens."""
    accepted = [step.accepted for step in drafting(requests)]
    return np.bincount(accepted).tolist() if accepted else []


def block_efficiency(requests: Sequence[Served]) -> float | None:
    r"""Emitted tokens over all steps, plain ones and those that the end cuts too. None where steps are not told."""
    steps = [step for request in requests for step in request.steps]
    return sum(step.emitted for step in steps) / len(steps) if steps else None


def nodes_per_step(requests: Sequence[Served]) -> float | None:
    """Draft tokens of a drafting step, mean."""
    steps = drafting(requests)
    return statistics.fmean(step.drafted for step in steps) if steps else None


def alpha(length: float, num_speculative_tokens: int) -> float:
    r"""The acceptance rate $a$ of independent tokens for which $1 + a + \ldots + a^k$ is an acceptance length.

    Example:
        >>> round(alpha(1.75, 2), 6)
        0.5
    """
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        expected = sum(middle**i for i in range(num_speculative_tokens + 1))
        low, high = (middle, high) if expected < length else (low, middle)
    return high


def time_to_first_token(requests: Sequence[Served]) -> list[float]:
    """$t_1 - t_a$ of each request, in seconds: queueing, prefill and the first step. vLLM and AIPerf: TTFT."""
    return [request.first - request.arrived for request in requests if request.first is not None]


def time_per_output_token(requests: Sequence[Served]) -> list[float]:
    """$(t_o - t_1) / (o - 1)$ of each request of more than one token, in seconds.

    vLLM: TPOT. AIPerf calls this one ITL. The first chunk may hold several tokens: all but one count as free.
    """
    return [
        (request.ended - request.first) / (request.num_tokens - 1)
        for request in requests
        if request.first is not None and request.num_tokens > 1
    ]


def inter_chunk_latency(requests: Sequence[Served]) -> list[float]:
    """$t_k - t_{k-1}$ between the chunks of a request, all of them, in seconds.

    vLLM calls this one ITL: it grows with the tokens of a chunk. AIPerf: Inter Chunk Latency.
    """
    return [b.at - a.at for request in requests for a, b in zip(request.steps, request.steps[1:], strict=False)]


def prompt_throughput(requests: Sequence[Served]) -> float | None:
    r"""$\sum_r p_r / \sum_r (t_1 - t_a)$, with $p_r$ tokens of the prompt. None where first tokens are not told.

    It says how fast prompts are read where one request runs after the other; otherwise requests wait in between.
    """
    known = [each for each in requests if each.first is not None]
    seconds = sum(time_to_first_token(known))
    return sum(each.prompt_tokens for each in known) / seconds if seconds > 0 else None


def decode_throughput(requests: Sequence[Served]) -> float | None:
    r"""$\sum_r (o_r - e_r) / \sum_r (t_o - t_1)$, with $e_r$ tokens that came first: decoding without the prompt.

    None where first tokens are not told. Engines that tell no steps say one token first.
    """
    known = [(each, each.first) for each in requests if each.first is not None]
    seconds = sum(each.ended - first for each, first in known)
    tokens = sum(each.num_tokens - (each.steps[0].emitted if each.steps else 1) for each, _ in known)
    return tokens / seconds if seconds > 0 else None


def drafted_and_accepted(requests: Sequence[Served]) -> tuple[int, int]:
    """Draft tokens of all requests, and the accepted ones, whether their steps are told or not."""
    steps = drafting(requests)
    drafted = sum(step.drafted for step in steps) + sum(each.draft_tokens or 0 for each in requests)
    return drafted, sum(step.accepted for step in steps) + sum(each.accepted_tokens or 0 for each in requests)


def end_to_end(requests: Sequence[Served]) -> list[float]:
    """$t_o - t_a$ of each request, in seconds. vLLM: E2EL. AIPerf: Request Latency."""
    return [request.ended - request.arrived for request in requests]


def request_throughput(requests: Sequence[Served], seconds: float) -> float:
    """Requests over the seconds of the runs that served them."""
    return len(requests) / seconds


def output_throughput(requests: Sequence[Served], seconds: float) -> float:
    r"""$\sum_r o_r$ over the seconds of the runs that served them. Tokens are counted, not chunks."""
    return sum(request.num_tokens for request in requests) / seconds


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What a request must keep to be a good one, each in milliseconds; None asks for nothing.

    Attributes:
        ttft: Time to its first token.
        tpot: Time per further output token; of an answer of one token it is 0.
        e2el: Time to its last token.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> "Objectives | None":
        """The objectives of texts such as `ttft:200`; None without any.

        Example:
            >>> Objectives.parse(["ttft:200", "tpot:50"])
            Objectives(ttft=200.0, tpot=50.0, e2el=None)
        """
        limits: dict[str, float] = {}
        for text in texts:
            name, _, value = text.partition(":")
            if name not in ("ttft", "tpot", "e2el"):
                raise unknown("objective", name, ("ttft", "tpot", "e2el"))
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if not 0 < limits[name] < math.inf:
                raise InputError(f"an objective needs milliseconds > 0, as in {name}:200, got {text!r}")
        return cls(**limits) if limits else None

    def met(self, request: Served) -> bool:
        """Whether a request keeps all objectives. One whose first token is not told keeps none of ttft and tpot."""
        unknown = [math.inf]
        took: Mapping[str, float] = {
            "ttft": (time_to_first_token([request]) or unknown)[0],
            "tpot": 0.0 if request.num_tokens == 1 else (time_per_output_token([request]) or unknown)[0],
            "e2el": end_to_end([request])[0],
        }
        limits = {name: limit for name, limit in vars(self).items() if limit is not None}
        return all(1000 * took[name] <= limit for name, limit in limits.items())


def goodput(requests: Sequence[Served], seconds: float, objectives: Objectives) -> float:
    """Requests per second that keep all objectives. vLLM and AIPerf: goodput."""
    return sum(map(objectives.met, requests)) / seconds


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles; None without values."""
    if not values:
        return None
    by_rank = dict(zip((f"p{p}" for p in PERCENTILES), np.percentile(values, PERCENTILES).tolist(), strict=True))
    return {"mean": statistics.fmean(values), **by_rank}
