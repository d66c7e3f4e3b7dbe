"""What processes cost beside transformers alone: the first token, its parts, long prompts, and memory.

`python -m recipes costs --out DIR` starts fresh processes in turns, some with transformers alone:

- start: from the start of a process to its first token, by `outrider generate` with the embedded pair, and by a script
  that loads the embedded target and its tokenizer and generates one token. The time ends when the token can be read
  from the process. CPU seconds are those of the process at that moment; they vary less on a busy machine.
- parts: both again, with the seconds of each part of a start.
- prompts: a random Llama of six layers, 256 wide, reads prompts until the first new token. Seconds are the median over
  some turns; memory is the most that the process held while it read, less what it held before.
- memory: VmRSS in MB (10^6 bytes) of both models in transformers, and of the pair in an engine, each behind some
  tokens; and how much one engine grows over many requests in a row.

Figures are medians with the lowest and the highest of the rounds; ratios and differences are of one round. Each part
runs once before its first round, so that files and caches are warm. The recipe needs Linux.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from recipes import options
from recipes.fresh import ROOT, row_of, surroundings
from recipes.label import Label
from recipes.quartiles import extremes

BARE, OURS, GROWTH = "transformers", "outrider", "many requests"
PROMPT = "Once upon a time"
SCRIPT = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({str(EMBEDDED_TARGET)!r})
tokenizer = AutoTokenizer.from_pretrained({str(EMBEDDED_TARGET)!r})
inputs = tokenizer({PROMPT!r}, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(output[0]), flush=True)
"""
"""The bare script."""
GENERATE = ("generate", "--prompt", PROMPT, "--temperature", "0")
NEW_TOKENS = 16
"""Tokens of an output of `outrider generate`, so that its first step drafts."""
PARTS, DTYPES = ("start", "parts", "prompts", "memory"), ("float32", "bfloat16")
QUICK = {"parts": "prompts", "lengths": "64", "dtypes": "float32", "turns": 1, "rounds": 1}


@dataclass(frozen=True, kw_only=True)
class Part:
    """What is measured.

    Attributes:
        ways: Who does it.
        jobs: What is done.
        run: Figures of a way at a job, of a fresh process.
        goals: The most of a figure of Outrider, over the bare one.
    """

    name: str
    title: str
    run: Callable[[str, Any], Row]
    ways: Sequence[Label] = (Label(BARE), Label(OURS))
    jobs: Sequence[Label] = (Label("once"),)
    goals: Mapping[str, float] = field(default_factory=dict)


def program(name: str, threads: int, **arguments: object) -> Row:
    """The figures of a program of `recipes.cost_programs`."""
    return row_of(["-m", "recipes.cost_programs", name, json.dumps({**arguments, "threads": threads})], threads)


def first_token(way: str, threads: int) -> Row:
    """Seconds until a process has written its prompt and more."""
    own = ["-m", "outrider", *GENERATE, "--max-new-tokens", str(NEW_TOKENS)]
    command = [sys.executable, *(["-c", SCRIPT] if way == BARE else own)]
    began = time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, env=surroundings(threads), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        written = b""
        while len(written.decode(errors="ignore")) <= len(PROMPT):
            more = os.read(process.stdout.fileno(), 4096) if process.stdout is not None else b""
            if not more:
                raise RuntimeError(f"{way} ended before its first token: {process.communicate()[1][-2000:]!r}")
            written += more
        found = {"wall": time.monotonic() - began, "cpu": _cpu_seconds(process.pid)}
        process.communicate()
    return found


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process up to now."""
    # The name of the process, in parentheses, may hold spaces.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def parts_of_start(way: str, threads: int) -> Row:
    """Seconds of each part of a start."""
    began = time.monotonic()
    if way == BARE:
        return program("transformers_start", threads, began=began, target=str(EMBEDDED_TARGET), prompt=PROMPT)
    return program("outrider_start", threads, began=began, words=[*GENERATE, "--max-new-tokens", "1"])


def summarise(rows: Sequence[Row], part: Part) -> list[dict[str, Any]]:
    """An entry for each job and figure: every way's value, and how Outrider's compares with the bare one's."""
    found = []
    for job in part.jobs:
        own = [row for row in rows if row["job"] == job.name]
        for figure in dict.fromkeys(figure for row in own for figure in row["figures"]):
            having = [row for row in own if figure in row["figures"]]
            runs = {
                way.name: {row["round"]: row["figures"][figure] for row in having if row["way"] == way.name}
                for way in part.ways
            }
            entry: dict[str, Any] = {"part": part.name, "job": job.name, "figure": figure}
            entry["values"] = {way: extremes(list(each.values())) for way, each in runs.items() if each}
            if runs[OURS] and runs[BARE] and all(runs[BARE].values()):
                pairs = [(ours, runs[BARE][k]) for k, ours in runs[OURS].items()]
                entry["more"] = extremes([ours - theirs for ours, theirs in pairs])
                entry["ratio"] = extremes([ours / theirs for ours, theirs in pairs])
            found.append(entry)
    return found


