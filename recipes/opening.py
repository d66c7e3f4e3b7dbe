"""Opening a model from a prepared cache: seconds and memory of each kind of forward, over those of `from_pretrained`.

`python -m recipes opening --target FOLDER` starts fresh processes in turns: one that loads the models with
transformers alone, one that also loads their tokenizers, as `outrider.load` does, and one for each kind of forward that
loads them with outrider; `--ways` chooses among all but the first. Seconds begin after the imports.
Memory is VmRSS of /proc/self/status above that after the imports, over the bytes of the weights; `anonymous` is the
part of it that no file holds. It is read when the models are loaded, and again behind a prompt and some tokens. Every
way opens the models once before the first round, so that the cache is warm: with GGUF files, which transformers takes
a minute to unpack, only outrider's ways do, because the files have then been read. The recipe needs Linux. Run
`outrider prepare` with the same models before, or compiled forwards are made in the warm-up.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn, turns
from outrider.core.progress import task
from outrider.embedded import EMBEDDED_TARGET
from recipes import options
from recipes.fresh import row_of
from recipes.label import Label
from recipes.quartiles import extremes

BARE, READING, DEFAULT = "from_pretrained", "from_pretrained and tokenizers", "default"
WAYS = (BARE, READING, "eager", "packed", "compiled", DEFAULT)
MOST_SECONDS, MOST_MEMORY = 1.5, 1.3
"""The goals: over `from_pretrained`, and over the weights."""
PROGRAM = """
import json, re, sys, time
from pathlib import Path
way, target, draft, threads = sys.argv[1:]
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(int(threads))
import outrider, outrider.assembly

def memory():
    text = Path("/proc/self/status").read_text()
    return {name: 1024 * int(re.search(rf"{name}:\\s+(\\d+)", text)[1]) for name in ("VmRSS", "RssAnon")}

# Where a place is a GGUF file, transformers unpacks it.
given = [Path(place) for place in (target, draft) if place]
places = [(place.parent, place.name) if place.suffix == ".gguf" else (place, None) for place in given]
before, began = memory(), time.perf_counter()
if way.startswith("from_pretrained"):
    if way != "from_pretrained":
        tokenizers = [AutoTokenizer.from_pretrained(place, gguf_file=file) for place, file in places]
    models = [AutoModelForCausalLM.from_pretrained(place, gguf_file=file) for place, file in places]
    forward = "-"
else:
    drafter = f"model:path={draft}" if draft else "suffix"
    forward = None if way == "default" else way
    engine = outrider.load(target, drafter=drafter, forward=forward, probe=False)
    models = [lm.model for lm in (engine.parts.target, getattr(engine.parts.drafter, "lm", None)) if lm is not None]
    forward = engine.parts.target.forward
seconds, loaded = time.perf_counter() - began, memory()
if not way.startswith("from_pretrained"):
    prompt = [5 + n % 1000 for n in range(200)]
    engine.generate([prompt], max_new_tokens=40, ignore_eos=True)
worked = memory()
# Packed weights are buffers.
weights = sum(each.nbytes for model in models for each in (*model.parameters(), *model.buffers()))
above = {}
for when, now in (("loaded", loaded), ("worked", worked)):
    above |= {f"{when} {name}": now[name] - before[name] for name in now}
print(json.dumps({"seconds": seconds, "weights": weights, "forward": forward, **above}))
"""
"""What a fresh process runs. Every way imports the same before the clock starts."""
QUICK = {"rounds": 1, "ways": "eager"}


def opened(way: str, target: Path, draft: Path | None, threads: int) -> dict[str, Any]:
    """Seconds, and bytes above the imports, of one way in a fresh process."""
    return row_of(["-c", PROGRAM, way, target, str(draft or ""), str(threads)])


def warmed(ways: Sequence[str], models: Sequence[Path]) -> list[str]:
    """The ways that open the models once before the first round."""
    own = [way for way in ways if way not in (BARE, READING)]
    return own if own and all(model.suffix == ".gguf" for model in models) else list(ways)


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, IntervalEstimate]]:
    """For each way: seconds, their ratio to `from_pretrained` in the same round, and memory over the weights."""
    bare, reading = ({row["round"]: row["seconds"] for row in rows if row["way"] == way} for way in (BARE, READING))
    found = {}
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        found[way] = {
            "seconds": extremes([row["seconds"] for row in own]),
            "ratio": extremes([row["seconds"] / bare[row["round"]] for row in own]),
            **({READING: extremes([row["seconds"] / reading[row["round"]] for row in own])} if reading else {}),
            **{
                f"{when} {kind}": extremes([row[f"{when} {name}"] / row["weights"] for row in own])
                for when in ("loaded", "worked")
                for kind, name in (("resident", "VmRSS"), ("anonymous", "RssAnon"))
            },
        }
    return found


def main(
    out: options.Out = None,
    target: Annotated[Path, typer.Option(help="Directory or GGUF file of the target.")] = EMBEDDED_TARGET,
    draft: Annotated[Path | None, typer.Option(help="The same of a draft model; none by default.")] = None,
    ways: Annotated[str, typer.Option(help="Which ways, with commas between them.")] = ",".join(WAYS),
    rounds: options.Rounds = 5,
    threads: options.Threads = 2,
) -> None:
    """Measure seconds and memory of opening a model, over those of from_pretrained and of the weights."""
    chosen = Label.each(dict.fromkeys([BARE, *options.words(ways)]))
    with folder(out, "opening", {"target": target, "draft": draft, "rounds": rounds, "threads": threads}) as place:
        first = warmed([way.name for way in chosen], [target, *([draft] if draft else [])])
        with task("warm-up", len(first), "runs") as bar:
            for way in first:
                opened(way, target, draft, threads)
                bar.advance()

        def one(turn: Turn[Label, Label]) -> Row:
            return {"way": turn.way.name, **opened(turn.way.name, target, draft, threads)}

        rows = place.take("measured", turns(chosen, chosen[:1], rounds=rounds), one)
        found = summarise(rows)
        head: tuple[str, ...] = ("way", "forward", "seconds", f"over {BARE} (goal {MOST_SECONDS})")
        head += (f"over {READING}",) if READING in found else ()
        memory = [name for name in found[BARE] if name not in ("seconds", "ratio", READING)]
        head += tuple(f"{name}, over the weights (goal {MOST_MEMORY})" for name in memory)
        kinds = {row["way"]: row["forward"] for row in rows}
        lines = [[way, kinds[way], *(each.text() for each in own.values())] for way, own in found.items()]
        text = (
            f"Fresh processes in turns: median [lowest, highest] of {rounds}. Memory is above that after the imports."
        )
        plain = {way: {name: each.value for name, each in own.items()} for way, own in found.items()}
        place.finish(Findings(tables=[Table(head=head, lines=lines)], text=text, summary=plain))
