"""What a measurement shows: the verdict, tables and figures, for the terminal, for a page and for programs."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outrider.bench.evidence import IntervalEstimate, Row, Sums
from outrider.bench.plot import Curve, Dots, Figure, Panel, Stacks
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side import metrics
from outrider.bench.side_by_side.arrivals import ClosedLoop, Load, OpenLoop
from outrider.bench.side_by_side.served import Served
from outrider.bench.side_by_side.session import Measurement, setting_text
from outrider.bench.side_by_side.verdict import headline, of_way, units, verdict_of
from outrider.bench.speedup import rate

MOST_CURVES = 6
"""A figure with more curves than this cannot be read; the fastest ways are shown."""
TRAPS = (
    "TPOT here is vLLM's TPOT and AIPerf's ITL. vLLM's ITL is the gap between chunks: it grows with the tokens of a "
    "chunk while TPOT falls.",
    "An acceptance length is pooled over steps, or the mean of requests. Both stand here, and they differ.",
    "Tokens are counted from token ids. Tools that count the chunks of a stream count steps.",
    "The marginal rate divides by all drafts, also by those that were too short to reach the position. With adaptive "
    "lengths it falls while no drafter gets worse; the conditional rate does not.",
    "An acceptance length leaves out steps without a draft. Block efficiency counts them.",
    "Drafts that a grammar forbids are counted here; vLLM subtracts them.",
    "Every run begins with a cold cache.",
    "Draft tokens of a tree are its nodes. Rates of trees and chains cannot be compared, block efficiency can.",
    "The first step of a request may hold the last tokens of its prompt.",
    "Where answers end by themselves, sampled answers of two ways differ in length. Speeds are tokens over seconds.",
    "At a rate that the engine cannot keep up with, latencies measure how long the run was.",
    "A speedup is a ratio of sums over the same requests, not a mean or a median of ratios.",
)
"""Names that mean other things elsewhere, and figures that mislead."""


class Shown:
    """Figures of a measurement, each computed once."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self._served: dict[tuple[str, str], list[Served]] = {}

    def rows(self, way: str, load: Load) -> list[Row]:
        """The rows of a way under a load."""
        return of_way(self.measurement.rows, way, load.name)

    def served(self, way: str, load: Load) -> list[Served]:
        """Its requests."""
        key = way, load.name
        if key not in self._served:
            self._served[key] = [Served.read(each) for row in self.rows(way, load) for each in row["served"]]
        return self._served[key]

    def ways(self, load: Load) -> list[str]:
        """Ways that did anything under a load."""
        return [way for way in self.measurement.ways if self.rows(way, load)]

    def drafting(self, load: Load, most: int | None = None) -> list[str]:
        """Those that tell what they drafted; of many the fastest."""
        drafting = [way for way in self.ways(load) if metrics.drafting(self.served(way, load))]
        if most is None or len(drafting) <= most:
            return drafting
        fastest = sorted(drafting, key=lambda way: -rate(self.rows(way, load)))[:most]
        return [way for way in drafting if way in fastest]

    def seconds(self, way: str, load: Load) -> float:
        """Seconds of all its runs."""
        return float(sum(row["seconds"] for row in self.rows(way, load)))


def summary(measurement: Measurement) -> list[dict[str, Any]]:
    """The figures of every way under every load, for programs; times are seconds."""
    shown = Shown(measurement)
    return [_figures(shown, way, load) for load in measurement.plan.loads for way in shown.ways(load)]


