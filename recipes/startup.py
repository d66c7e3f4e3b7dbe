"""Time from the start of a process to its first token: `outrider generate` against a bare script of transformers.

`python -m recipes startup --out DIR` starts both in turns, each in a fresh process: `outrider generate` with the
embedded pair, and a script that loads the embedded target and its tokenizer and generates one token. The time ends when
the first token can be read from the process. CPU seconds are those of the process at that moment; they vary less than
wall time on a busy machine. Two more processes per round go the same ways in parts, and say where the time goes. All
ways run once before the first round, so that files and caches are warm. The recipe needs Linux.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import folder
from outrider.bench.plot import Bars
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from recipes import options
from recipes.startup_parts import PARTS

PROMPT = "Once upon a time"
NEW_TOKENS = 16
"""Tokens of an output of `outrider generate`, so that its first step drafts."""
MOST = 1.3
"""How many times as long as the bare script a start may take."""
BARE = f"""
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({str(EMBEDDED_TARGET)!r})
tokenizer = AutoTokenizer.from_pretrained({str(EMBEDDED_TARGET)!r})
inputs = tokenizer({PROMPT!r}, return_tensors="pt")
output = model.generate(**inputs, max_new_tokens=1, do_sample=False)
print(tokenizer.decode(output[0]), flush=True)
"""
"""The bare script."""
GENERATE = ("generate", "--prompt", PROMPT, "--temperature", "0")
ROOT = Path(__file__).parent.parent
QUICK = {"rounds": 1}
CLOCKS = ("wall", "cpu")


@dataclass(frozen=True, kw_only=True)
class Start:
    """A way to start, to which the recipe compares others.

    Attributes:
        package: `transformers` or `outrider`.
        in_parts: Whether the parts are timed, instead of the whole.
    """

    package: str
    in_parts: bool

    @property
    def name(self) -> str:
        """Unique among the ways."""
        return f"{self.package}, in parts" if self.in_parts else self.package

    def run(self, threads: int) -> Row:
        """Start a process, and return its seconds."""
        around = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": _path()}
        return _parts(self.package, around) if self.in_parts else _first_token(self.package, around)


WAYS = [Start(package=package, in_parts=parts) for parts in (False, True) for package in ("transformers", "outrider")]


def _path() -> str:
    """Where the started processes look for modules: first in this project."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def _first_token(library: str, around: Mapping[str, str]) -> Row:
    """Seconds until a process has written its prompt and more."""
    own = ["-m", "outrider", *GENERATE, "--max-new-tokens", str(NEW_TOKENS)]
    command = [sys.executable, *(["-c", BARE] if library == "transformers" else own)]
    began = time.monotonic()
    with subprocess.Popen(command, cwd=ROOT, env=around, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        written = b""
        while len(written.decode(errors="ignore")) <= len(PROMPT):
            more = os.read(process.stdout.fileno(), 4096) if process.stdout is not None else b""
            if not more:
                raise RuntimeError(f"{library} ended before its first token: {process.communicate()[1][-2000:]!r}")
            written += more
        found = {"wall": time.monotonic() - began, "cpu": _cpu_seconds(process.pid)}
        process.communicate()
    return found


def _cpu_seconds(pid: int) -> float:
    """CPU seconds of a process up to now."""
    # The name of the process, in parentheses, may hold spaces.
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _parts(library: str, around: Mapping[str, str]) -> Row:
    """Seconds of each part of a start."""
    arguments = [str(EMBEDDED_TARGET), PROMPT]
    if library == "outrider":
        arguments = [*GENERATE, "--max-new-tokens", "1"]
    command = [sys.executable, "-m", "recipes.startup_parts", library, str(time.monotonic()), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{library} failed: {done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: Sequence[float]) -> IntervalEstimate:
    """Median, lowest and highest."""
    return IntervalEstimate(value=statistics.median(values), low=min(values), high=max(values))


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Seconds of both libraries, their ratio within each round, and the seconds of the parts; for each clock."""
    found: dict[str, Any] = {}
    for clock in CLOCKS:
        whole = {library: _by_round(rows, library, clock) for library in ("transformers", "outrider")}
        ratios = [whole["outrider"][k] / seconds for k, seconds in whole["transformers"].items()]
        parts = {library: _by_round(rows, f"{library}, in parts", clock) for library in whole}
        found[clock] = {
            "seconds": {library: spread(list(own.values())) for library, own in whole.items()},
            "ratio": spread(ratios),
            "parts": {
                library: {part: spread([each[part] for each in own.values()]) for part in PARTS}
                for library, own in parts.items()
            },
        }
    return found


def _by_round(rows: Sequence[Row], way: str, clock: str) -> dict[int, Any]:
    return {row["round"]: row[clock] for row in rows if row["way"] == way}


def findings(found: Mapping[str, Any], rounds: int) -> Findings:
    """The summary as tables and bars."""
    lines, parts, panels = [], [], []
    for clock in CLOCKS:
        own = found[clock]
        seconds = [own["seconds"][library].text() for library in ("transformers", "outrider")]
        lines.append([clock, *seconds, own["ratio"].text(), "yes" if own["ratio"].value <= MOST else "no"])
        bare, ours = own["parts"]["transformers"], own["parts"]["outrider"]
        parts += [[clock, part, bare[part].text(), ours[part].text()] for part in PARTS]
        groups: dict[str, Sequence[IntervalEstimate]] = {
            "transformers": [bare[part] for part in PARTS],
            "outrider": [ours[part] for part in PARTS],
        }
        panels.append(Bars(title=f"Parts of a start, {clock} seconds", x="seconds", names=PARTS, groups=groups))
    whole = Table(
        title="To the first token, seconds",
        head=("clock", "bare script", "outrider generate", "ratio", f"at most {MOST}"),
        lines=lines,
    )
    table = Table(
        title="Where the time goes, seconds", head=("clock", "part", "bare script", "outrider generate"), lines=parts
    )
    text = f"Fresh processes in turns: median [lowest, highest] of {rounds}; ratios within a round."
    return Findings(tables=[whole, table], panels=panels, text=text, summary=_plain(found))


def _plain(found: Any) -> Any:
    """A summary without estimates, for JSON."""
    if isinstance(found, IntervalEstimate):
        return asdict(found)
    return {name: _plain(each) for name, each in found.items()} if isinstance(found, Mapping) else found


def run(out: Path | None, *, rounds: int, threads: int) -> dict[str, Any]:
    """Measure, write, and return the summary."""
    if not Path("/proc/self/stat").exists():
        raise InputError("startup reads CPU seconds from /proc, which this system does not have")
    with folder(out, "startup", {"rounds": rounds, "threads": threads}) as place:
        with task("warm-up", len(WAYS)) as warm:
            for way in WAYS:
                way.run(threads)
                warm.advance()

        def one(turn: Turn[Start, Start]) -> Row:
            return {"way": turn.way.name, **turn.way.run(threads)}

        rows = place.take("measured", turns(WAYS, WAYS[:1], rounds=rounds), one)
        found = summarise(rows)
        place.finish(findings(found, rounds))
    return found


def main(out: options.Out = None, rounds: options.Rounds = 7, threads: options.Threads = 2) -> None:
    """Measure the time from the start of a process to its first token."""
    run(out, rounds=rounds, threads=threads)
