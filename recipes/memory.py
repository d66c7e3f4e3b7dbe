"""Resident memory: transformers with both models, outrider with the pair, and growth over many requests.

Every figure comes from a fresh process. It is VmRSS of /proc/self/status in MB (10^6 bytes), so the recipe needs Linux.
`python -m recipes memory` measures `transformers` (both models loaded, each generates some tokens), `outrider` (the
pair loaded, the same tokens), their `difference`, and `growth` (one engine, from the end of the warm-up to the last of
many requests in a row). Each is a median with its lowest and highest value over the repeats.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

if TYPE_CHECKING:
    # A process that measures transformers must not import outrider. So outrider is imported only inside functions.
    from outrider.bench.evidence import IntervalEstimate, Row

Part = Literal["transformers", "outrider", "growth"]

PROMPT = "Once upon a time, there was a little fox who"
NEW_TOKENS = 16
ASSETS = Path(__file__).parent.parent / "outrider" / "assets"
"""Not imported from outrider, for the same reason."""
QUICK = {"requests": 4, "warmup": 2, "repeats": 1}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The settings of every process.

    Attributes:
        requests: Requests in a row.
        warmup: Requests before the first measurement.
    """

    target: str = str(ASSETS / "target")
    draft: str = str(ASSETS / "draft")
    requests: int = 200
    warmup: int = 20
    dtype: str = "bfloat16"
    threads: int = 2


def resident() -> float:
    """VmRSS in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise OSError("/proc/self/status has no VmRSS")


def plain_transformers(plan: Plan) -> dict[str, float]:
    """Both models, each generating a few tokens."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(plan.threads)
    imported = resident()
    tokenizer = AutoTokenizer.from_pretrained(plan.target)
    places = (plan.target, plan.draft)
    models = [AutoModelForCausalLM.from_pretrained(place, dtype=plan.dtype).eval() for place in places]
    loaded = resident()
    given = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    for model in models:
        model.generate(**given, do_sample=False, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS)
    return {"imported": imported, "loaded": loaded, "worked": resident()}


def outrider_pair(plan: Plan) -> dict[str, float]:
    """The pair in an engine, generating as many tokens with speculation."""
    import torch
    from transformers.utils import logging

    import outrider

    logging.disable_progress_bar()
    torch.set_num_threads(plan.threads)
    imported = resident()
    engine = outrider.load(plan.target, drafter=f"model:path={plan.draft}", length="fixed:4", dtype=plan.dtype)
    loaded = resident()
    greedy = outrider.Sampling(temperature=0)
    engine.generate([PROMPT], max_new_tokens=NEW_TOKENS, sampling=greedy, ignore_eos=True)
    return {"imported": imported, "loaded": loaded, "worked": resident()}


def many_requests(plan: Plan) -> dict[str, float]:
    """One engine and requests in a row, with prompts of 8 to 128 tokens; the first prompt is the longest."""
    import torch
    from transformers.utils import logging

    import outrider

    logging.disable_progress_bar()
    torch.set_num_threads(plan.threads)
    engine = outrider.load(plan.target, drafter=f"model:path={plan.draft}", length="fixed:4", dtype=plan.dtype)
    dice = random.Random(0)
    warm = 0.0
    for i in range(plan.requests):
        length = dice.randint(8, 128) if i else 128
        prompt = [dice.randrange(engine.parts.target.vocab_size) for _ in range(length)]
        sampling = outrider.Sampling(temperature=float(i % 2), seed=i)
        engine.generate([prompt], max_new_tokens=NEW_TOKENS, sampling=sampling, ignore_eos=True)
        if i + 1 == plan.warmup:
            warm = resident()
    last = resident()
    return {"after_warmup": warm, "after_last": last, "growth": last - warm}


MEASURES: dict[str, Callable[[Plan], dict[str, float]]] = {
    "transformers": plain_transformers,
    "outrider": outrider_pair,
    "growth": many_requests,
}
PARTS: tuple[str, ...] = get_args(Part)