def _figures(shown: Shown, way: str, load: Load) -> dict[str, Any]:
    """All figures of a way."""
    requests, seconds, rows = shown.served(way, load), shown.seconds(way, load), shown.rows(way, load)
    verdict = verdict_of(shown.measurement, way, load.name)
    objectives = shown.measurement.plan.objectives
    peaks = [row["peak_memory"] for row in rows if row["peak_memory"] is not None]
    joules = [row["joules"] for row in rows if row["joules"] is not None]
    tokens = sum(each.num_tokens for each in requests)
    return {
        "way": way,
        "load": load.name,
        "drafts": way in shown.measurement.drafting,
        "num_runs": len(rows),
        "num_requests": len(requests),
        "num_tokens": tokens,
        "output_throughput": _output_throughput(rows, requests, seconds, load),
        "request_throughput": metrics.request_throughput(requests, seconds),
        "goodput": None if objectives is None else metrics.goodput(requests, seconds, objectives),
        "speedup": None if verdict is None else [verdict.speedup.value, verdict.speedup.low, verdict.speedup.high],
        "baseline": None if verdict is None else verdict.baseline,
        "verdict": None if verdict is None or verdict.baseline == way else verdict.word,
        "prompt_throughput": metrics.prompt_throughput(requests),
        "decode_throughput": metrics.decode_throughput(requests),
        "start": shown.measurement.starts.get(way),
        "tpot": metrics.percentiles(metrics.time_per_output_token(requests)),
        "ttft": metrics.percentiles(metrics.time_to_first_token(requests)),
        "inter_chunk_latency": metrics.percentiles(metrics.inter_chunk_latency(requests)),
        "e2el": metrics.percentiles(metrics.end_to_end(requests)),
        "block_efficiency": metrics.block_efficiency(requests),
        "acceptance_length": metrics.acceptance_length(requests),
        "mean_acceptance_length": metrics.mean_acceptance_length(requests),
        "acceptance_rate": metrics.acceptance_rate(requests),
        "mean_acceptance_rate": metrics.mean_acceptance_rate(requests),
        "accepted_per_verified": metrics.accepted_per_verified(requests),
        "conditional_acceptance": metrics.conditional_acceptance(requests),
        "marginal_acceptance": metrics.marginal_acceptance(requests),
        "marginal_among_drafted": metrics.marginal_among_drafted(requests),
        "acceptance_histogram": metrics.acceptance_histogram(requests),
        "peak_memory": max(peaks, default=None),
        "joules_per_token": sum(joules) / tokens if len(joules) == len(rows) and tokens else None,
    }


def _output_throughput(rows: Sequence[Row], requests: Sequence[Served], seconds: float, load: Load) -> float:
    """Tokens per second. Of a closed loop by each group's median round, as the speedup is."""
    groups = units(rows) if isinstance(load, ClosedLoop) else []
    return rate(groups) if groups else metrics.output_throughput(requests, seconds)


def findings(measurement: Measurement) -> Findings:
    """The verdict, tables and figures of a measurement."""
    shown, figures = Shown(measurement), summary(measurement)
    tables = [speeds(shown, figures), decoding(shown), drafts(figures), latencies(figures)]
    if shown.measurement.outside and measurement.passed:
        lines = [[what, checked] for what, checked in measurement.passed.items()]
        tables.append(Table(title="What the gate compared", head=("what", "how"), lines=lines))
    without = {**measurement.stopped, **measurement.left_out}
    if without:
        lines = [[what, why] for what, why in without.items()]
        tables.append(Table(title="Stopped, or left out", head=("what", "why"), lines=lines))
    tables.append(Table(title="How to read this", points=TRAPS))
    return Findings(
        tables=[each for each in tables if each.lines or each.points],
        panels=panels(shown),
        verdict=headline(measurement),
        text=about(measurement),
        summary={
            "verdict": headline(measurement),
            "ways": figures,
            "stopped": measurement.stopped,
            "left_out": measurement.left_out,
        },
    )


def about(measurement: Measurement) -> str:
    """What was measured."""
    plan, asked, workload = measurement.plan, measurement.asked, measurement.workload
    setup = ", ".join(f"{name}={setting_text(value)}" for name, value in plan.setup.options().items()) or "the defaults"
    more = f" ({asked.left_out} do not fit into the context)" if asked.left_out else ""
    template = "no chat template" if asked.template is None else f"chat template {asked.template[:12]}"
    stopped = len(measurement.stopped)
    checked = f"{stopped} were stopped by the gate" if stopped else "none was stopped by the gate"
    return (
        f"Target {measurement.target}; setup: {setup}. {len(asked.conversations)} conversations of {workload.name} "
        f"({workload.format}, {workload.sha256[:12]}){more}, {template}, token ids {asked.token_ids[:12]}; "
        f"at most {plan.generation.max_new_tokens} tokens an answer, {plan.rounds} rounds. "
        f"{len(plan.configurations)} configurations, of which {checked}. Intervals: 95 %, bootstrap over prompts "
        "within their categories, all ways resampled together."
    )


