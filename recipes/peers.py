"""Other engines on the same weights, by `outrider bench`: the same token ids, in turns, tokens compared before speeds.

`python -m recipes peers --out DIR` lets Outrider, transformers, vLLM, llama.cpp and OpenVINO GenAI decode the same
prompts: plainly and with their own speculation, one prompt at a time and eight together, at temperature 0 and 1, past
end tokens. Every engine in a process of its own has its own environment, which the recipe makes under `--environments`
when it is missing. What cannot be made or run here is left out, and the report says why. So is an engine that takes a
token which the target finds clearly less likely: it does not run the same model.

Each temperature is a measurement of its own (`outrider.bench.side_by_side`), in a folder of its own.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.engines.engine import digest
from outrider.bench.folder import Folder
from outrider.bench.side_by_side.arrivals import ClosedLoop
from outrider.bench.side_by_side.configuration import DEFAULT, named
from outrider.bench.side_by_side.page import findings
from outrider.bench.side_by_side.peers import ASSISTED, OUTSIDE, TRANSFORMERS, PeerOptions, usual_folder
from outrider.bench.side_by_side.session import BenchPlan, Measurement, measure
from outrider.bench.workloads.workload import PROMPTS
from outrider.core import files
from outrider.core.inputs import unknown
from outrider.core.types import Sampling
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.engine.generation import Generation
from outrider.setup import Setup
from recipes import options
from recipes.stand_in import PARAMETERS, build

MODELS = ("embedded", "stand-in")
DTYPES = ("bfloat16", "float32")
CONFIGURATIONS = (DEFAULT, named("suffix", {"drafter": "suffix"}))
"""Of Outrider, beside plain decoding; the default drafts with the draft model."""
SMALL = {"num_prompts": 2, "max_new_tokens": 8, "rounds": 1, "batch_sizes": "1,2"}
QUICK = {"peers": "transformers", "temperatures": "0", **SMALL}


def setup_of(model: str, dtype: str, environments: Path, threads: int) -> Setup:
    """Target and draft model; the stand-in is written beside the environments, once."""
    for value, known, what in ((model, MODELS, "model"), (dtype, DTYPES, "dtype")):
        if value not in known:
            raise unknown(what, value, known)
    target = EMBEDDED_TARGET
    if model != MODELS[0]:
        target = environments / "models" / f"{digest(EMBEDDED_TARGET / 'model.safetensors')}-stand-in-{PARAMETERS}"
        if not target.exists():
            with files.replaced(target) as fresh:
                build(fresh)
    return Setup(target=str(target), drafter=f"model:path={EMBEDDED_DRAFT}", dtype=dtype, threads=threads)


def main(
    environments: Annotated[
        Path, typer.Option(help="Folder of the peers' environments and models, several GB.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    out: options.Out = None,
    peers: Annotated[str, typer.Option(help="Names with commas.")] = ",".join((TRANSFORMERS, *OUTSIDE)),
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = MODELS[0],
    prompts: options.Prompts = PROMPTS,
    num_prompts: options.NumPrompts = 16,
    max_new_tokens: options.MaxNewTokens = 96,
    threads: options.Threads = 2,
    rounds: options.Rounds = 3,
    batch_sizes: Annotated[str, typer.Option(help="Prompts at once, with commas.")] = "1,8",
    temperatures: Annotated[str, typer.Option(help="With commas.")] = "0,1",
    draft_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a draft of the peers.")] = 5,
    dtype: Annotated[str, typer.Option(help=f"What all compute in: {' or '.join(DTYPES)}.")] = DTYPES[0],
) -> None:
    """Compare Outrider with other engines on the same weights."""
    sizes, warm = options.whole_numbers("--batch-sizes", batch_sizes), options.numbers("--temperatures", temperatures)
    plan = BenchPlan(
        setup=setup_of(model, dtype, environments, threads),
        configurations=CONFIGURATIONS,
        generation=Generation(max_new_tokens=max_new_tokens, ignore_eos=True),
        workload=str(prompts),
        num_prompts=num_prompts,
        loads=tuple(ClosedLoop(concurrency=size) for size in sizes),
        rounds=rounds,
        peers=PeerOptions(names=names_of(peers), environments=environments, make=True, draft_tokens=draft_tokens),
        out=out,
    )
    for each in at_temperatures(plan, warm):
        measure(each, finish=_told)


def names_of(peers: str) -> tuple[str, ...]:
    """The peers of a text. With transformers comes its own speculation, which takes one prompt at a time.

    Example:
        >>> names_of("transformers, llama")
        ('transformers', 'assisted', 'llama')
    """
    names = map(str.strip, peers.split(","))
    return tuple(name for each in names for name in ((each, ASSISTED) if each == TRANSFORMERS else (each,)))


def at_temperatures(plan: BenchPlan, temperatures: Sequence[float]) -> list[BenchPlan]:
    """The same measurement at each temperature, in a folder of its own."""
    return [
        replace(
            plan,
            generation=replace(plan.generation, sampling=Sampling(temperature=each)),
            out=None if plan.out is None else plan.out / f"temperature-{each:g}",
        )
        for each in temperatures
    ]


def _told(found: Measurement, place: Folder) -> None:
    place.finish(findings(found))