def in_fresh_process(part: str, plan: Plan) -> dict[str, float]:
    """Run one part in a process of its own."""
    program = (
        "import json, sys; from recipes import memory; "
        "print(json.dumps(memory.MEASURES[sys.argv[1]](memory.Plan(**json.loads(sys.argv[2])))))"
    )
    command = [sys.executable, "-c", program, part, json.dumps(asdict(plan))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ASSETS.parent.parent)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def spread(values: Sequence[float]) -> "IntervalEstimate":
    """Median, lowest and highest, in MB."""
    from outrider.bench.evidence import IntervalEstimate

    low, middle, high = min(values), statistics.median(values), max(values)
    return IntervalEstimate(value=round(middle, 2), low=round(low, 2), high=round(high, 2))


def summarise(raw: Sequence[dict[str, dict[str, float]]]) -> dict[str, dict[str, "IntervalEstimate"]]:
    """Each figure of each part over the repeats, and the memory that outrider needs beyond transformers."""
    found = {part: {name: spread([each[part][name] for each in raw]) for name in raw[0][part]} for part in PARTS}
    more = [each["outrider"]["worked"] - each["transformers"]["worked"] for each in raw]
    return {**found, "difference": {"worked": spread(more)}}


def run(plan: Plan, repeats: int = 3, out: Path | None = None) -> dict[str, dict[str, "IntervalEstimate"]]:
    """Measure all parts in turns, write, and return the figures."""
    from outrider.bench.folder import folder
    from outrider.bench.report import Findings, Table
    from outrider.bench.turns import Turn
    from outrider.core.types import InputError

    if plan.warmup > plan.requests:
        raise InputError(f"warmup must be <= the number of requests, {plan.requests}, got {plan.warmup}")
    for place in (plan.target, plan.draft):
        if not (Path(place) / "config.json").is_file():
            raise InputError(f"{place} is not a model's directory: it has no config.json")
    given = {**asdict(plan), "target": Path(plan.target), "draft": Path(plan.draft), "repeats": repeats}
    with folder(out, "memory", given) as here:

        def one(turn: Turn[Process, Process]) -> "Row":
            return {"part": turn.way.name, **in_fresh_process(turn.way.name, plan)}

        parts = [Process(name=part) for part in PARTS]
        rows = here.take("measured", [Turn(round=k, way=p, job=p) for k in range(repeats) for p in parts], one)
        raw = [{row["part"]: row for row in rows if row["round"] == k} for k in range(repeats)]
        figures = summarise([{part: _figures(each[part]) for part in PARTS} for each in raw])
        lines = [[part, name, each.text(".1f")] for part, own in figures.items() for name, each in own.items()]
        summary = {part: {name: asdict(each) for name, each in own.items()} for part, own in figures.items()}
        text = f"VmRSS in MB of fresh processes: median [lowest, highest] of {repeats}."
        here.finish(Findings(tables=[Table(head=("part", "when", "MB"), lines=lines)], text=text, summary=summary))
    return figures


def _figures(row: "Row") -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, float)}


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of the parts, which take turns."""

    name: str


def main(
    out: Annotated[Path | None, typer.Option(help="Folder for the results; without it nothing is written.")] = None,
    target: Annotated[Path, typer.Option(help="Directory of the target.")] = ASSETS / "target",
    draft: Annotated[Path, typer.Option(help="Directory of the draft model.")] = ASSETS / "draft",
    requests: Annotated[int, typer.Option(min=1, help="Requests in a row.")] = 200,
    warmup: Annotated[int, typer.Option(min=1, help="After how many of them the first look is taken.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Fresh processes per part.")] = 3,
    dtype: Annotated[str, typer.Option(help="What both models compute in.")] = "bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
) -> None:
    """Measure resident memory against transformers, and growth over many requests."""
    given: dict[str, Any] = {"requests": requests, "warmup": warmup, "dtype": dtype, "threads": threads}
    run(Plan(target=str(target), draft=str(draft), **given), repeats, out)