def findings(entries: Sequence[Mapping[str, Any]], parts: Sequence[Part], rounds: int) -> Findings:
    """A table for each part."""
    tables, missed = [], []
    for part in parts:
        lines = []
        for entry in (entry for entry in entries if entry["part"] == part.name):
            values, goal, ratio = entry["values"], part.goals.get(entry["figure"]), entry.get("ratio")
            cells = [values[way.name].text(".4g") if way.name in values else "-" for way in part.ways]
            compared = [entry[name].text(".3g") if name in entry else "-" for name in ("more", "ratio")]
            lines.append([entry["job"], entry["figure"], *cells, *compared, goal or ""])
            if goal is not None and ratio is not None and ratio.value > goal:
                missed.append(f"{entry['figure']} of {part.name}, {entry['job']}: {ratio.value:.2f}")
        head = ("", "figure", *(way.name for way in part.ways), f"more than {BARE}", "ratio", "goal")
        tables.append(Table(title=part.title, head=head, lines=lines))
    text = (
        f"Fresh processes in turns: median [lowest, highest] of {rounds}; differences and ratios within a round. "
        f"Goals: {'missed by ' + '; '.join(missed) if missed else 'reached'}."
    )
    return Findings(tables=tables, text=text, summary={"entries": [_plain(entry) for entry in entries]})


def _plain(value: Any) -> Any:
    """An entry for JSON."""
    if isinstance(value, IntervalEstimate):
        return asdict(value)
    return {name: _plain(each) for name, each in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured."""

    out: options.Out = None
    parts: Annotated[str, typer.Option(help="Of start, parts, prompts, memory; with commas.")] = ",".join(PARTS)
    lengths: Annotated[str, typer.Option(help="Tokens of long prompts, with commas.")] = "1024,4096,16384"
    dtypes: Annotated[str, typer.Option(help="What reads long prompts: float32, bfloat16.")] = ",".join(DTYPES)
    turns: Annotated[int, typer.Option(min=1, help="How often a process reads its prompt.")] = 3
    target: Annotated[Path, typer.Option(help="Directory of the target of `memory`.")] = EMBEDDED_TARGET
    draft: Annotated[Path, typer.Option(help="Directory of the draft model of `memory`.")] = EMBEDDED_DRAFT
    dtype: Annotated[str, typer.Option(help="What the models of `memory` compute in.")] = "bfloat16"
    requests: Annotated[int, typer.Option(min=1, help="Requests in a row.")] = 200
    warmup: Annotated[int, typer.Option(min=1, help="After how many of them growth begins.")] = 20
    rounds: options.Rounds = 5
    threads: options.Threads = 2

    def __post_init__(self) -> None:
        options.words(self.parts, "--parts", PARTS)
        options.words(self.dtypes, "--dtypes", DTYPES)
        if self.warmup > self.requests:
            raise InputError(f"warmup must be <= the number of requests, {self.requests}, got {self.warmup}")
        for place in (self.target, self.draft):
            if not (place / "config.json").is_file():
                raise InputError(f"{place} is not a model's directory: it has no config.json")

    @property
    def chosen(self) -> list[Part]:
        """The parts that are asked for."""
        own = {
            "start": Part(
                name="start",
                title="To the first token, seconds",
                run=lambda way, _: first_token(way, self.threads),
                goals={"wall": 1.3, "cpu": 1.3},
            ),
            "parts": Part(
                name="parts",
                title="Where the time of a start goes, seconds",
                run=lambda way, _: parts_of_start(way, self.threads),
            ),
            "prompts": Part(
                name="prompts",
                title="Reading a long prompt, seconds and MB",
                jobs=[
                    Label(f"{tokens} tokens, {dtype}", {"tokens": tokens, "dtype": dtype})
                    for dtype in options.words(self.dtypes)
                    for tokens in options.whole_numbers("--lengths", self.lengths)
                ],
                run=lambda way, job: program("reading", self.threads, way=way, **job, turns=self.turns),
                goals={"seconds": 1.1, "megabytes": 1.2},
            ),
            "memory": Part(
                name="memory", title="Resident memory, MB", ways=Label.each((BARE, OURS, GROWTH)), run=self._held
            ),
        }
        return [own[name] for name in options.words(self.parts)]

    def _held(self, way: str, _: object) -> Row:
        models = {"target": str(self.target), "draft": str(self.draft), "dtype": self.dtype}
        if way == GROWTH:
            return program("growth", self.threads, **models, requests=self.requests, warmup=self.warmup)
        return program(f"{way}_memory", self.threads, **models)


@options.with_fields(Plan)
def main(plan: Plan) -> list[dict[str, Any]]:
    """Measure what processes cost beside transformers alone."""
    if not Path("/proc/self/status").exists():
        raise InputError("memory and CPU seconds are read from /proc, which this system does not have")
    with folder(plan.out, "costs", vars(plan)) as place:
        entries, chosen = list[dict[str, Any]](), plan.chosen
        for part in chosen:

            def one(turn: Turn[Label, Label], part: Part = part) -> Row:
                return {"way": turn.way.name, "job": turn.job.name, "figures": part.run(turn.way.name, turn.job.value)}

            if not any(row["phase"] == part.name for row in place.rows):
                with task(f"{part.name}: warm-up", len(part.ways)) as warm:
                    for way in part.ways:
                        part.run(way.name, part.jobs[0].value)
                        warm.advance()
            entries += summarise(
                place.take(part.name, turns(part.ways, part.jobs, rounds=plan.rounds, seed=part.name), one), part
            )
        place.finish(findings(entries, chosen, plan.rounds))
        return entries
