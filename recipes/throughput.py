"""Tokens per second of a full engine: more requests than slots, so that each finished request makes room for the next.

`python -m recipes throughput --out DIR` sends the shipped prompts through engines over the embedded pair with 1 and
with 8 slots, greedily: plain, and with chains of 2 to 5 drafted tokens. All ways take turns, in rounds. A fixed batch
would wait for its slowest request; here slots never wait for each other.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import outrider
from outrider.bench.evidence import Estimate, Row
from outrider.bench.folder import folder
from outrider.bench.plot import Curve, Panel
from outrider.bench.report import Findings, Table
from outrider.bench.runs import Conditions, Job, on_engine
from outrider.bench.turns import Turn, turns
from outrider.bench.workload import PROMPTS, Question, read_prompts
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.engine.engine import Engine
from recipes import options

SLOTS = (1, 8)
LENGTHS = (0, 2, 3, 4, 5)
"""Drafted tokens per step; 0 decodes plainly."""
QUICK = {"num_prompts": 8, "max_new_tokens": 8, "rounds": 1}


def name_of(length: int) -> str:
    """A way's name."""
    return f"chain of {length}" if length else "plain"


@dataclass(frozen=True, kw_only=True)
class Full:
    """An engine with a number of slots and of draft tokens; plain engines run blocks of one column."""

    slots: int
    length: int
    engine: Engine

    @property
    def name(self) -> str:
        """Unique among the engines."""
        return f"{name_of(self.length)}, {self.slots} slots"

    @classmethod
    def of(cls, slots: int, length: int, target: str) -> "Full":
        """An engine over the embedded pair, or over another target."""
        if length == 0:
            engine = outrider.load(target, drafter="none", max_slots=slots, pad_to=1)
        else:
            drafter = f"model:path={EMBEDDED_DRAFT}"
            engine = outrider.load(target, drafter=drafter, length=f"fixed:{length}", max_slots=slots)
        return cls(slots=slots, length=length, engine=engine)


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Tokens per second by slots and way: medians over rounds, and their ratio to plain decoding of the same round."""
    found = []
    for slots, way in dict.fromkeys((row["slots"], row["way"]) for row in rows):
        rates = {(r["round"], r["way"]): r["tokens"] / r["seconds"] for r in rows if r["slots"] == slots}
        own = {round_: rate for (round_, name), rate in rates.items() if name == way}
        ratios = [rate / rates[round_, name_of(0)] for round_, rate in own.items()]
        found.append(
            {
                "slots": slots,
                "way": way,
                "rate": statistics.median(own.values()),
                "over_plain": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
        )
    return found


def findings(entries: Sequence[dict[str, Any]]) -> Findings:
    """The summary as a table and a panel."""
    over = [Estimate(value=e["over_plain"], low=e["spread"][0], high=e["spread"][1]) for e in entries]
    lines = [[e["slots"], e["way"], f"{e['rate']:.0f}", o.text()] for e, o in zip(entries, over, strict=True)]
    curves = [
        Curve(
            label=f"{slots} slots",
            x=LENGTHS,
            y=[next(o for e, o in zip(entries, over, strict=True) if _is(e, slots, n)) for n in LENGTHS],
        )
        for slots in sorted({e["slots"] for e in entries})
    ]
    panel = Panel(title="Full engines", x="drafted tokens per step", y="tokens per second over plain", curves=curves)
    table = Table(head=("slots", "way", "tokens/s", "over plain"), lines=lines)
    text = "Medians over rounds; the ratio to plain decoding of the same round with its extremes."
    return Findings(tables=[table], panels=[panel], text=text, summary={"entries": list(entries)}, columns=1)


def _is(entry: dict[str, Any], slots: int, length: int) -> bool:
    return (entry["slots"], entry["way"]) == (slots, name_of(length))


def run(
    out: Path | None,
    *,
    num_prompts: int = 40,
    max_new_tokens: int = 96,
    rounds: int = 3,
    threads: int = 2,
    target: str = str(EMBEDDED_TARGET),
) -> list[dict[str, Any]]:
    """Measure and write; returns an entry per number of slots and way."""
    given = {**locals(), "target": Path(target).name}
    torch.set_num_threads(threads)
    with folder(out, "throughput", given) as place:
        engines = [Full.of(slots, n, target) for slots in SLOTS for n in LENGTHS]
        encode = engines[0].engine.encode
        asked = tuple(
            Question(id=id, category=category, tokens=tuple(encode(prompt)))
            for id, category, prompt in read_prompts(PROMPTS)[:num_prompts]
        )
        job = Job(questions=asked)
        conditions = Conditions(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        warm = place.progress.add_task("warm-up", total=len(engines))
        for full in engines:
            on_engine(full.engine, job, conditions)
            place.progress.advance(warm)

        def full_run(turn: Turn[Full, Job]) -> Row:
            made = on_engine(turn.way.engine, turn.job, conditions)
            tokens = made.num_tokens
            return {"slots": turn.way.slots, "way": name_of(turn.way.length), "tokens": tokens, "seconds": made.seconds}

        rows = place.take("measured", turns(engines, [job], rounds=rounds), full_run)
        rows = sorted(rows, key=lambda row: (row["slots"], row["way"] != name_of(0), row["way"], row["round"]))
        entries = summarise(rows)
        place.finish(findings(entries))
        return entries


def main(
    out: options.Out = None,
    num_prompts: options.NumPrompts = 40,
    max_new_tokens: options.MaxNewTokens = 96,
    rounds: options.Rounds = 3,
    threads: options.Threads = 2,
) -> None:
    """Measure the throughput of full engines."""
    run(out, num_prompts=num_prompts, max_new_tokens=max_new_tokens, rounds=rounds, threads=threads)
