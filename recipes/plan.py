"""Compare what `outrider plan` predicts with what is measured, for ways of decoding that it did not run.

`python -m recipes plan --out DIR` records plain runs on one half of the prompts, at each temperature, and predicts
chains and trees of a draft model and of suffix matching for several numbers of requests at once. Then all of them run
on the other half of the prompts, in random order, with a plain run beside every three of them: the machine may be
faster in one minute than in the next. It writes a row for each prediction and each run, the errors as a table for
`docs/laboratory/planning.md`, and a plot.
With `--planted` the draft rows are recorded at a wrong temperature: then the errors must be seen.

A second call with the same folder and settings keeps the predictions and adds rounds. It wants a quiet machine. A call
takes about four minutes for each temperature, for the pair that ships with Outrider on two cores.
"""

import math
import random
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from outrider.assembly import assemble, completed
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.workloads.workload import PROMPTS
from outrider.catalog import make
from outrider.cli.plan import MOST_DOUBT, best_trees, with_trees
from outrider.core.types import InputError, Sampling
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.plan.prediction import Planner, PlanPrediction, ranked
from outrider.plan.recording import record
from outrider.plan.table import costs_of
from outrider.plan.ways import DraftConfiguration, ways_of
from outrider.setup import Setup
from recipes import options
from recipes.questions import read_prompts