def speeds(shown: Shown, figures: Sequence[dict[str, Any]]) -> Table:
    """Tokens per second and speedups."""
    lines = []
    for each in figures:
        ratio = "-" if each["speedup"] is None else _estimate(each["speedup"]).text()
        word = "baseline" if each["baseline"] == each["way"] else each["verdict"] or "-"
        rounds = rounds_of(shown.measurement.rows, each["way"], each["load"])
        lines.append(
            [
                each["load"],
                each["way"],
                f"{each['output_throughput']:.1f}",
                f"{min(rounds):.1f} to {max(rounds):.1f}",
                ratio,
                word,
                *([] if shown.measurement.plan.objectives is None else [f"{each['goodput']:.2f}"]),
                *_costs(each),
            ]
        )
    good = [] if shown.measurement.plan.objectives is None else ["good requests/s"]
    head = ("load", "way", "tokens/s", "rounds", "speedup", "verdict", *good, "peak memory", "J/token")
    text = (
        "Peak memory is the process's during these runs, with all models that it holds; of another engine, its "
        "process's since its start."
    )
    return Table(title="Speed", text=text, head=head, lines=lines)


def _estimate(value: Sequence[float]) -> IntervalEstimate:
    middle, low, high = value
    return IntervalEstimate(value=middle, low=low, high=high)


def _costs(each: dict[str, Any]) -> list[str]:
    """Memory and energy as cells."""
    memory, joules = each["peak_memory"], each["joules_per_token"]
    return ["-" if memory is None else f"{memory / 2**20:.0f} MiB", "-" if joules is None else f"{joules:.2f}"]


def rounds_of(rows: Sequence[Row], way: str, load: str) -> list[float]:
    """Tokens per second of each round."""
    way_rows = of_way(rows, way, load)
    numbers = sorted({row["round"] for row in way_rows})
    return [
        sum(row["tokens"] for row in way_rows if row["round"] == number)
        / sum(row["seconds"] for row in way_rows if row["round"] == number)
        for number in numbers
    ]


def decoding(shown: Shown) -> Table:
    """Start, prompt and decoding, each by itself, of ways that tell when their first tokens come."""
    categories = sorted({row["category"] for row in shown.measurement.rows})
    groups = [None, *categories] if len(categories) > 1 else [None]
    lines = []
    for load in shown.measurement.plan.loads:
        for way in shown.ways(load):
            prompts = metrics.prompt_throughput(shown.served(way, load))
            if prompts is None:
                continue
            start = shown.measurement.starts.get(way)
            drafted, accepted = metrics.drafted_and_accepted(shown.served(way, load))
            lines.append(
                [
                    load.name,
                    way,
                    "-" if start is None else f"{start:.1f}",
                    f"{prompts:.0f}",
                    *(_decoding_speed(shown.rows(way, load), category) for category in groups),
                    f"{accepted} of {drafted}" if drafted else "-",
                ]
            )
    names = ["all" if category is None else category or "none" for category in groups]
    head = ("load", "way", "start, s", "prompt", *names, "accepted")
    text = (
        "Tokens/s of prompts, and of decoding from the first token on: the median round, with the slowest and the "
        "fastest. The start of another engine ends when its models are loaded."
    )
    return Table(title="Prompt and decoding", text=text, head=head, lines=lines)


def _decoding_speed(rows: Sequence[Row], category: str | None) -> str:
    """Tokens per second of decoding alone: the median round, with the slowest and the fastest."""
    wanted = [row for row in rows if category in (None, row["category"])]
    served = {
        number: [Served.read(each) for row in wanted if row["round"] == number for each in row["served"]]
        for number in sorted({row["round"] for row in wanted})
    }
    rounds = [speed for each in served.values() if (speed := metrics.decode_throughput(each)) is not None]
    return f"{statistics.median(rounds):.1f} ({min(rounds):.1f} to {max(rounds):.1f})" if rounds else "-"


def drafts(figures: Sequence[dict[str, Any]]) -> Table:
    """What was drafted and accepted, of ways that tell it."""
    names = ("acceptance_length", "mean_acceptance_length", "acceptance_rate", "mean_acceptance_rate")
    lines = [
        [
            each["load"],
            each["way"],
            f"{each['block_efficiency']:.2f}",
            *(f"{each[name]:.2f}" for name in (*names, "accepted_per_verified")),
            " ".join(f"{value:.2f}" for value in each["conditional_acceptance"]),
        ]
        for each in figures
        if each["acceptance_length"] is not None
    ]
    head = ("load", "way", "block efficiency", "acceptance length", "mean of requests", "acceptance rate")
    more = ("mean of requests", "accepted per verified", "conditional by position")
    return Table(title="Drafts", head=(*head, *more), lines=lines)


