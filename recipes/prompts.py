"""Reading a long prompt: the engine without a drafter beside `model.generate`, in seconds and in memory.

`python -m recipes prompts --out DIR` makes a Llama of six layers with random weights, 256 wide, and reads prompts of
1,024, 4,096 and 16,384 tokens in float32 and bfloat16, until the first new token. Seconds come from one process in
which both ways take turns; the figure is the median over turns. Memory is the most that a process of its own held while
it read, less what it held before. The recipe needs Linux.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider.bench.evidence import Row
from outrider.bench.folder import folder
from outrider.bench.report import Findings, Table
from outrider.bench.turns import Turn
from outrider.core.types import InputError
from recipes import options
from recipes.startup import ROOT

TIME, MEMORY = 1.1, 1.2
"""Goals: how many times what `generate` takes, at most."""
ENGINE, GENERATE = "engine", "generate"
DTYPES = ("float32", "bfloat16")
QUICK = {"lengths": "64", "dtypes": "float32", "turns": 1}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A prompt.

    Attributes:
        tokens: Its length.
        dtype: What the model computes in.
    """

    tokens: int
    dtype: str

    @property
    def name(self) -> str:
        """Unique among the jobs."""
        return f"{self.tokens} tokens, {self.dtype}"


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a process measures: `seconds` of both ways, or the memory of one of them."""

    name: str


def model_of(job: Job) -> LlamaForCausalLM:
    """The model, whose context has room for the prompt."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=job.tokens + 64,
        eos_token_id=None,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config).to(getattr(torch, job.dtype)).eval()


def ways(job: Job) -> dict[str, Callable[[Sequence[int]], Any]]:
    """Each way to read a prompt and to say one token."""
    model = model_of(job)
    engine = outrider.load(model, drafter="none")
    greedy = outrider.Sampling(temperature=0)

    def by_engine(prompt: Sequence[int]) -> list[int]:
        # A slot that is still warm would know the prompt.
        engine.rest()
        return engine.generate([list(prompt)], max_new_tokens=1, sampling=greedy)[0].tokens

    def by_generate(prompt: Sequence[int]) -> list[int]:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, pad_token_id=0
        )
        return cast(torch.Tensor, found)[0, len(prompt) :].tolist()

    return {ENGINE: by_engine, GENERATE: by_generate}


def status(name: str) -> float:
    """A figure of /proc/self/status in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError(f"/proc/self/status has no {name}")


def measure(part: str, job: Job, turns: int, threads: int) -> Row:
    """Run by a fresh process."""
    torch.set_num_threads(threads)
    prompt = [(place * 7919 + 11) % 8192 for place in range(job.tokens)]
    named = ways(job)
    if part != "seconds":
        # A few tokens import and allocate what every prompt needs.
        named[part](prompt[:32])
        before = status("VmRSS")
        named[part](prompt)
        return {"megabytes": status("VmHWM") - before}
    seconds: dict[str, list[float]] = {way: [] for way in named}
    for turn in range(-1, turns):
        for way in [*named][:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            named[way](prompt)
            if turn >= 0:
                seconds[way].append(time.perf_counter() - began)
    return {"seconds": seconds}


def process(part: str, job: Job, turns: int, threads: int) -> Row:
    """The row of a fresh process."""
    around = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
    around["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    asked = json.dumps({"part": part, "job": asdict(job), "turns": turns, "threads": threads})
    program = (
        "import json, sys; from recipes import prompts; asked = json.loads(sys.argv[1]); "
        "print(json.dumps(prompts.measure(**{**asked, 'job': prompts.Job(**asked['job'])})))"
    )
    command = [sys.executable, "-c", program, asked]
    done = subprocess.run(command, cwd=ROOT, env=around, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a process failed: {done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def summarise(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each prompt: what both ways take, and the engine's share of what `generate` takes."""
    found = []
    for tokens, dtype in dict.fromkeys((row["tokens"], row["dtype"]) for row in rows):
        own = {row["part"]: row for row in rows if (row["tokens"], row["dtype"]) == (tokens, dtype)}
        seconds = {way: statistics.median(each) for way, each in own["seconds"]["seconds"].items()}
        memory = {way: own[way]["megabytes"] for way in (ENGINE, GENERATE)}
        found.append(
            {
                "tokens": tokens,
                "dtype": dtype,
                "seconds": seconds,
                "megabytes": memory,
                "time": seconds[ENGINE] / seconds[GENERATE],
                "memory": memory[ENGINE] / memory[GENERATE],
            }
        )
    return found


def findings(entries: Sequence[Mapping[str, Any]]) -> Findings:
    """A line for each prompt."""
    head = ("tokens", "dtype", "engine, s", "generate, s", "time", "engine, MB", "generate, MB", "memory")
    lines = [
        [
            e["tokens"],
            e["dtype"],
            *(f"{e['seconds'][way]:.3f}" for way in (ENGINE, GENERATE)),
            f"{e['time']:.2f}",
            *(f"{e['megabytes'][way]:.0f}" for way in (ENGINE, GENERATE)),
            f"{e['memory']:.2f}",
        ]
        for e in entries
    ]
    text = (
        f"The engine takes at most {max(e['time'] for e in entries):.2f} times as long as generate (goal {TIME}) and "
        f"{max(e['memory'] for e in entries):.2f} times its memory (goal {MEMORY})."
    )
    return Findings(tables=[Table(head=head, lines=lines)], text=text, summary={"entries": list(entries)})


def run(
    out: Path | None,
    *,
    lengths: str = "1024,4096,16384",
    dtypes: str = "float32,bfloat16",
    turns: int = 7,
    threads: int = 2,
) -> list[dict[str, Any]]:
    """Measure and write; returns an entry per prompt."""
    given = dict(locals())
    kinds = [name.strip() for name in dtypes.split(",")]
    if wrong := [name for name in kinds if name not in DTYPES]:
        raise InputError(f"--dtypes must be {' or '.join(DTYPES)}, with commas between them, got {wrong[0]!r}")
    jobs = [
        Job(tokens=tokens, dtype=dtype) for dtype in kinds for tokens in options.whole_numbers("--lengths", lengths)
    ]
    parts = [Part(name=name) for name in ("seconds", ENGINE, GENERATE)]
    with folder(out, "prompts", given) as place:

        def measured(turn: Turn[Part, Job]) -> Row:
            head = {**asdict(turn.job), "part": turn.way.name}
            return {**head, **process(turn.way.name, turn.job, turns, threads)}

        rows = place.take("measured", [Turn(round=0, way=part, job=job) for job in jobs for part in parts], measured)
        entries = summarise(rows)
        place.finish(findings(entries))
        return entries


def main(
    out: options.Out = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "1024,4096,16384",
    dtypes: Annotated[str, typer.Option(help="What the model computes in: float32, bfloat16.")] = "float32,bfloat16",
    turns: Annotated[int, typer.Option(min=1, help="How often each way reads a prompt.")] = 7,
    threads: options.Threads = 2,
) -> None:
    """Measure how long prompts are read, beside model.generate."""
    run(out, lengths=lengths, dtypes=dtypes, turns=turns, threads=threads)
