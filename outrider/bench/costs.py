"""The costs of drafting and verifying on this machine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.decoding.step import StepDecoding
from outrider.engine.engine import Engine
from outrider.lengths.costs import StepCost
from outrider.plan.probe import CONTEXT, REPEATS, WARM_UP, StepProbe, StepShape
from outrider.trees.chain import ChainTree
from outrider.verifiers.match import MatchVerifier

LENGTHS = (1, 4, 8, 16)
"""Draft lengths to time."""
BISECTIONS = 50


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs in units of a target forward over one token, as `planned` and `best_topology` take them.

    Attributes:
        draft: One call of the drafter.
        token: The cost that one more token adds to the target's forward.
    """

    draft: float
    token: float

    def speedup(self, acceptance: float, length: int) -> float:
        r"""Tokens per second over plain decoding, $(1 + a + \ldots + a^\gamma) / (1 + \gamma (c + v))$.

        Assumes that each token of a chain is accepted independently with the same probability.

        Example:
            >>> Costs(draft=0.1, token=0.0).speedup(0.5, 2)
            1.4583333333333335

        References:
            Leviathan et al. 2023, section 3.3. https://arxiv.org/abs/2211.17192
        """
        tokens = sum(acceptance**depth for depth in range(length + 1))
        return tokens / (1 + length * (self.draft + self.token))

    def best_length(self, acceptance: float, lengths: Sequence[int]) -> int:
        """The length of the largest speedup."""
        return max(lengths, key=lambda length: self.speedup(acceptance, length))

    def break_even(self, length: int) -> float | None:
        """The acceptance at which a length is as fast as plain decoding; None where even 1 is not enough.

        Example:
            >>> Costs(draft=0.25, token=0.0).break_even(1)
            0.25
        """
        if self.speedup(1.0, length) < 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if self.speedup(middle, length) < 1 else (low, middle)
        return high

    def target(self, count: int) -> list[float]:
        """A target forward over 1, 2, ... `count` tokens."""
        return [1 + self.token * more for more in range(count)]


def measure_costs(engine: Engine, *, rounds: int = 3, num_requests: int = 1, until: Deadline = ENDLESS) -> Costs:
    """Time an engine's target and drafter in chains of several lengths, taking turns: medians of the probe's steps.

    Args:
        rounds: How often each length is timed, in units of a short probe.
        num_requests: Number of requests that run together. The unit is then a target forward over one token of each; a
            drafter call drafts for all; one more token is one more per request.
        until: No further round is begun then; one is made at least.

    Raises:
        InputError: The engine's drafter proposed nothing, or the engine has fewer slots.
    """
    if not 1 <= num_requests <= engine.max_slots:
        raise InputError(f"num_requests must be in 1 .. {engine.max_slots}, the engine's slots, got {num_requests}")
    engine.rest()
    parts = replace(engine.parts, tree=ChainTree(), verifier=MatchVerifier(), decoding=StepDecoding())
    deepest = LENGTHS[-1] if parts.drafter.max_depth is None else parts.drafter.max_depth
    kinds = [StepShape(requests=num_requests, length=n) for n in (0, *LENGTHS) if n <= deepest]
    bench = StepProbe(parts, min(CONTEXT, parts.target.max_context // 4))
    try:
        turns = rounds * REPEATS
        with task(f"costs of {num_requests} together", (WARM_UP + turns) * len(kinds), "steps") as bar:
            steps: list[StepCost] = []
            for turn in range(-WARM_UP, turns):
                if until.passed and (steps or turn > 0):
                    break
                timed = [bench.step(kind) for kind in kinds]
                steps += [step for step in timed if step is not None and turn >= 0]
                bar.advance(len(kinds))
    finally:
        bench.close()
    drafter = [step.drafter / step.length for step in steps if step.length]
    if not drafter:
        raise InputError("the drafter proposed nothing; costs of drafts need a drafter that proposes tokens")
    target = {n: [step.target for step in steps if step.length == n] for n in (0, *LENGTHS)}
    one = statistics.median(target[0])
    slopes = [(statistics.median(target[n]) - one) / n for n in LENGTHS if target[n]]
    return Costs(draft=statistics.median(drafter) / one, token=max(0.0, statistics.median(slopes)) / one)