def latencies(figures: Sequence[dict[str, Any]]) -> Table:
    """Latencies in milliseconds."""
    kinds = ("tpot", "ttft", "inter_chunk_latency", "e2el")
    lines = []
    for each in figures:
        cells = []
        for kind in kinds:
            times = each[kind]
            cells.append("-" if times is None else " / ".join(f"{1000 * times[p]:.1f}" for p in ("mean", "p50", "p99")))
        lines.append([each["load"], each["way"], *cells])
    head = ("load", "way", "TPOT", "TTFT", "inter-chunk latency", "end to end")
    return Table(title="Latency", text="Milliseconds: mean / median / 99th percentile.", head=head, lines=lines)


def panels(shown: Shown) -> list[Figure]:
    """All figures for which there is data."""
    figures: list[Figure | None] = []
    if shown.measurement.rows:
        first = next(load for load in shown.measurement.plan.loads if shown.ways(load))
        figures = [figure(shown, first) for figure in (by_category, by_position, histogram, by_nodes)]
        figures += [by_concurrency(shown), *by_rate(shown), parts(shown, first)]
    return [each for each in figures if each is not None]


def by_category(shown: Shown, load: Load) -> Figure | None:
    """Speedup of each way in each category."""
    measurement = shown.measurement
    baseline = next((v.baseline for way in measurement.ways if (v := verdict_of(measurement, way, load.name))), None)
    rows = [row for row in units(measurement.rows) if row["load"] == load.name]
    categories = sorted({row["category"] for row in rows})
    ways = [way for way in shown.ways(load) if way != baseline]
    if baseline is None or not ways:
        return None
    groups = {}
    for way in ways:
        verdicts = [verdict_of(measurement, way, load.name, category) for category in categories]
        whole = verdict_of(measurement, way, load.name)
        groups[way] = [None if v is None else v.speedup for v in (whole, *verdicts)]
    return Dots(
        title="Speedup by category",
        x=f"speedup over {baseline}, {load.name}",
        names=["all", *(category or "none" for category in categories)],
        groups=groups,
        reading="Right of the line is faster. A bar that crosses it shows no difference.",
    )


def exactly(value: float) -> IntervalEstimate:
    """A figure without an interval."""
    return IntervalEstimate(value=value, low=value, high=value)


