"""What an engine should say with an exported drafter, measured here; and the check that runs there."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import outrider
from outrider.bench.workloads.choice import choose
from outrider.bench.workloads.workload import BUILT_IN, read_workload
from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.engine.engine import Engine
from outrider.handoff.engines import KNOWN
from outrider.handoff.exported_drafter import OWN, ExportedDrafter
from outrider.handoff.order import ExportRequest
from outrider.handoff.source import Source

EXPECTED, CHECK, ENGINE = "expected.json", "check.py", "engine.py"
"""The files of the smoke test: what is expected, what compares, and what decodes with the engine."""
GREEDY = Sampling(temperature=0.0)
LENGTH = 12
"""Tokens of a prompt where there is no tokenizer to write one."""


def engine_of(order: ExportRequest, source: Source, folder: Path, drafter: ExportedDrafter) -> Engine:
    """An engine with the drafter that was written, as Outrider reads it."""
    return outrider.load(
        source.target,
        drafter=str(folder) if drafter.has_files else drafter.name,
        length=f"fixed:{drafter.length}",
        tokenizer=source.tokenizer,
        ignore_generation_config=True,
        max_slots=min(8, order.prompts),
        probe=False,
        forward="eager",
    )


def prompts_of(order: ExportRequest, engine: Engine) -> list[list[int]]:
    """Prompts for a target: those that ship with Outrider, or numbers where it has no tokenizer."""
    if engine.tokenizer is None:
        width = engine.parts.target.vocab_size
        return [[(7 * i + 3 * k * k + 5) % width for k in range(LENGTH)] for i in range(order.prompts)]
    longest = engine.parts.target.max_context - order.new_tokens - 16
    every = read_workload(BUILT_IN).conversations
    prompts = {each.id: engine.encode(each.opening) for each in every}
    fitting = [each for each in every if 0 < len(prompts[each.id]) <= longest]
    if len(fitting) < order.prompts:
        raise InputError(
            f"{order.prompts} prompts were asked for, but only {len(fitting)} of those that ship with Outrider have at "
            f"most {longest} tokens; ask for fewer prompts or fewer new tokens"
        )
    return [prompts[each.id] for each in choose(fitting, order.prompts)]


def expected(order: ExportRequest, drafter: ExportedDrafter, engine: Engine | None) -> dict[str, Any]:
    """The content of `expected.json`.

    An output ends with its first end token, because some engines can say nothing behind one. Where the other engine's
    forward of a prompt says the first token, the steps are counted from the second token on.

    Args:
        engine: None where nothing is measured.
    """
    record = {
        "engine": order.to,
        "method": drafter.method,
        "target": drafter.target,
        "dtype": drafter.dtype,
        "num_speculative_tokens": drafter.length,
        "engine_options": options_of(order, drafter),
        "new_tokens": order.new_tokens,
    }
    if engine is None:
        return {**record, "prompts": [], "tokens": []}
    prompts = prompts_of(order, engine)
    plain = engine.plain().generate(prompts, max_new_tokens=order.new_tokens, sampling=GREEDY)
    engine.rest()
    begun, count, undrafted = [list(prompt) for prompt in prompts], order.new_tokens, 0
    if KNOWN[order.to].digests_first and count > 1:
        if engine.parts.drafter.taps:
            # The first step of a drafter that reads hidden states has no draft, and emits that token.
            undrafted = 1
        else:
            # An output of one token was said by that forward.
            begun = [
                [*prompt, out.tokens[0]] for prompt, out in zip(prompts, plain, strict=True) if len(out.tokens) > 1
            ]
            count -= 1
    drafted = engine.generate(begun, max_new_tokens=count, sampling=GREEDY)
    steps = sum(out.num_steps - undrafted for out in drafted)
    tokens = sum(len(out.tokens) - undrafted for out in drafted)
    accepted = sum(out.num_accepted_tokens for out in drafted)
    proposed = sum(out.num_draft_tokens for out in drafted)
    return {
        **record,
        "prompts": prompts,
        "tokens": [list(out.tokens) for out in plain],
        "steps": steps,
        "verified_tokens": tokens,
        "tokens_per_step": tokens / steps if steps else 1.0,
        "acceptance_rate": accepted / max(1, proposed),
    }


def options_of(order: ExportRequest, drafter: ExportedDrafter) -> Mapping[str, Any]:
    """What the check tells the engine of the drafter."""
    if order.to == "vllm":
        return drafter.speculative()
    if drafter.method == "custom_generate":
        return {"drafter": f"{drafter.name}:path={OWN}" if drafter.has_files else drafter.name}
    return {}


def scripts(to: str, *, measured: bool) -> dict[str, str]:
    """The programs that run in the engine's environment, by the names of their files.

    Args:
        measured: Whether there is anything to compare. Without it, only what starts the engine is needed.
    """
    names = {CHECK: "check.py"} if measured else {}
    if measured or not KNOWN[to].serves:
        names[ENGINE] = KNOWN[to].check
    place = files("outrider.handoff.checks")
    return {name: place.joinpath(source).read_text(encoding="utf-8") for name, source in names.items()}


def run_check(folder: Path, python: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run the smoke test of an export in an engine's environment.

    Raises:
        InputError: There is no such Python.
    """
    if not python.is_file():
        raise InputError(f"there is no Python {python}; give the interpreter of the engine's environment")
    # vLLM's CPU build wants this OpenMP library before any other.
    library = sorted(python.parents[1].glob("lib/libiomp5.so"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if library:
        environment["LD_PRELOAD"] = str(library[0])
    command = [str(python), str(folder / CHECK), *arguments]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