RULES = ("token", "block", "match")
TREES = ("gumbel:2x1", "gumbel:2x2", "iid:2", "top_plus_one:2")
WRONG = 0.3
"""What a planted error multiplies the drafter's temperature by. Greedy chains do not change, so they are left out."""
BESIDE = 3
"""Ways between two plain runs."""
QUICK = {
    "num_prompts": 4,
    "max_new_tokens": 8,
    "rounds": 1,
    "batches": "2",
    "temperatures": "1",
    "lengths": "1,4",
    "rules": "block",
}
TAU, SPEED, REGRET, COVERED = 0.03, 0.10, 0.05, 0.80
"""What must be reached: median errors of tokens per step and per second, regret, and cover of the intervals of 90 %."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One way, predicted and measured.

    Attributes:
        low: Lower end of the interval of predicted tokens per second.
        high: Its upper end.
        speedup: Predicted tokens per second over plain decoding.
        speedup_low: Lower end of its interval.
        speedup_high: Its upper end.
        speedups: Measured tokens per second over those of the plain runs beside it, in each round.
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
    speedup: float
    speedup_low: float
    speedup_high: float
    speedups: tuple[float, ...]
    chosen: bool = False

    @property
    def measured_speedup(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.speedups)


@dataclass(frozen=True, kw_only=True)
class Errors:
    """How far predictions are off.

    Attributes:
        ways: Number of ways that drafted.
        tau: Median error of tokens per step, and the 90th percentile.
        speed: The same of tokens per second.
        covered: Share of measured tokens per second within the intervals.
        speedup: Median error of tokens per second over plain decoding, and the 90th percentile.
        speedup_covered: Share of these that are within their intervals.
        kendall: Rank correlation of predicted and measured speedups, mean over groups.
        regret: What the advised way has less than the best measured one: the largest of all groups.
        regret_elsewhere: The same over the way that is best in the other rounds, so that no way is called the best for
            its luck: the largest of all groups. NaN for a single round.
        wrongly_plain: Groups in which plain decoding was advised although a way was more than 5 % faster.
    """

    ways: int
    tau: tuple[float, float]
    speed: tuple[float, float]
    covered: float
    speedup: tuple[float, float]
    speedup_covered: float
    kendall: float
    regret: float
    regret_elsewhere: float
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
        regrets, elsewhere, wrong = [], [], 0
        for group in groups.values():
            best = max(row.measured_speedup for row in group)
            for row in group:
                if row.chosen:
                    regrets.append(1 - row.measured_speedup / best)
                    elsewhere.append(_regret_elsewhere(row, group))
                    wrong += row.plain and best > 1.05 * row.measured_speedup
        return cls(
            ways=len(drafted),
            tau=_spread([abs(row.predicted_tau / row.measured_tau - 1) for row in drafted]),
            speed=_spread([abs(row.predicted / row.measured - 1) for row in drafted]),
            covered=statistics.mean(row.low <= row.measured <= row.high for row in drafted),
            speedup=_spread([abs(row.speedup / row.measured_speedup - 1) for row in drafted]),
            speedup_covered=statistics.mean(
                row.speedup_low <= row.measured_speedup <= row.speedup_high for row in drafted
            ),
            kendall=statistics.mean(_kendall(group) for group in groups.values()),
            regret=max(regrets, default=math.nan),
            regret_elsewhere=max(elsewhere, default=math.nan),
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

    def findings(self) -> Findings:
        """The errors as a table."""
        lines = [
            ("error of tokens per step", *(f"{each:.1%}" for each in self.tau), ""),
            ("error of tokens per second", *(f"{each:.1%}" for each in self.speed), f"{self.covered:.0%}"),
            (
                "error of the speedup over plain decoding",
                *(f"{each:.1%}" for each in self.speedup),
                f"{self.speedup_covered:.0%}",
            ),
        ]
        text = (
            f"{self.ways} ways that were not run before. Rank correlation (Kendall) {self.kendall:.2f}. The advised "
            f"way is at most {self.regret:.1%} slower than the best measured one, and at most "
            f"{self.regret_elsewhere:.1%} slower than the one that is best in other rounds. Plain decoding was advised "
            f"wrongly {self.wrongly_plain} times."
        )
        head = ("what", "median", "90th percentile", "in intervals of 90 %")
        return Findings(tables=[Table(head=head, lines=lines)], text=text, summary=asdict(self))


def main(
    target: options.Target = None,
    drafter: Annotated[
        str | None, typer.Option(help="The drafter beside suffix matching; by default the embedded draft model.")
    ] = None,
    prompts: options.Prompts = PROMPTS,
    temperatures: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,1",
    batches: Annotated[str, typer.Option(help="Requests at once, with commas.")] = "1,2,4,8",
    lengths: Annotated[str, typer.Option(help="Lengths of chains, with commas.")] = "1,2,3,4,6,8",
    rules: Annotated[str, typer.Option(help="Verifiers of chains, with commas.")] = ",".join(RULES),
    num_prompts: options.NumPrompts = 32,
    max_new_tokens: options.MaxNewTokens = 64,
    rounds: options.Rounds = 2,
    planted: Annotated[bool, typer.Option("--planted", help="Record the drafter at a wrong temperature.")] = False,
    out: options.Out = None,
) -> None:
    """Record, predict, measure, compare. Exit status 1 if a prediction is not as good as it must be."""
    given = {**locals(), "target": target and Path(target).name, "prompts": Path(prompts).name}
    setup = Setup(target, drafter=drafter)
    engine = assemble(replace(setup, drafter=completed(setup).drafter, length="fixed:4", probe=False))
    questions = [engine.encode(prompt) for _, _, prompt in read_prompts(prompts)][:num_prompts]
    fitted, held_out = questions[::2], questions[1::2]
    name = str(completed(setup).drafter).partition(":")[0]
    drafters = {name: engine.parts.drafter, "suffix": cast(Drafter, make("drafter", "suffix"))}
    with folder(out, "plan", {name: value for name, value in given.items() if name != "temperatures"}) as place:
        for temperature in options.numbers("--temperatures", temperatures):
            if planted and temperature == 0:
                continue
            if not of(place.rows, "predicted", temperature):
                for row in predict(
                    engine,
                    drafters,
                    fitted,
                    temperature=temperature,
                    batches=options.whole_numbers("--batches", batches),
                    lengths=options.whole_numbers("--lengths", lengths),
                    rules=rules.split(","),
                    max_new_tokens=max_new_tokens,
                    planted=planted,
                ):
                    place.add({"phase": "predicted", **row})
            predicted = of(place.rows, "predicted", temperature)
            before = 1 + max((run["round"] for run in of(place.rows, "measured", temperature)), default=-1)
            for number in range(before, before + rounds):
                for row in measure(engine, drafters, held_out, predicted, max_new_tokens=max_new_tokens, number=number):
                    place.add({"phase": "measured", **row})
        rows = compared(of(place.rows, "predicted"), of(place.rows, "measured"))
        errors = Errors.of(rows)
        place.finish(errors.findings())
        if out is not None:
            plot(rows, out / "predicted.svg")
    if failures := errors.failures():
        print("; ".join(failures))
        raise typer.Exit(1)


def of(rows: Sequence[Row], phase: str, temperature: float | None = None) -> list[Row]:
    """The rows of a phase, at one temperature or at all."""
    return [row for row in rows if row["phase"] == phase and temperature in (None, row["temperature"])]


def predict(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    fitted: Sequence[list[int]],
    *,
    temperature: float,
    batches: Sequence[int],
    lengths: Sequence[int],
    rules: Sequence[str],
    max_new_tokens: int,
    planted: bool,
) -> list[Row]:
    """Predict ways from plain runs on some prompts, as `outrider plan` does."""
    sampling = Sampling(temperature=temperature, seed=1)
    costs = {}
    for name, drafter in drafters.items():
        engine.rest()
        own = replace(engine.parts, drafter=drafter)
        table = costs_of(own, max_slots=engine.max_slots, probe=True, most_doubt=MOST_DOUBT)
        if table is not None:
            costs[name] = table
    used = {name: drafters[name] for name in costs}
    made = record(
        engine,
        used,
        fitted,
        sampling=sampling,
        max_new_tokens=max_new_tokens,
        costs=list(costs.values()),
        draft_sampling=replace(sampling, temperature=WRONG * temperature) if planted else None,
    )
    planner, ways = Planner(record=made, costs=costs), [DraftConfiguration()]
    for name, drafter in used.items():
        ways += [way for way in ways_of(name, drafter, lengths=lengths) if _is_measured(way, temperature, rules)]
    planner = with_trees(planner, engine, used, ways, batches)
    grown = [way for way in best_trees(planner, used, batches) if way not in ways]
    planner = with_trees(planner, engine, used, grown, batches)
    found = []
    for requests in batches:
        predictions = [planner.predict(way, requests) for way in [*ways, *grown]]
        best = ranked(predictions)[0].way
        found += [_row(each, temperature, each.way == best) for each in predictions]
    return found


def _row(prediction: PlanPrediction, temperature: float, chosen: bool) -> Row:
    way = prediction.way
    return {
        "temperature": temperature,
        "requests": prediction.requests,
        "name": way.name,
        **{name: getattr(way, name) for name in ("drafter", "tree", "verifier", "length")},
        **{name: asdict(getattr(prediction, name)) for name in ("block_efficiency", "tokens_per_second", "speedup")},
        "chosen": chosen,
    }


def _is_measured(way: DraftConfiguration, temperature: float, rules: Sequence[str]) -> bool:
    """Whether a way is among those that are measured. What is only bounded is not. At temperature 0, and for drafters
    that look tokens up, all verifiers of chains do the same.
    """
    if way.tree != "chain":
        return way.certainty == "exact" and way.tree in TREES
    return way.drafter == "suffix" or way.verifier in (rules[:1] if temperature == 0 else rules)


def measure(
    engine: Engine,
    drafters: Mapping[str, Drafter],
    held_out: Sequence[list[int]],
    predicted: Sequence[Row],
    *,
    max_new_tokens: int,
    number: int,
) -> list[Row]:
    """One round: every way runs once, in random order, and a plain run stands before and after every three of them."""
    order, found = random.Random(number), list[Row]()
    for requests in dict.fromkeys(row["requests"] for row in predicted):
        ways = {row["name"]: _way(row) for row in predicted if row["requests"] == requests}
        names = [name for name, way in ways.items() if not way.is_plain]
        names = order.sample(names, len(names))
        groups = [names[first : first + BESIDE] for first in range(0, len(names), BESIDE)]
        turns = ["plain", *(name for group in groups for name in [*group, "plain"])]
        made = []
        for name in turns:
            sampling = Sampling(temperature=predicted[0]["temperature"], seed=1000 * (number + 1))
            sums = run(engine, ways[name], drafters, held_out, sampling, requests, max_new_tokens)
            made.append(
                {"temperature": sampling.temperature, "requests": requests, "name": name, "round": number, **sums}
            )
        plain = [i for i, name in enumerate(turns) if name == "plain"]
        for i, row in enumerate(made):
            used = [made[max(j for j in plain if j <= i)], made[min(j for j in plain if j >= i)]]
            row["beside"] = sum(each["timed"] for each in used) / sum(each["seconds"] for each in used)
        found += made
    return found


def _way(row: Row) -> DraftConfiguration:
    return DraftConfiguration(**{name: row[name] for name in ("drafter", "tree", "verifier", "length")})


def compared(predicted: Sequence[Row], runs: Sequence[Row]) -> list[Compared]:
    """What was predicted beside what was measured, of the ways that ran."""
    made: dict[tuple[float, int, str], list[Row]] = defaultdict(list)
    for each in runs:
        made[each["temperature"], each["requests"], each["name"]].append(each)
    found = []
    for row in predicted:
        own = made.get((row["temperature"], row["requests"], row["name"]))
        if own is None:
            continue
        by_round: dict[int, list[float]] = defaultdict(list)
        for each in own:
            by_round[each["round"]].append(each["timed"] / each["seconds"] / each["beside"])
        speeds, speedup = row["tokens_per_second"], row["speedup"]
        found.append(
            Compared(
                temperature=row["temperature"],
                requests=row["requests"],
                way=row["name"],
                plain=row["length"] == 0,
                predicted_tau=row["block_efficiency"]["value"],
                measured_tau=sum(each["tokens"] for each in own) / sum(each["steps"] for each in own),
                predicted=speeds["value"],
                low=speeds["low"],
                high=speeds["high"],
                measured=sum(each["timed"] for each in own) / sum(each["seconds"] for each in own),
                speedup=speedup["value"],
                speedup_low=speedup["low"],
                speedup_high=speedup["high"],
                speedups=tuple(
                    1.0 if row["length"] == 0 else statistics.median(each) for _, each in sorted(by_round.items())
                ),
                chosen=row["chosen"],
            )
        )
    return found


def run(
    engine: Engine,
    way: DraftConfiguration,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[list[int]],
    sampling: Sampling,
    requests: int,
    max_new_tokens: int,
) -> Row:
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
    samplings = [replace(sampling, seed=(sampling.seed or 0) + i) for i in range(count)]
    outputs = alone.generate(prompts[:count], max_new_tokens=max_new_tokens, sampling=samplings)
    alone.rest()
    steps = [step for output in outputs for step in output.steps]
    # The first step of a request also reads its prompt.
    prompts_read = {id(output.steps[0].timing) for output in outputs if output.steps}
    full = [step for step in steps if step.num_requests == min(requests, count) and id(step.timing) not in prompts_read]
    return {
        "tokens": sum(len(step.tokens) for step in steps),
        "steps": len(steps),
        "timed": sum(len(step.tokens) for step in full),
        "seconds": sum({id(step.timing): step.timing.total for step in full}.values()),
    }


def plot(rows: Sequence[Compared], file: Path) -> None:
    """Draw predicted over measured tokens per second."""
    from matplotlib.figure import Figure

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
    figure.savefig(file, bbox_inches="tight")


def _spread(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]


def _kendall(rows: Sequence[Compared]) -> float:
    """Share of pairs in the right order less that of pairs in the wrong one."""
    signs = [
        math.copysign(1, (a.speedup - b.speedup) * (a.measured_speedup - b.measured_speedup))
        for i, a in enumerate(rows)
        for b in rows[:i]
        if a.speedup != b.speedup and a.measured_speedup != b.measured_speedup
    ]
    return statistics.mean(signs) if signs else 1.0


def _regret_elsewhere(row: Compared, group: Sequence[Compared]) -> float:
    """What a way has less, in odd rounds, than the way that is best in even ones, and the other way round: the mean."""
    found = []
    for half in (0, 1):
        chosen_in = {each.way: each.speedups[half::2] for each in group}
        if not all(chosen_in.values()) or not row.speedups[1 - half :: 2]:
            return math.nan
        best = max(group, key=lambda each: statistics.median(chosen_in[each.way]))
        here = [statistics.median(each.speedups[1 - half :: 2]) for each in (row, best)]
        found.append(1 - here[0] / here[1])
    return statistics.mean(found)
