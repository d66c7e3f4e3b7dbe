"""How near `goodput` comes to the best fixed length, in simulated engines whose true costs and acceptance are known.

`python -m recipes length_simulation --out DIR` needs no model and no quiet machine: a step takes what a formula says,
and draft tokens are accepted by chance. Worlds differ in the shape of costs, in what the best length gains, in how
acceptance varies, in the number of requests and in the length of outputs. The policy has the true costs, or costs that
are off by a tenth, a factor of its own for each kind of step.

Speed is the expected number of tokens of the steps that were made, times the cost of a plain step, over the cost of the
steps. Luck within a step does not count. Regret is what is missing to the best of plain decoding and all fixed lengths
in the same world.
"""

import functools
import itertools
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import typer

from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.types import Request, Running, Sampling, Step, Timing
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience, LengthChoice, PolicyState
from outrider.lengths.goodput import GoodputLength
from recipes import options
from recipes.label import Label

POLICY = GoodputLength()
Cost = Callable[[int, int], float]
SHAPES: dict[str, Cost] = {
    "line": lambda b, n: 1 + 0.05 * (b * (n + 1) - 1) + 0.12 * n,
    "staircase": lambda b, n: 1 + 0.45 * (math.ceil(b * (n + 1) / 16) - 1) + 0.01 * b * n + 0.1 * n,
}
"""Costs of a step of b requests with drafts of n tokens, in plain steps of one request."""
GAINS = (-0.2, -0.08, -0.02, 0.0, 0.02, 0.08, 0.25, 0.8)
"""What the best draft length gains over plain decoding, where acceptance is the same for all."""
KINDS = ("even", "bursty", "falling", "differing", "missing")
"""Acceptance: the same for all tokens; of two states that change every ten steps or so; falling with the text; and
differing between requests. In the last kind it is even, and the drafter finds no draft where it has nothing to copy."""
FOUND = 0.3
"""How likely a drafter that looks tokens up finds a draft."""
BURST, SWITCH = 1.4, 0.1
"""How far the logits of the two states lie from the middle, and how likely a step changes the state."""
FALL, SPREAD = 2.0, 0.55
"""How far the logit falls within a text, and the standard deviation of the logit between requests."""
WRONG, DIRECTION = 0.1, 0.05
"""How far costs are off, and from which gain on a step can be in the wrong direction."""
QUICK = {"runs": 1, "tokens": "64", "requests": "1"}


def tokens_by_length(rates: Sequence[float]) -> list[float]:
    r"""Expected tokens of a step with a draft of n = 0, 1, ... tokens: $1 + \sum_{j \le n} \prod_{i \le j} a_i$.

    Example:
        >>> tokens_by_length([0.5, 0.5])
        [1.0, 1.5, 1.75]
    """
    tokens, reached = [1.0], 1.0
    for rate in rates:
        reached *= rate
        tokens.append(tokens[-1] + reached)
    return tokens


@dataclass(frozen=True, kw_only=True)
class World:
    """An engine whose costs and acceptance are known.

    Attributes:
        gain: What the best length gains if acceptance is even.
        table_error: How far the policy's costs are off.
    """

    shape: str
    kind: str
    gain: float
    requests: int
    tokens: int
    table_error: float = 0.0

    @property
    def name(self) -> str:
        """Unique among the worlds."""
        wrong = f", costs off by {self.table_error:g}" if self.table_error else ""
        return f"{self.shape}, {self.kind}, gain {self.gain:+g}, {self.requests} x {self.tokens}{wrong}"

    def cost(self, length: int) -> float:
        """What a step costs."""
        return SHAPES[self.shape](self.requests, length)

    def acceptance(self) -> float:
        """The acceptance at which the best length has the gain, at most 0.98."""
        low, high = 0.01, 0.98
        for _ in range(40):
            middle = (low + high) / 2
            tokens = tokens_by_length([middle] * POLICY.most)
            best = max(tokens[n] * self.cost(0) / self.cost(n) for n in range(1, POLICY.most + 1))
            low, high = (middle, high) if best < 1 + self.gain else (low, middle)
        return high

    def table(self, noise: np.random.Generator) -> CostTable:
        """The policy's costs."""
        rows = [
            StepCost(
                requests=self.requests, length=n, target=self.cost(n) * math.exp(self.table_error * noise.normal())
            )
            for n in range(POLICY.most + 1)
        ]
        return CostTable(rows=tuple(rows), kept=True)


