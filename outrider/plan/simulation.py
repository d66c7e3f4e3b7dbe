"""What users see under a load: requests arrive at random, wait for a slot, and step together; event by event."""

import heapq
import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from outrider.core.inputs import InputError
from outrider.plan.prediction import Planner
from outrider.plan.ways import DraftConfiguration

OUTPUTS = 16
"""Runs of each recorded text from which outputs are taken."""
KEEPS_UP = 0.95
"""Share of the arriving requests that must leave per second, or the load is too high."""


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The median and the 99th percentile, in seconds."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: list[float]) -> "Percentiles":
        """Of some values; NaN if there are none."""
        if not values:
            return cls(p50=math.nan, p99=math.nan)
        p50, p99 = np.quantile(values, [0.5, 0.99]).tolist()
        return cls(p50=p50, p99=p99)


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """What a simulation found.

    Attributes:
        rate: Requests per second that arrived.
        requests: Number of requests.
        requests_per_second: Requests that ended, per second.
        tokens_per_second: Tokens of all requests, per second.
        ttft: Seconds from arrival to the first token.
        tpot: Seconds between the later tokens of a request, on average over the request.
        e2e: Seconds from arrival to the end.
        mean_running: Requests in a step, on average.
        keeps_up: Whether requests end as fast as they arrive.
    """

    rate: float
    requests: int
    requests_per_second: float
    tokens_per_second: float
    ttft: Percentiles
    tpot: Percentiles
    e2e: Percentiles
    mean_running: float
    keeps_up: bool


@dataclass(frozen=True, kw_only=True)
class _Output:
    """An output that a request may have: its prompt's tokens, its tokens, and its steps."""

    prompt: int
    tokens: int
    steps: int


def simulate(
    planner: Planner, way: DraftConfiguration, *, rate: float, slots: int, requests: int = 2000, seed: int = 0
) -> Simulated:
    """Let requests arrive (Poisson) whose outputs are those of the record.

    The number of steps of each output is drawn from the record, place by place, because acceptance comes in bursts.
    Between two events the number of running requests is constant, so that all steps in between are made at once. A
    prompt is run alone, before the next step.

    Args:
        planner: The record and the costs.
        way: How requests are decoded.
        rate: Requests per second.
        slots: Most requests at once.
        requests: How many arrive.
        seed: Of arrivals and outputs.

    Raises:
        InputError: A rate or a number that is not above 0.
    """
    if not 0 < rate < math.inf or slots < 1 or requests < 1:
        raise InputError(f"a load needs a rate, slots and requests above 0, got {rate}, {slots} and {requests}")
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests)).tolist()
    pool = _outputs(planner, way, rng)
    chosen = [pool[i] for i in rng.integers(len(pool), size=requests).tolist()]
    seconds = [0.0, *(planner.predict(way, b).seconds for b in range(1, slots + 1))]
    per_token = _prompt_seconds(planner, slots)
    clock, num_steps, waiting = 0.0, 0, 0
    ends: list[tuple[int, int]] = []
    first = [0.0] * requests
    ttft: list[float] = []
    tpot: list[float] = []
    e2e: list[float] = []
    steps_of_requests = 0
    while waiting < requests or ends:
        if not ends and arrivals[waiting] > clock:
            clock = arrivals[waiting]
        new: list[int] = []
        while waiting < requests and len(ends) < slots and arrivals[waiting] <= clock:
            clock += per_token * (chosen[waiting].prompt - 1)
            heapq.heappush(ends, (num_steps + chosen[waiting].steps, waiting))
            new.append(waiting)
            waiting += 1
        running = len(ends)
        step = seconds[running]
        for request in new:
            first[request] = clock + step
            ttft.append(first[request] - arrivals[request])
        count = ends[0][0] - num_steps
        if waiting < requests and running < slots:
            count = min(count, max(1, math.ceil((arrivals[waiting] - clock) / step)))
        clock, num_steps = clock + count * step, num_steps + count
        steps_of_requests += running * count
        while ends and ends[0][0] == num_steps:
            _, request = heapq.heappop(ends)
            e2e.append(clock - arrivals[request])
            if chosen[request].tokens > 1:
                tpot.append((clock - first[request]) / (chosen[request].tokens - 1))
    left = requests / clock
    return Simulated(
        rate=rate,
        requests=requests,
        requests_per_second=left,
        tokens_per_second=sum(output.tokens for output in chosen) / clock,
        ttft=Percentiles.of(ttft),
        tpot=Percentiles.of(tpot),
        e2e=Percentiles.of(e2e),
        mean_running=steps_of_requests / num_steps,
        keeps_up=left >= KEEPS_UP * requests / arrivals[-1],
    )


def _outputs(planner: Planner, way: DraftConfiguration, rng: np.random.Generator) -> list[_Output]:
    """Outputs of every recorded text, with steps drawn from the chances at each place."""
    outputs: list[_Output] = []
    for i, text in enumerate(planner.record.texts):
        count = len(text.tokens)
        if way.is_plain:
            outputs += [_Output(prompt=text.prompt, tokens=count, steps=count)] * OUTPUTS
            continue
        survivals = way.survivals(text, planner.record.drafts[way.drafter][i])
        for _ in range(OUTPUTS):
            outputs.append(_Output(prompt=text.prompt, tokens=count, steps=_drawn_steps(survivals, rng.random(count))))
    return outputs


def _drawn_steps(survivals: list[Float[np.ndarray, " bounds"]], draws: Float[np.ndarray, " places"]) -> int:
    """Steps of one run of a text: a step accepts as many tokens as its draw survives."""
    place = steps = 0
    while place < len(survivals):
        place += max(1, int((survivals[place] > draws[place]).sum()))
        steps += 1
    return steps


def _prompt_seconds(planner: Planner, slots: int) -> float:
    """Seconds per prompt token: what a further token adds to the widest forward that was measured."""
    widest = min(slots, max(row.requests for table in planner.costs.values() for row in table.rows))
    table = next(iter(planner.costs.values()))
    rows = {row.length: row.target for row in table.rows if row.requests == widest and not row.sampled}
    if len(rows) < 2:
        return planner.plain_seconds(1)
    longest = max(rows)
    return max(0.0, rows[longest] - rows[0]) / (longest * widest)