def by_position(shown: Shown, load: Load) -> Figure | None:
    """Acceptance at each position of a draft."""
    curves = []
    for number, way in enumerate(shown.drafting(load, MOST_CURVES // 2)):
        requests = shown.served(way, load)
        for label, rates in (
            ("conditional", metrics.conditional_acceptance(requests)),
            ("marginal", metrics.marginal_acceptance(requests)),
        ):
            x = list(range(1, len(rates) + 1))
            dashed = label == "marginal"
            y = [exactly(rate) for rate in rates]
            curves.append(Curve(label=f"{way}, {label}", x=x, y=y, dashed=dashed, color=number))
    return _panel(
        curves,
        title="Acceptance by position",
        x="position in the draft",
        y="share of draft tokens accepted",
        reading="Solid: of the drafts accepted so far. Dashed: of all drafts, which also counts drafts that were "
        "too short.",
    )


def histogram(shown: Shown, load: Load) -> Figure | None:
    """How many tokens steps accept."""
    curves = []
    for way in shown.drafting(load, MOST_CURVES):
        counts = metrics.acceptance_histogram(shown.served(way, load))
        y = [exactly(count / sum(counts)) for count in counts]
        curves.append(Curve(label=way, x=list(range(len(counts))), y=y))
    return _panel(
        curves,
        title="Accepted tokens of a step",
        x="accepted draft tokens",
        y="share of drafting steps",
        reading="A heap at 0 means drafts that are wrong at once; a heap at the right end means drafts that could be "
        "longer.",
    )


def by_nodes(shown: Shown, load: Load) -> Figure | None:
    """Tokens of a step against its draft tokens."""
    curves = []
    for way in shown.drafting(load):
        served = shown.served(way, load)
        x = metrics.nodes_per_step(served) or 0.0
        curves.append(Curve(label=way, x=[x], y=[_efficiency(shown.rows(way, load))]))
    return _panel(
        curves,
        title="Block efficiency against nodes",
        x="draft tokens of a drafting step, mean",
        y="tokens per step",
        reading="Further up for as many draft tokens is a better drafter or tree. Every draft token costs time.",
    )


def _efficiency(rows: Sequence[Row]) -> IntervalEstimate:
    """Tokens per step with its interval, resampled over prompts."""
    counts: dict[str, Row] = {}
    for row in rows:
        one = counts.setdefault(
            row["prompt"], {"method": "way", "prompt": row["prompt"], "seed": 0, "category": row["category"]}
        )
        steps = [step for each in row["served"] for step in each["steps"]]
        one["tokens"] = one.get("tokens", 0) + sum(step[2] for step in steps)
        one["steps"] = one.get("steps", 0) + len(steps)
    return IntervalEstimate.of(Sums(list(counts.values())).ratio("way", "tokens", "steps"))


def by_concurrency(shown: Shown) -> Figure | None:
    """Throughput against the number of conversations at once."""
    at = {load: float(load.concurrency) for load in shown.measurement.plan.loads if isinstance(load, ClosedLoop)}
    if len(at) < 2:
        return None
    return _panel(
        _over_loads(shown, at, lambda way, load: _throughput(shown.rows(way, load))),
        title="Throughput against batch",
        x="conversations at once",
        y="tokens per second",
        reading="Where the curve of a way falls below plain decoding, drafting costs more than it brings.",
    )


def _throughput(rows: Sequence[Row]) -> IntervalEstimate:
    """Tokens per second of runs, with the slowest and the fastest round."""
    rounds = rounds_of(rows, rows[0]["method"], rows[0]["load"])
    whole = sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    return IntervalEstimate(value=whole, low=min(rounds), high=max(rounds))


def by_rate(shown: Shown) -> list[Figure | None]:
    """Throughput, and latency, against the arrival rate."""
    at = {load: float(load.rate) for load in shown.measurement.plan.loads if isinstance(load, OpenLoop)}
    if not at:
        return []

    def latency(kind: Callable[[Sequence[Served]], list[float]]) -> list[Curve]:
        def figure(way: str, load: Load) -> IntervalEstimate:
            seconds = metrics.percentiles(kind(shown.served(way, load))) or {}
            middle, worst = (1000 * seconds.get(p, 0.0) for p in ("p50", "p99"))
            return IntervalEstimate(value=middle, low=middle, high=worst)

        return _over_loads(shown, at, figure)

    rates = _over_loads(shown, at, lambda way, load: _throughput(shown.rows(way, load)))
    return [
        _panel(
            rates,
            title="Throughput against arrival rate",
            x="conversations per second",
            y="tokens per second",
            reading="Throughput follows the rate until the engine cannot keep up.",
        ),
        *(
            _panel(
                latency(kind),
                title=f"{name} against arrival rate",
                x="conversations per second",
                y=f"{name}, milliseconds",
                reading="Points are medians, bars reach to the 99th percentile.",
            )
            for name, kind in (("TPOT", metrics.time_per_output_token), ("TTFT", metrics.time_to_first_token))
        ),
    ]


def _over_loads(shown: Shown, at: Mapping[Any, float], figure: Callable[[str, Load], IntervalEstimate]) -> list[Curve]:
    """A curve for each way over the loads under which it ran, each of which stands at a number."""
    curves = []
    for way in shown.measurement.ways:
        done = [load for load in sorted(at, key=at.__getitem__) if shown.rows(way, load)]
        if done:
            curves.append(Curve(label=way, x=[at[load] for load in done], y=[figure(way, load) for load in done]))
    return curves


def parts(shown: Shown, load: Load) -> Figure | None:
    """Where the seconds of a token go."""
    amounts: dict[str, list[float]] = {}
    names = []
    for way in shown.ways(load):
        rows = shown.rows(way, load)
        if not all(row["parts"] for row in rows):
            continue
        names.append(way)
        tokens = sum(row["tokens"] for row in rows)
        spent = {part: sum(row["parts"][part] for row in rows) for part in rows[0]["parts"]}
        spent["prefill and other"] = max(0.0, shown.seconds(way, load) - sum(spent.values()))
        for part, seconds in spent.items():
            amounts.setdefault(part, []).append(1000 * seconds / tokens)
    if not names:
        return None
    nonzero = {part: values for part, values in amounts.items() if any(values)}
    return Stacks(
        title="Where the time of a token goes",
        x=f"milliseconds per output token, {load.name}",
        names=names,
        parts=nonzero,
        reading="A draft pays where it shortens the target's part by more than all other parts grow.",
    )


def _panel(curves: Sequence[Curve], *, title: str, x: str, y: str, reading: str) -> Figure | None:
    return Panel(title=title, x=x, y=y, curves=curves, exact=True, reading=reading) if curves else None