@dataclass(kw_only=True)
class Texts:
    """How likely the requests of a run accept a token now. Changes in place.

    Attributes:
        emitted: Tokens of each request so far.
    """

    world: World
    random: np.random.Generator

    def __post_init__(self) -> None:
        count = self.world.requests
        rate = self.world.acceptance()
        own = self.random.normal(0, SPREAD, count) if self.world.kind == "differing" else np.zeros(count)
        self._logits = math.log(rate / (1 - rate)) + own
        self._constant: list[float] = (1 / (1 + np.exp(-self._logits))).tolist()
        self._good = self.random.random(count) < 0.5
        self.emitted = np.zeros(count)

    def found(self) -> list[bool]:
        """Whether the drafter finds a draft, for each request."""
        if self.world.kind != "missing":
            return [True] * self.world.requests
        return (self.random.random(self.world.requests) < FOUND).tolist()

    def rates(self) -> list[float]:
        """The acceptance of each request in the next step."""
        if self.world.kind in ("even", "differing", "missing"):
            return self._constant
        logits = self._logits.copy()
        if self.world.kind == "bursty":
            self._good ^= self.random.random(len(self._good)) < SWITCH
            logits += np.where(self._good, BURST, -BURST)
        if self.world.kind == "falling":
            logits += FALL * (0.5 - self.emitted / self.world.tokens)
        return (1 / (1 + np.exp(-logits))).tolist()


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run came to.

    Attributes:
        speed: Over plain decoding.
        drafted: Share of steps that drafted.
    """

    speed: float
    drafted: float


class Lengths:
    """What chooses the lengths of a run's steps: always the same ones."""

    def __init__(self, length: int) -> None:
        self._length = length

    def choose(self, states: Sequence[Running], rooms: Sequence[int]) -> Sequence[int]:
        """The draft lengths of the next step, within the rooms."""
        return [min(self._length, room) for room in rooms]

    def note(self, states: Sequence[Running], drafts: Sequence[tuple[int, int]]) -> None:
        """Learn from a step: the drafted and the accepted tokens of each request."""


class LearntLengths(Lengths):
    """The policy's lengths."""

    def __init__(self, experience: Experience) -> None:
        self._experience, self._choice = experience, LengthChoice(lengths=(), state=PolicyState())

    def choose(self, states: Sequence[Running], rooms: Sequence[int]) -> Sequence[int]:
        """The lengths with the most tokens per second."""
        self._choice = POLICY.choose(self._experience, states, rooms)
        return self._choice.lengths

    def note(self, states: Sequence[Running], drafts: Sequence[tuple[int, int]]) -> None:
        """Learn acceptance."""
        steps = [
            step(drafted, accepted, len(states), room)
            for (drafted, accepted), room in zip(drafts, self._choice.lengths, strict=True)
        ]
        for state, made in zip(states, steps, strict=True):
            state.length_state = POLICY.update(state.length_state, made)
        self._experience.note(self._choice, [state.request for state in states], steps)


def simulate(world: World, lengths: Lengths, seed: int, *, seeded: bool = False) -> Run:
    """One batch of requests to their ends.

    Args:
        seeded: Whether the requests come with a seed.
    """
    dice = random.Random(seed)
    texts = Texts(world=world, random=np.random.default_rng([seed, 1]))
    asked = Request(
        id="r", prompt=(1,) * 64, max_new_tokens=world.tokens, sampling=Sampling(temperature=1, seed=0), repeats=seeded
    )
    states = [
        Running(request=asked, tokens=list(asked.prompt), slot=i, drafter=None, length_state=POLICY.open())
        for i in range(world.requests)
    ]
    cost = worth = drafting = count = 0.0
    while texts.emitted.mean() < world.tokens:
        rates, asked_for = texts.rates(), lengths.choose(states, [POLICY.most] * len(states))
        drafts = [length if found else 0 for length, found in zip(asked_for, texts.found(), strict=True)]
        cost += world.cost(max(drafts))
        made = []
        for i, (rate, drafted) in enumerate(zip(rates, drafts, strict=True)):
            worth += tokens_by_length([rate] * drafted)[-1] / world.requests
            accepted = 0
            while accepted < drafted and dice.random() < rate:
                accepted += 1
            made.append((drafted, accepted))
            texts.emitted[i] += accepted + 1
            states[i].tokens.extend([1] * (accepted + 1))
        lengths.note(states, made)
        count, drafting = count + 1, drafting + (max(drafts) > 0)
    return Run(speed=worth * world.cost(0) / cost, drafted=drafting / count)


