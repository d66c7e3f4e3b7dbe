"""One run of a recipe that tests published claims: its methods counted, or timed, and judged."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import Folder, folder
from outrider.bench.report import Claim, Findings, Table
from outrider.core.types import InputError
from recipes.inquiry.figures import Figures
from recipes.inquiry.step_seconds import StepSeconds
from recipes.inquiry.trial import Bench, Method, Setting
from recipes.runs import PromptBatch

SLOTS = 8
"""Requests at once while steps are counted; a request's draws do not depend on the others."""


@dataclass(frozen=True, kw_only=True)
class Inquiry:
    """What a recipe compares, and what it makes of it.

    Attributes:
        recipe: Its name.
        findings: Tables and claims of the figures.
        lengths: Methods that tell what one more draft token takes; see `Figures`.
    """

    recipe: str
    methods: Sequence[Method]
    findings: Callable[[Figures], Findings]
    lengths: Sequence[str] = ()

    def run(self, setting: Setting, *, timed: Path | None = None, clock: bool = False) -> list[dict[str, Any]]:
        """Count the steps of all methods or time them, write what follows, and return the claims.

        Args:
            timed: Folder of a timed run; without it nothing is said of tokens per second.
            clock: Whether to time.
        """
        if clock:
            return self._time(setting)
        times = None if timed is None else StepSeconds.read(timed)
        with folder(setting.out, self.recipe, {**vars(setting), "timed": timed}) as place:
            bench = Bench(setting, max_slots=SLOTS)
            questions = bench.questions(setting.num_prompts)

            def figures(rows: Sequence[Row]) -> Figures:
                return Figures(self.methods, rows, times, self.lengths)

            rows = count_until_clear(
                bench, place, self.methods, bench.batches(questions), lambda rows: self.findings(figures(rows)).claims
            )
            if not rows:
                raise nothing_whole(place)
            made = figures(rows)
            return place.finish(replace(self.findings(made), text=about(setting, times, made.sums.num_prompts)))

    def _time(self, setting: Setting) -> list[dict[str, Any]]:
        """All methods take turns on every prompt."""
        with folder(setting.out, self.recipe, {**vars(setting), "clock": True}) as place:
            bench = Bench(setting)
            rows = bench.measure(place, "measured", self.methods, bench.jobs(bench.questions(setting.num_prompts)))
            return place.finish(Findings(tables=[seconds_table(self.methods, rows)], text=setting.about))


def count_until_clear(
    bench: Bench,
    place: Folder,
    methods: Sequence[Method],
    jobs: Sequence[PromptBatch],
    judge: Callable[[Sequence[Row]], Sequence[Claim]],
) -> list[Row]:
    """Count seed by seed; a method on which no claim rests that is still open is not run with further seeds.

    A claim is open until an interval twice as wide as its own would judge it, so that looking after every seed judges
    hardly any claim that one look would not. Methods without claims, and those that draw nothing, are run with the
    first seed alone.
    """
    rows: list[Row] = []
    run = list(methods)
    for seed in sorted({job.seed for job in jobs}):
        if run:
            rows += bench.count(place, run, [job for job in jobs if job.seed == seed], compared=methods)
        if not rows:
            return []
        open_ = {name for claim in judge(rows) if not claim.clear for name in claim.rests_on}
        run = [method for method in methods if method.name in open_ and not method.repeats]
    return rows


def nothing_whole(place: Folder) -> InputError:
    """What to say where nothing can be judged as it is."""
    return InputError(f"{place.place} has no prompt that all methods have done; leave out --as-is")


def about(setting: Setting, times: StepSeconds | None, num_prompts: int) -> str:
    """What was counted, on how many prompts, and where times come from."""
    counted = replace(setting, num_prompts=num_prompts).about
    if times is None:
        return counted
    made = times.made
    return (
        f"{counted} Seconds of a step: {made['cpu']}, {made['threads']} threads, commit "
        f"{str(made['commit'])[:10]}, {made['date'][:10]}."
    )


def seconds_table(methods: Sequence[Method], rows: Sequence[Row]) -> Table:
    """Milliseconds of a step of each method."""
    times = StepSeconds(rows, {})
    lines = [
        [method.name, method.length, IntervalEstimate.of(1000 * times.of(method.name)).text()]
        for method in methods
        if times.has(method.name)
    ]
    return Table(title="Milliseconds of a step", head=("method", "length", "median over prompts"), lines=lines)
