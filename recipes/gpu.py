"""One command for a GPU: right answers, every kind of forward, a step against the memory, training, load. Ten minutes.

`python -m recipes gpu --out DIR` runs its parts one after the other, each with a process and a time limit of its own:

- identities: greedy outputs are those of plain decoding, in float32 and up to ties in bfloat16, for every verifier and
  for PEARL on two streams.
- laws: a chi-square test of sampled outputs for every verifier.
- forwards: every kind of forward runs, says the same, and its tokens per second.
- profile: the parts of a step of a random Llama of about a billion parameters, beside the time that the memory needs to
  give its weights once. The bandwidth is measured by copying a large tensor.
- training: a head for the embedded target, trained for two minutes on the target's own texts, then decoded with.
- serving: requests that arrive at random moments; whether memory stays flat.

Each part also says how many graphs the compiler skipped and how many functions it compiled again; both must be 0. Rows
are written as they come. A part that fails is one row with its error, and the others go on. Without a GPU the recipe
ends with an error; `--rehearse` runs the same code on a CPU in the smallest size, and its figures mean nothing.

A GPU that has met an error does no more work for the process that made it, so parts share no process.
"""

import contextlib
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer
from torch._dynamo.utils import counters, get_compilation_metrics
from transformers import PreTrainedModel
from transformers.utils import logging

import outrider
from outrider import catalog
from outrider.assembly import why_not
from outrider.bench.evidence import Row
from outrider.bench.folder import Folder, folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn
from outrider.bench.workloads.workload import PROMPTS
from outrider.core.types import InputError, Sampling, Step
from outrider.embedded import EMBEDDED_TARGET
from outrider.engine.engine import Engine
from outrider.heads.objective import HeadContext
from outrider.learning.batch import Document
from outrider.lm.forwards.forward import FORWARDS, Forward
from outrider.lm.hf.open import open_model
from outrider.proof.identity import identity
from outrider.proof.statistics import sampled_law
from outrider.refusals import verifiers
from outrider.training.data.batches import Batches
from outrider.training.loop.journal import read
from outrider.training.loop.settings import TrainSettings
from outrider.training.loop.steps import Progress, train
from outrider.training.loop.watch import Evaluation, hold_out
from outrider.trees.protocol import Tree
from outrider.verifiers.protocol import Verifier
from recipes import options
from recipes.bare import random_llama, seconds
from recipes.fresh import ROOT, surroundings
from recipes.questions import read_prompts
from recipes.runs import PARTS

QUICK = {"rehearse": True, "parts": "forwards"}
GREEDY = Sampling(temperature=0.0, seed=0)
LENGTH = "fixed:4"
HEAD = "eagle3"
"""The head that is trained."""
PROFILED: tuple[Forward, ...] = ("eager", "replayed")
"""Kinds of forward whose steps are taken apart."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much a run does; by default what one GPU does in ten minutes.

    Attributes:
        device: Where the models run.
        num_prompts: Prompts of the identity checks.
        max_new_tokens: Greedy tokens after each.
        num_draws: Sampled outputs of a test of the law.
        forwards: The kinds of forward that are tried.
        layers: Layers of the target of the profile; its draft model has one.
        hidden: Its width.
        steps: Measured steps of each profile.
        copied_bytes: Size of the copies that measure the memory's bandwidth.
        num_texts: Texts that the target writes for the head.
        trial: Training steps whose time says how many fit, at least three.
        training_seconds: How long the head is trained.
        batch_size: Rows of a training step.
        num_requests: Requests of the load.
        rate: How many of them arrive in a second.
        num_slots: How many run together.
    """

    device: str = "cuda"
    num_prompts: int = 4
    max_new_tokens: int = 48
    num_draws: int = 1000
    forwards: tuple[str, ...] = FORWARDS
    layers: int = 16
    hidden: int = 2048
    steps: int = 64
    copied_bytes: int = 1 << 30
    num_texts: int = 256
    trial: int = 10
    training_seconds: float = 110.0
    batch_size: int = 32
    num_requests: int = 400
    rate: float = 20.0
    num_slots: int = 32