@functools.cache
def fixed(world: World, length: int, runs: int) -> float:
    """The mean speed of a fixed length; of 0 it is 1."""
    if length == 0:
        return 1.0
    return statistics.mean(simulate(world, Lengths(length), seed).speed for seed in range(runs))


def learnt(world: World, runs: int, way: str) -> list[Run]:
    """Runs of the policy. Each begins with costs alone, or where it is `kept` with what earlier runs have learnt."""
    experience, found = Experience(world.table(np.random.default_rng(0))), []
    for seed in range(runs):
        if way != "kept":
            experience = Experience(world.table(np.random.default_rng(seed)))
        found.append(simulate(world, LearntLengths(experience), seed, seeded=way == "seeded"))
    return found


def step(drafted: int, accepted: int, num_requests: int, room: int = 0) -> Step:
    """A step of one request.

    Args:
        room: The draft length that was asked for.
    """
    return Step(
        request="r",
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        tokens=(1,) * (accepted + 1),
        timing=Timing(),
        num_requests=num_requests,
        room=room,
    )


def judged(world: World, runs: int, way: str) -> dict[str, Any]:
    """What the policy came to in a world, and the best fixed length.

    Args:
        way: `fresh`, `kept` or `seeded`.
    """
    speeds = [fixed(world, length, runs) for length in range(POLICY.most + 1)]
    best = max(speeds)
    found = learnt(world, runs, way)
    drafts = statistics.mean(run.drafted for run in found)
    away = abs(max(speeds[1:]) - 1) > DIRECTION
    return {
        **{name: getattr(world, name) for name in ("shape", "kind", "gain", "requests", "tokens", "table_error")},
        "way": way,
        "best_length": speeds.index(best),
        "best": best,
        "speed": statistics.mean(run.speed for run in found),
        "regret": 1 - statistics.mean(run.speed for run in found) / best,
        "below_plain": sum(run.speed < 0.98 for run in found) / runs,
        "wrong_steps": (1 - drafts if best > 1 else drafts) if away else 0.0,
    }


def worlds(requests: Sequence[int], tokens: Sequence[int], errors: Sequence[float]) -> list[World]:
    """All worlds; those whose gain no acceptance reaches are left out."""
    found = [
        World(shape=shape, kind=kind, gain=gain, requests=b, tokens=n, table_error=error)
        for shape, kind, gain, b, n, error in itertools.product(SHAPES, KINDS, GAINS, requests, tokens, errors)
    ]
    return [world for world in found if 0.02 < world.acceptance() < 0.97]


def findings(rows: Sequence[Row]) -> Findings:
    """Regret by way, length of outputs and error of the costs, and the worst worlds."""
    lines = []
    for way, tokens, error in sorted({(row["way"], row["tokens"], row["table_error"]) for row in rows}):
        own = [row for row in rows if (row["way"], row["tokens"], row["table_error"]) == (way, tokens, error)]
        worst = max(own, key=lambda row: row["regret"])
        lines.append(
            [
                way,
                tokens,
                f"{error:g}",
                len(own),
                f"{statistics.mean(row['regret'] for row in own):.3f}",
                f"{worst['regret']:.3f}: {worst['shape']}, {worst['kind']}, {worst['gain']:+g}, {worst['requests']}",
                f"{statistics.mean(row['wrong_steps'] for row in own):.3f}",
                f"{statistics.mean(row['below_plain'] for row in own):.3f}",
            ]
        )
    head = ("state", "tokens", "costs off by", "worlds", "mean regret", "worst", "wrong steps", "runs below 0.98")
    return Findings(tables=[Table(head=head, lines=lines)], text="Simulated engines; see the module for the worlds.")


def main(
    out: options.Out = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs per world.")] = 20,
    requests: Annotated[str, typer.Option(help="Numbers of requests.")] = "1,3,8",
    tokens: Annotated[str, typer.Option(help="Lengths of outputs.")] = "64,128,512",
    errors: Annotated[str, typer.Option(help="How far the policy's costs are off.")] = "0,0.1",
) -> list[Row]:
    """Simulate goodput in engines whose costs and acceptance are known."""
    given = dict(locals())
    counts, lengths = options.whole_numbers("--requests", requests), options.whole_numbers("--tokens", tokens)
    jobs = worlds(counts, lengths, options.numbers("--errors", errors))
    with folder(out, "length_simulation", given) as place:

        def simulated(turn: Turn[Label, World]) -> Row:
            return judged(turn.job, runs, turn.way.name)

        rows = place.take("simulated", turns(Label.each(("fresh", "kept", "seeded")), jobs), simulated)
        place.finish(findings(rows))
        return rows
