"""Compare what `outrider plan` predicts with what is measured, for ways of decoding that it did not run.

`python -m recipes plan --out DIR` records plain runs on one half of the prompts, at each temperature, and predicts
chains and trees of a draft model and of suffix matching for several numbers of requests at once. Then all of them run
on the other half of the prompts, in turns. It writes a row for each, the errors as a table for `docs/plan.md`, and a
plot. With `--planted` the draft rows are recorded at a wrong temperature: then the errors must be seen.

It wants a quiet machine, and takes about 20 minutes for the pair that ships with Outrider on two cores.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from outrider.assembly import assemble, completed
from outrider.bench.workload import PROMPTS, read_prompts
from outrider.catalog import make
from outrider.core.types import InputError, Sampling
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.plan.prediction import Planner, ranked
from outrider.plan.recording import record
from outrider.plan.table import costs_of
from outrider.plan.ways import Way, ways_of
from outrider.setup import Setup
from recipes import options

LENGTHS = (1, 2, 3, 4, 6, 8)
RULES = ("token", "block", "match")
TREES = ("gumbel:2x1", "iid:2", "top_plus_one:2")
WRONG = 0.3
"""What a planted error multiplies the drafter's temperature by. Greedy chains do not change, so they are left out."""
QUICK = {"num_prompts": 4, "max_new_tokens": 8, "rounds": 1, "batches": "2", "temperatures": "1"}
TAU, SPEED, REGRET, COVERED = 0.03, 0.10, 0.05, 0.80
"""What must be reached: median errors of tokens per step and per second, regret, and cover of the intervals of 90 %."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One way, predicted and measured.

    Attributes:
        low: Lower end of the interval of predicted tokens per second.
        high: Its upper end.
        chosen: Whether the plan advises this way.
    """

    temperature: float
    requests: int
    way: str
    plain: bool
    predicted_tau: float
    measured_tau: float
    predicted: float
    low: float
    high: float
    measured: float
    chosen: bool = False


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far predictions are off.

    Attributes:
        ways: Number of ways that drafted.
        tau: Median error of tokens per step, and the 90th percentile.
        speed: The same of tokens per second.
        covered: Share of measured tokens per second within the intervals.
        kendall: Rank correlation of predicted and measured tokens per second, mean over groups.
        regret: What the advised way has less than the best measured one: the largest of all groups.
        wrongly_plain: Groups in which plain decoding was advised although a way was more than 5 % faster.
    """

    ways: int
    tau: tuple[float, float]
    speed: tuple[float, float]
    covered: float
    kendall: float
    regret: float
    wrongly_plain: int

    @classmethod
    def of(cls, rows: Sequence[Compared]) -> "Errors":
        """The errors of all rows. Rows of one temperature and number of requests form a group."""
        drafted = [row for row in rows if not row.plain]
        if not drafted:
            raise InputError("there is nothing to compare")
        groups: dict[tuple[float, int], list[Compared]] = defaultdict(list)
        for row in rows:
            groups[row.temperature, row.requests].append(row)
        regrets, wrong = [], 0
        for group in groups.values():
            best = max(row.measured for row in group)
            for row in group:
                if row.chosen:
                    regrets.append(1 - row.measured / best)
                    wrong += row.plain and best > 1.05 * row.measured
        return cls(
            ways=len(drafted),
            tau=_spread([abs(row.predicted_tau / row.measured_tau - 1) for row in drafted]),
            speed=_spread([abs(row.predicted / row.measured - 1) for row in drafted]),
            covered=statistics.mean(row.low <= row.measured <= row.high for row in drafted),
            kendall=statistics.mean(_kendall(group) for group in groups.values()),
            regret=max(regrets, default=math.nan),
            wrongly_plain=wrong,
        )

    def failures(self) -> list[str]:
        """What was not reached."""
        checks = [
            (self.tau[0] <= TAU, f"tokens per step are off by {self.tau[0]:.1%}, more than {TAU:.0%}"),
            (self.speed[0] <= SPEED, f"tokens per second are off by {self.speed[0]:.1%}, more than {SPEED:.0%}"),
            (self.regret <= REGRET, f"the regret is {self.regret:.1%}, more than {REGRET:.0%}"),
            (self.covered >= COVERED, f"intervals cover {self.covered:.0%}, less than {COVERED:.0%}"),
        ]
        return [text for fine, text in checks if not fine]

    def markdown(self) -> str:
        """The errors as a table."""
        lines = [
            "| what | median | 90th percentile |",
            "|---|---|---|",
            f"| error of tokens per step | {self.tau[0]:.1%} | {self.tau[1]:.1%} |",
            f"| error of tokens per second | {self.speed[0]:.1%} | {self.speed[1]:.1%} |",
            "",
            f"{self.ways} ways that were not run before. Intervals of 90 % cover {self.covered:.0%}. Rank correlation "
            f"(Kendall) {self.kendall:.2f}. The advised way is at most {self.regret:.1%} slower than the best measured "
            f"one; plain decoding was advised wrongly {self.wrongly_plain} times.",
        ]
        return "\n".join(lines) + "\n"


def main(
    target: options.Target = None,
    drafter: Annotated[
        str | None, typer.Option(help="The drafter beside suffix matching; by default the embedded draft model.")
    ] = None,
    prompts: options.Prompts = PROMPTS,
    temperatures: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,1",
    batches: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8",
    num_prompts: options.NumPrompts = 32,
    max_new_tokens: options.MaxNewTokens = 64,
    rounds: options.Rounds = 2,
    planted: Annotated[bool, typer.Option("--planted", help="Record the drafter at a wrong temperature.")] = False,
    out: options.Out = None,
) -> None:
    """Record, predict, measure, compare. Exit status 1 if a prediction is not as good as it must be."""
    setup = Setup(target, drafter=drafter)
    engine = assemble(replace(setup, drafter=completed(setup).drafter, length="fixed:4", probe=False))
    questions = [engine.encode(prompt) for _, _, prompt in read_prompts(prompts)][:num_prompts]
    fitted, held_out = questions[::2], questions[1::2]
    name = str(completed(setup).drafter)
    rows: list[Compared] = []
    for temperature in (float(each) for each in temperatures.split(",")):
        if planted and temperature == 0:
            continue
        rows += compare(
            engine,
            {name: engine.parts.drafter, "suffix": cast(Drafter, make("drafter", "suffix"))},
            fitted,
            held_out,
            temperature=temperature,
            batches=[int(each) for each in batches.split(",")],
            max_new_tokens=max_new_tokens,
            rounds=rounds,
            planted=planted,
        )
        print(f"temperature {temperature:g}: {len(rows)} ways compared")
    errors = Errors.of(rows)
    print(errors.markdown())
    if out is not None:
        write(rows, errors, out)
    if failures := errors.failures():
        print("; ".join(failures))
        raise typer.Exit(1)


def compare(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    fitted: Sequence[list[int]],
    held_out: Sequence[list[int]],
    *,
    temperature: float,
    batches: Sequence[int],
    max_new_tokens: int,
    rounds: int,
    planted: bool,
) -> list[Compared]:
    """Predict from plain runs on some prompts, and measure on others."""
    sampling = Sampling(temperature=temperature, seed=1)
    costs = {}
    for name, drafter in drafters.items():
        engine.rest()
        table = costs_of(replace(engine.parts, drafter=drafter), max_slots=engine.max_slots, probe=True)
        if table is not None:
            costs[name] = table
    wrong = replace(sampling, temperature=WRONG * temperature) if planted else None
    made = record(
        engine,
        {name: drafters[name] for name in costs},
        fitted,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        costs=next(iter(costs.values())),
        draft_sampling=wrong,
    )
    planner = Planner(record=made, costs=costs)
    ways = [Way()]
    for name in costs:
        ways += [way for way in ways_of(name, drafters[name], lengths=LENGTHS) if _measured(way)]
    found = []
    for requests in batches:
        predictions = [planner.predict(way, requests) for way in ways]
        best = ranked(predictions)[0].way
        measured = {way: [0.0, 0.0, 0.0, 0.0] for way in ways}
        for number in range(rounds):
            for way in ways if number % 2 else ways[::-1]:
                sums = run(engine, way, drafters, held_out, sampling, requests, max_new_tokens, seed=1000 * number)
                measured[way] = [old + new for old, new in zip(measured[way], sums, strict=True)]
        for prediction in predictions:
            tokens, steps, timed, seconds = measured[prediction.way]
            found.append(
                Compared(
                    temperature=temperature,
                    requests=requests,
                    way=prediction.way.name,
                    plain=prediction.way.is_plain,
                    predicted_tau=prediction.block_efficiency.value,
                    measured_tau=tokens / steps,
                    predicted=prediction.tokens_per_second.value,
                    low=prediction.tokens_per_second.low,
                    high=prediction.tokens_per_second.high,
                    measured=timed / seconds,
                    chosen=prediction.way == best,
                )
            )
    return found


def run(
    engine: Engine,
    way: Way,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    requests: int,
    max_new_tokens: int,
    seed: int,
) -> tuple[float, float, float, float]:
    """Tokens and steps of all outputs; tokens and seconds of the iterations in which all requests run."""
    engine.rest()
    drafter: Drafter = NoDrafter() if way.is_plain else drafters[way.drafter]
    parts = replace(
        engine.parts,
        drafter=drafter,
        tree=cast(Any, make("tree", way.tree)),
        verifier=cast(Any, make("verifier", way.verifier)),
        length=cast(Any, make("length", f"fixed:{max(1, way.length)}")),
    )
    alone = Engine(parts, tokenizer=engine.tokenizer, eos_ids=engine.eos_ids, max_slots=requests)
    count = len(prompts) // requests * requests or len(prompts)
    samplings = [replace(sampling, seed=seed + i) for i in range(count)]
    outputs = alone.generate(prompts[:count], max_new_tokens=max_new_tokens, sampling=samplings)
    alone.rest()
    steps = [step for output in outputs for step in output.steps]
    # The first step of a request also reads its prompt.
    later = [step for output in outputs for step in output.steps[1:]]
    prompts_read = {id(output.steps[0].timing) for output in outputs if output.steps}
    full = [step for step in later if step.num_requests == min(requests, count) and id(step.timing) not in prompts_read]
    seconds = {id(step.timing): step.timing.total for step in full}
    tokens = float(sum(len(step.tokens) for step in steps))
    return tokens, float(len(steps)), float(sum(len(step.tokens) for step in full)), sum(seconds.values())


def write(rows: Sequence[Compared], errors: Errors, out: Path) -> None:
    """Write rows, the table and the plot."""
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    (out / "rows.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="utf-8")
    (out / "errors.md").write_text(errors.markdown(), encoding="utf-8")
    figure = Figure(figsize=(5, 5))
    axes = figure.add_subplot()
    for requests in sorted({row.requests for row in rows}):
        some = [row for row in rows if row.requests == requests]
        axes.scatter([row.measured for row in some], [row.predicted for row in some], s=12, label=f"{requests} at once")
    ends = [min(row.measured for row in rows), max(row.measured for row in rows)]
    axes.plot(ends, ends, color="black", linewidth=0.8)
    for factor in (0.9, 1.1):
        axes.plot(ends, [factor * end for end in ends], color="grey", linewidth=0.6, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured tokens per second", ylabel="predicted tokens per second")
    axes.legend()
    figure.savefig(out / "predicted.svg", bbox_inches="tight")


def _measured(way: Way) -> bool:
    """Whether a way is among those that are measured: what is only bounded is not."""
    return way.certainty == "exact" and (way.verifier in RULES if way.tree == "chain" else way.tree in TREES)


def _spread(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def _kendall(rows: Sequence[Compared]) -> float:
    """Share of pairs in the right order less that of pairs in the wrong one."""
    signs = [
        math.copysign(1, (a.predicted - b.predicted) * (a.measured - b.measured))
        for i, a in enumerate(rows)
        for b in rows[:i]
        if a.predicted != b.predicted and a.measured != b.measured
    ]
    return statistics.mean(signs) if signs else 1.0