REHEARSAL = Scale(
    device="cpu",
    num_prompts=1,
    max_new_tokens=6,
    num_draws=40,
    forwards=("eager", "packed"),
    layers=1,
    hidden=64,
    steps=2,
    copied_bytes=1 << 20,
    num_texts=4,
    trial=3,
    training_seconds=0.5,
    batch_size=2,
    num_requests=8,
    rate=100.0,
    num_slots=4,
)
"""The same code on a CPU, in the smallest size."""
SCALES = {"card": Scale(), "rehearsal": REHEARSAL}


def loaded(scale: Scale, **options: Any) -> Engine:
    """The embedded pair, with drafts of one length."""
    given: dict[str, Any] = {"device": scale.device, "length": LENGTH, **options}
    return outrider.load(**given)


def prompts_of(engine: Engine, count: int) -> list[list[int]]:
    """Token ids of the first prompts."""
    return [engine.encode(prompt) for _, _, prompt in read_prompts(PROMPTS)[:count]]


def ways(engine: Engine) -> Iterator[tuple[str, Engine]]:
    """Every lossless verifier of the catalog on a chain, and on the first branching tree that it verifies."""
    for verifier in verifiers():
        seen = set()
        for tree in catalog.rows("tree"):
            rule = cast(Verifier, catalog.make("verifier", verifier))
            parts = replace(engine.parts, tree=cast(Tree, catalog.make("tree", tree)), verifier=rule)
            branches = parts.tree.structure != "chain"
            if branches not in seen and why_not(parts) is None:
                seen.add(branches)
                yield f"{tree}, {verifier}", Engine(parts, tokenizer=engine.tokenizer, max_slots=engine.max_slots)


def identities(scale: Scale) -> Iterator[Row]:
    """Greedy identity in float32, and up to ties in bfloat16: every verifier, and PEARL with a stream of its own."""
    for dtype in ("float32", "bfloat16"):
        chain, pearl = loaded(scale, dtype=dtype), loaded(scale, dtype=dtype, decoding="pearl:4", length=None)
        prompts = prompts_of(chain, scale.num_prompts)
        for name, engine in (*ways(chain), ("chain, pearl", pearl)):
            yield {"name": f"{name}, {dtype}", **attempt(functools.partial(same, engine, prompts, scale))}


def same(engine: Engine, prompts: Sequence[Sequence[int]], scale: Scale) -> Row:
    """Whether the engine says what plain decoding says."""
    found = identity(engine, prompts, scale.max_new_tokens)
    return {"holds": found.holds, "tokens": found.num_tokens, "differ": len(found.differences)}


def laws(scale: Scale) -> Iterator[Row]:
    """Chi-square tests of sampled outputs, in float32."""
    engine = loaded(scale, dtype="float32", max_slots=scale.num_slots)
    for name, each in ways(engine):
        yield {"name": name, **attempt(functools.partial(law, each, scale))}


def law(engine: Engine, scale: Scale) -> Row:
    """Whether an engine's samples follow the target's law."""
    found = sampled_law(engine, prompts_of(engine, 2), scale.num_draws)
    return {"verdict": found.verdict, "p": found.p_value, "draws": found.test.num_draws, "degrees": found.test.degrees}


def forwards(scale: Scale) -> Iterator[Row]:
    """Every kind of forward: whether it runs here, says the same, and how long a token takes."""
    for kind in (None, *scale.forwards):
        yield {"name": kind or "default", **attempt(functools.partial(forward, kind, scale))}


def forward(kind: str | None, scale: Scale) -> Row:
    """One kind of forward of target and draft model."""
    engine = loaded(scale, dtype="float32", forward=kind)
    found = same(engine, prompts_of(engine, scale.num_prompts), scale)
    target: Any = engine.parts.target
    outputs = engine.generate(
        prompts_of(engine, 1), max_new_tokens=scale.max_new_tokens, sampling=GREEDY, ignore_eos=True
    )
    ran = {"ran": target.forward, "compiled": target.num_compiled_forwards, "forwards": target.num_forwards}
    return {**found, **ran, "tokens_per_second": outputs[0].tokens_per_second}


