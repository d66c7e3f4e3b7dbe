"""A sweep whose points are measured apart, each beside plain decoding: chosen by Optuna, or on a Ray cluster."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.side_by_side.configuration import Axis, Configuration, grid, point
from outrider.bench.side_by_side.page import summary
from outrider.bench.side_by_side.session import BenchPlan, Measurement, measure
from outrider.core import files
from outrider.core.inputs import InputError, needs

LOCAL = "local"
"""The address of a Ray cluster that is started for the sweep, on this machine."""
ROWS = "sweep.jsonl"
"""The file of points in a sweep's folder."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured of one point of a sweep. It was measured beside plain decoding on the same machine.

    Attributes:
        key: The configuration, by which results are merged.
        made: A text that is another for another workload, version, or setting.
        load: The first load, which the figures are of.
        speedup: Over plain decoding, with its interval; None where there is none.
        reason: Why there is none.
        stopped: Whether the gate stopped it.
    """

    key: str
    made: str
    load: str
    speedup: tuple[float, float, float] | None = None
    output_throughput: float | None = None
    block_efficiency: float | None = None
    reason: str | None = None
    stopped: bool = False


def measure_point(plan: BenchPlan, configuration: Configuration) -> Point:
    """Measure one configuration beside plain decoding, with nothing written."""
    measurement = measure(replace(plan, configurations=(configuration,), out=None))
    return as_point(measurement, configuration.name)


def as_point(measurement: Measurement, name: str) -> Point:
    """What a measurement says of one of its configurations, under its first load."""
    load = measurement.plan.loads[0].name
    figures = next((each for each in summary(measurement) if (each["way"], each["load"]) == (name, load)), None)
    stopped = measurement.stopped.get(name)
    reason = stopped or measurement.left_out.get(name) or (None if figures else "it made no run")
    return Point(
        key=name,
        made=made_of(measurement),
        load=load,
        speedup=None if figures is None or figures["speedup"] is None else tuple(figures["speedup"]),
        output_throughput=None if figures is None else figures["output_throughput"],
        block_efficiency=None if figures is None else figures["block_efficiency"],
        reason=reason,
        stopped=stopped is not None,
    )


def made_of(measurement: Measurement) -> str:
    """What a point depends on besides its configuration, as a text."""
    arguments = measurement.circumstances["arguments"]
    return json.dumps({name: arguments[name] for name in arguments if name != "configurations"}, sort_keys=True)


def run_sweep(
    plan: BenchPlan, axes: Sequence[Axis], *, trials: int | None = None, ray: str | None = None
) -> list[Point]:
    """Measure the points of a sweep, and keep each as it comes.

    Args:
        plan: Its folder `out` gets one line a point; points that it holds are not measured again.
        trials: How many points Optuna chooses; None measures the whole grid.
        ray: Address of a Ray cluster; None measures here.

    Raises:
        InputError: The folder holds points of another measurement, or a library is missing.
    """
    kept = Points(None if plan.out is None else plan.out / ROWS)
    if ray is not None:
        points = on_ray(plan, [each for each in grid(axes) if each.name not in kept.points], ray)
        for each in points:
            kept.add(each)
    elif trials is not None:
        by_optuna(plan, axes, trials, kept)
    return list(kept.points.values())


class Points:
    """The points of a sweep by their keys, and the file that holds them."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self.points: dict[str, Point] = {}
        if file is not None and file.exists():
            for line in file.read_text(encoding="utf-8").split("\n"):
                if line:
                    self._take(_read(line, file))

    def add(self, point: Point) -> None:
        """Keep a point, and write it. Raises InputError if it was made under other circumstances than the others."""
        self._take(point)
        if self._file is not None:
            with files.written(self._file):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                text = "".join(json.dumps(asdict(each)) + "\n" for each in self.points.values())
                files.replace(self._file, text.encode())

    def _take(self, point: Point) -> None:
        other = next(iter(self.points.values()), None)
        if other is not None and settled(other.made) != settled(point.made):
            theirs, ours = settled(other.made), settled(point.made)
            changed = sorted(name for name in {*theirs, *ours} if theirs.get(name) != ours.get(name))
            raise InputError(
                f"{self._file or 'the sweep'} has points of a run with another {', '.join(changed)}; give another "
                "folder with --out"
            )
        self.points[point.key] = point


def settled(text: str) -> dict[str, Any]:
    """What must be the same for points to be merged. Machines of a cluster may differ: speedups are of one machine."""
    return {name: value for name, value in json.loads(text).items() if name not in ("cpu", "threads")}


def _read(line: str, file: Path) -> Point:
    try:
        fields = json.loads(line)
        speedup = fields.pop("speedup")
        return Point(**fields, speedup=None if speedup is None else tuple(speedup))
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"{file} holds a line that is no point of a sweep: {error}") from error


def best_first(points: Sequence[Point]) -> list[Point]:
    """Points by the lower end of their speedup's interval."""
    return sorted(points, key=lambda each: -math.inf if each.speedup is None else each.speedup[1], reverse=True)


def by_optuna(
    plan: BenchPlan,
    axes: Sequence[Axis],
    trials: int,
    kept: Points,
    measured: Callable[[BenchPlan, Configuration], Point] = measure_point,
) -> None:
    """Let Optuna choose points by the speedups of earlier ones.

    Args:
        measured: Measures a point.
    """
    try:
        import optuna
    except ImportError as error:
        raise needs("--optuna", "optuna", "sweep") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: Any) -> float:
        values = {axis.option: trial.suggest_categorical(axis.option, list(axis.values)) for axis in axes}
        wanted = point(values)
        if wanted.name not in kept.points:
            kept.add(measured(plan, wanted))
        speedup = kept.points[wanted.name].speedup
        return 0.0 if speedup is None else speedup[0]

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=plan.seed))
    study.optimize(objective, n_trials=trials)


def on_ray(plan: BenchPlan, wanted: Sequence[Configuration], address: str) -> Iterator[Point]:
    """Measure points on a Ray cluster as its machines become free, one at a time on each machine.

    The machines must have Outrider, the workload and the models at the same places.
    """
    try:
        import ray
    except ImportError as error:
        raise needs("--ray", "ray", "sweep") from error
    started = not ray.is_initialized()
    if started:
        options: Mapping[str, Any] = {} if address == LOCAL else {"address": address}
        try:
            ray.init(**options, include_dashboard=False, log_to_driver=False)
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise InputError(f"there is no Ray cluster at {address}: {error}") from error
    try:
        # A task that asks for every core of a machine runs there alone, so that it measures nothing but itself.
        cores = min(int(node["Resources"].get("CPU", 1)) for node in ray.nodes() if node["Alive"])
        task = ray.remote(num_cpus=cores, max_retries=0)(measure_point)
        open_ = [task.remote(plan, each) for each in wanted]
        while open_:
            done, open_ = ray.wait(open_)
            yield from ray.get(done)
    finally:
        if started:
            ray.shutdown()