def profile(scale: Scale) -> Iterator[Row]:
    """The parts of a step, against the time that the memory needs to give the target's weights once."""
    device = torch.device(scale.device)
    rate = bandwidth(device, scale.copied_bytes)
    shape: dict[str, Any] = {
        "hidden": scale.hidden,
        "heads": scale.hidden // 64,
        "kv_heads": max(1, scale.hidden // 256),
    }
    target = random_llama(layers=scale.layers, device=device, **shape)
    size = sum(weight.nbytes for weight in target.parameters())
    yield {"name": "memory", "bandwidth": rate, "weight_bytes": size, "floor": size / rate}
    with tempfile.TemporaryDirectory() as draft:
        random_llama(layers=1, device=device, **shape).save_pretrained(draft)
        for drafter in ("none", f"model:path={draft}"):
            for batch in (1, 8):
                for kind in PROFILED:
                    name = f"{'plain' if drafter == 'none' else 'draft model'}, batch of {batch}, {kind}"
                    run = functools.partial(stepped, target, drafter, batch, kind, scale)
                    yield {"name": name, "floor": size / rate, **attempt(run)}


def stepped(target: PreTrainedModel, drafter: str, batch: int, kind: Forward, scale: Scale) -> Row:
    """Medians of the seconds of steps and of their parts, behind as many steps of warm-up.

    A step's `seconds` wait for the device, its parts do not.
    """
    engine = outrider.load(target, drafter=drafter, length=LENGTH, forward=kind, max_slots=batch, max_context=1024)
    device = engine.parts.target.device
    for i in range(batch):
        prompt = [(7 * i + k) % target.config.vocab_size for k in range(128)]
        engine.add(prompt, max_new_tokens=700, sampling=GREEDY, ignore_eos=True)
    found: dict[str, list[float]] = {name: [] for name in ("seconds", *PARTS)}
    for number in range(2 * scale.steps):
        made: list[Step] = []
        spent = seconds(functools.partial(engine.step, made.append), device)
        if number >= scale.steps and len(made) == batch:
            found["seconds"].append(spent)
            for part in PARTS:
                found[part].append(getattr(made[0].timing, part))
    return {name: statistics.median(each) for name, each in found.items()}


def bandwidth(device: torch.device, num_bytes: int, rounds: int = 20) -> float:
    """Bytes per second that a device reads and writes: the best of several copies of a large tensor."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(seconds(lambda: target.copy_(source), device) for _ in range(rounds))


def training(scale: Scale) -> Iterator[Row]:
    """A head for the embedded target, trained on the target's own texts for a given time, then decoded with."""
    writer = loaded(scale, max_slots=scale.num_slots)
    texts = written(writer, scale)
    target = open_model(str(EMBEDDED_TARGET), device=scale.device).requires_grad_(False)
    learnt, watched = hold_out(texts, 0.1)
    with tempfile.TemporaryDirectory() as place:
        ends: list[float] = []

        def note(_: Progress) -> None:
            ends.append(time.perf_counter())

        trained(target, learnt, watched, Path(place) / "trial", steps=scale.trial, scale=scale, progress=note)
        # The first step warms up, and the last one watches and saves.
        steps = max(scale.trial, int(scale.training_seconds / min(np.diff(ends))))
        out = Path(place) / "head"
        began = time.perf_counter()
        lines = trained(target, learnt, watched, out, steps=steps, scale=scale)
        spent = time.perf_counter() - began
        took = [line for line in lines if line["kind"] == "step"]
        looks = [line["block_efficiency"] for line in lines if line["kind"] == "watch"]
        settings = next(line for line in lines if line["kind"] == "settings")
        yield {
            "name": HEAD,
            "steps": steps,
            "seconds": spent,
            "tokens_per_second": sum(line["tokens"] for line in took) / len(took) * steps / spent,
            "precision": settings["precision"],
            "fused": settings["fused"],
            "loss_first": took[0]["loss"],
            "loss_last": took[-1]["loss"],
            "block_efficiency_first": looks[0],
            "block_efficiency_last": looks[-1],
        }
        engine = loaded(scale, drafter=f"{HEAD}:path={out}", dtype="float32")
        yield {"name": "decoded with", **same(engine, prompts_of(engine, scale.num_prompts), scale)}


def written(engine: Engine, scale: Scale) -> list[Document]:
    """Texts that the target writes after the prompts."""
    prompts = prompts_of(engine, scale.num_texts)
    found = []
    for first in range(0, scale.num_texts, len(prompts)):
        some = prompts[: scale.num_texts - first]
        settings = [Sampling(seed=first + i) for i in range(len(some))]
        outputs = engine.generate(some, max_new_tokens=4 * scale.max_new_tokens, sampling=settings, ignore_eos=True)
        for prompt, output in zip(some, outputs, strict=True):
            found.append(Document(tokens=np.array([*prompt, *output.tokens]), start=len(prompt)))
    return found


def trained(
    target: PreTrainedModel,
    learnt: Sequence[Document],
    watched: Sequence[Document],
    out: Path,
    *,
    steps: int,
    scale: Scale,
    progress: Callable[[Progress], object] | None = None,
) -> list[Row]:
    """Train a new head. Returns the log."""
    spec = catalog.rows("drafter")[HEAD].kind
    learner = spec.learner(spec.options(), HeadContext(target=target, documents=learnt, depth=4, max_length=256))
    settings = TrainSettings(
        steps=steps,
        batch_size=scale.batch_size,
        max_length=256,
        warmup=max(1, steps // 10),
        save_every=steps,
        watch_every=steps,
        log_every=max(1, steps // 100),
        device="cpu" if scale.device == "cpu" else None,
    )
    batches = Batches(learnt, batch_size=settings.batch_size, max_length=settings.max_length, seed=0)
    return read(train(learner, batches, settings, out, Evaluation(watched, depth=4, max_length=256), progress).log)


def serving(scale: Scale) -> Iterator[Row]:
    """Requests that arrive at random moments: tokens per second, waiting times, and whether memory stays flat."""
    engine = loaded(scale, max_slots=scale.num_slots, max_context=512)
    arrivals = np.cumsum(np.random.default_rng(0).exponential(1 / scale.rate, scale.num_requests))
    prompts = prompts_of(engine, scale.num_requests)
    waiting = [(float(at), str(i), prompts[i % len(prompts)]) for i, at in enumerate(arrivals)][::-1]
    came, first, total, memory = {}, list[float](), list[float](), list[int]()
    num_tokens, quarter, began = 0, scale.num_requests // 4, time.perf_counter()
    while waiting or engine.busy:
        now = time.perf_counter() - began
        while waiting and waiting[-1][0] <= now:
            at, id, prompt = waiting.pop()
            # Requests without a seed, at temperature 0 and 1 in turn.
            sampling = Sampling(temperature=float(int(id) % 2))
            engine.add(prompt, id=id, max_new_tokens=scale.max_new_tokens, sampling=sampling, ignore_eos=True)
            came[id] = at
        if not engine.busy:
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        for update in engine.step():
            now = time.perf_counter() - began
            num_tokens += len(update.tokens)
            if update.tokens and update.id in came:
                first.append(now - came.pop(update.id))
            if update.output is not None:
                total.append(now - arrivals[int(update.id)])
                if update.output.error is not None:
                    raise update.output.error
                if len(total) % quarter == 0:
                    memory.append(used_bytes(scale))
                    yield {"name": f"after {len(total)} requests", "bytes": memory[-1]}
    spent = time.perf_counter() - began
    yield {
        "name": "all requests",
        "requests": len(total),
        "tokens_per_second": num_tokens / spent,
        "first_token_median": statistics.median(first),
        "first_token_95": float(np.quantile(first, 0.95)),
        "latency_median": statistics.median(total),
        "latency_95": float(np.quantile(total, 0.95)),
        "flat": memory[-1] <= 1.01 * memory[len(memory) // 2],
    }


def used_bytes(scale: Scale) -> int:
    """Memory that tensors take on a GPU; 0 elsewhere."""
    return torch.cuda.memory_allocated() if scale.device == "cuda" else 0


def attempt(run: Callable[[], Row]) -> Row:
    """What a run found, why it is refused here, or its error, so that the others go on. A GPU's own error ends all."""
    try:
        return run()
    except torch.AcceleratorError:
        raise
    except InputError as error:
        return {"refused": str(error)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def compiler() -> Row:
    """What the compiler did in this process: graphs that it skipped, and functions that it compiled again."""
    again = sum(bool(metrics.cache_size) for metrics in get_compilation_metrics())
    skipped, compiled = counters["inductor"]["cudagraph_skips"], counters["frames"]["ok"]
    return {"name": "compiler", "skipped": skipped, "recompiled": again, "compiled": compiled}


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the recipe.

    Attributes:
        run: Gives its rows at a scale.
        limit: Seconds after which its process is ended. All limits together are ten minutes.
        heads: What its table shows of each row.
        title: Of its table.
    """

    run: Callable[[Scale], Iterator[Row]]
    limit: float
    title: str
    heads: tuple[str, ...]

    @property
    def name(self) -> str:
        """As rows and the command line have it."""
        return self.run.__name__


ALL = (
    Part(run=identities, limit=110, title="Greedy identity", heads=("holds", "tokens", "differ")),
    Part(run=laws, limit=150, title="The law of sampled outputs", heads=("verdict", "p", "draws", "degrees")),
    Part(
        run=forwards,
        limit=40,
        title="Kinds of forward",
        heads=("ran", "holds", "differ", "tokens_per_second", "compiled", "forwards"),
    ),
    Part(run=profile, limit=80, title="Steps, milliseconds", heads=("seconds", *PARTS, "floor", "over_floor")),
    Part(
        run=training,
        limit=160,
        title="A head",
        heads=(
            *("steps", "seconds", "tokens_per_second", "precision", "loss_first", "loss_last"),
            *("block_efficiency_first", "block_efficiency_last", "holds"),
        ),
    ),
    Part(
        run=serving,
        limit=60,
        title="Load",
        heads=("requests", "tokens_per_second", "first_token_median", "first_token_95", "latency_95", "bytes", "flat"),
    ),
)


def rows_of(command: Sequence[str], limit: float) -> Iterator[Row]:
    """The rows that a process prints, as they come. If it fails or takes too long, the last row has the error."""
    began = time.monotonic()
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command, cwd=ROOT, env=surroundings(), stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        clock = threading.Timer(limit, process.kill)
        clock.start()
        try:
            for line in process.stdout or ():
                # A library may print too.
                with contextlib.suppress(ValueError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row
            status = process.wait()
        finally:
            clock.cancel()
            process.kill()
        if status:
            late = time.monotonic() - began >= limit
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip().splitlines() or [f"it ended with status {status}"]
            yield {"name": "end", "error": f"stopped after {limit:g} seconds" if late else said[-1][:300]}


def run_part(place: Folder, part: Part, command: Sequence[str]) -> Row:
    """Run a part and keep its rows. Returns the row of the part as a whole."""
    began, errors = time.monotonic(), []
    for row in rows_of(command, part.limit):
        place.add({"phase": part.name, "turn": f"{part.name} | {row.get('name')}", **row})
        if "error" in row:
            errors.append(f"{row['name']}: {row['error']}")
    return {"seconds": time.monotonic() - began, "errors": errors}


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """The newest row of each turn, by part, and what must be true of them."""
    found: dict[str, dict[str, Row]] = {part.name: {} for part in ALL}
    whole = {row["turn"].partition(" | ")[0]: row for row in rows if row["phase"] == "parts"}
    for row in rows:
        if row["phase"] in found:
            own = {name: value for name, value in row.items() if name not in ("phase", "turn")}
            if {"target", "floor"} <= own.keys():
                own["over_floor"] = own["target"] / own["floor"]
            found[row["phase"]][row["name"]] = own
    listed = [row for part in found.values() for row in part.values()]
    return {
        "parts": found,
        "seconds": {name: row["seconds"] for name, row in whole.items()},
        "errors": {name: row["errors"] for name, row in whole.items() if row["errors"]},
        "differences": sum(row.get("holds") is False for row in listed),
        "wrong_laws": sum(row.get("verdict") == "differs" for row in listed),
        "skipped_graphs": sum(row.get("skipped", 0) for row in listed),
        "recompiled": sum(row.get("recompiled", 0) for row in listed),
    }


def findings(summary: Mapping[str, Any], device: str) -> Findings:
    """The summary as tables."""
    tables = []
    for part in ALL:
        rows = [row for name, row in summary["parts"][part.name].items() if name not in ("begin", "compiler")]
        scale = 1000.0 if part.name == "profile" else 1.0
        lines = [[row["name"], *(_cell(row, head, scale) for head in part.heads), _note(row)] for row in rows]
        if lines:
            tables.append(Table(title=part.title, head=("", *part.heads, "note"), lines=lines))
    text = (
        f"{device}. Differences that are no ties: {summary['differences']}; laws that differ: {summary['wrong_laws']}; "
        f"graphs that the compiler skipped: {summary['skipped_graphs']}; functions compiled again: "
        f"{summary['recompiled']}; parts with errors: {len(summary['errors'])}. All five must be 0."
    )
    return Findings(tables=tables, text=text, summary=summary)


def _note(row: Row) -> str:
    """What went wrong, or why something is not possible here."""
    return str(row.get("error") or row.get("refused") or "")


def _cell(row: Row, head: str, scale: float) -> object:
    """A value as a table has it."""
    value = row.get(head, "")
    if not isinstance(value, float):
        return value
    return f"{value if head == 'over_floor' else scale * value:.4g}"


def run(out: Path | None, *, rehearse: bool = False, parts: Sequence[str] = ()) -> dict[str, Any]:
    """Run the parts and write; returns the summary.

    Args:
        parts: Names of parts to run; none: all.

    Raises:
        InputError: There is no GPU, or no part of a name.
    """
    known = {part.name: part for part in ALL}
    if unknown := [name for name in parts if name not in known]:
        raise InputError(f"unknown part {unknown[0]!r}; available: {', '.join(known)}")
    if not rehearse and not torch.cuda.is_available():
        raise InputError("this recipe needs a CUDA device, and torch finds none here; --rehearse runs it on a CPU")
    device = "A rehearsal on a CPU" if rehearse else torch.cuda.get_device_name()
    with folder(out, "gpu", {"rehearse": rehearse}) as place:

        def done(turn: Turn[Part, Part]) -> Row:
            scale = "rehearsal" if rehearse else "card"
            return run_part(place, turn.way, [sys.executable, "-m", "recipes.gpu", turn.way.name, scale])

        place.take("parts", [Turn(round=0, way=known[name], job=known[name]) for name in parts or known], done)
        summary = {"device": device, **summarise(place.rows)}
        place.finish(findings(summary, device))
        return summary


def main(
    out: options.Out = None,
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run on a CPU in the smallest size, to see that all parts work.")
    ] = False,
    parts: Annotated[str, typer.Option(help="Parts to run, with commas between them; by default all.")] = "",
) -> None:
    """Check and measure on a GPU."""
    run(out, rehearse=rehearse, parts=options.words(parts))


def go(name: str, scale: str) -> None:
    """Run a part, and print its rows."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore")
    print(json.dumps({"name": "begin", **asdict(SCALES[scale])}), flush=True)
    [part] = [part for part in ALL if part.name == name]
    for row in part.run(SCALES[scale]):
        print(json.dumps(row), flush=True)
    print(json.dumps(compiler()), flush=True)


if __name__ == "__main__":
    go(*sys.argv[1:])
