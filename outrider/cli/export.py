"""outrider export: hand a drafter to another engine. Imports nothing heavy."""

import sys
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.core import progress
from outrider.core.inputs import InputError, unknown
from outrider.drafters.exports import ENGINES

if TYPE_CHECKING:
    from outrider.handoff.export import Exported
else:
    Exported = object

SERVERS = ("sglang", "llama.cpp")
"""Engines whose smoke test asks a server."""
CONVERTER = "convert_hf_to_gguf.py"
"""llama.cpp's own program that converts models."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What is exported, and where to.

    Attributes:
        to: The engine: vllm, sglang, llama.cpp, openvino or transformers.
        out: The folder that is written; it must be new or empty.
        target: Directory, GGUF file or hub id of the target. By default the one that ships with Outrider.
        drafter: The drafter, as `name:path=...` or its folder; with --dry-run its name, such as eagle3. By default
            `suffix`, and without a target the draft model that ships with Outrider.
        plan: A file with what `outrider plan --json` printed: draft lengths by batch size, and what is lost.
        verifier_id: Public name of the target for the written files, such as org/name. By default the target, if it is
            a hub id.
        dtype: The dtype of the written weights: `auto` (the target's), `float32`, `bfloat16` or `float16`.
        num_speculative_tokens: Draft tokens of a step. By default the plan's, or as many as the drafter guesses, or 5.
        dry_run: Write an untrained drafter, to try the path before days of training.
        check: Run the smoke test in the engine's environment; exit status 1 if it fails.
        check_url: Run the smoke test against a server of the engine at this address.
        vllm_python: The Python of vLLM's environment, for --check. --engine-python is the same for other engines.
        engine_python: The Python of the engine's environment, for --check and --llama-cpp.
        llama_cpp: llama.cpp's folder; both models are converted at once.
        measure: Measure what the smoke test expects, and what is lost.
        prompts: How many prompts that takes.
        new_tokens: How many tokens each output has.
        device: `cpu`, `cuda`, `cuda:1`. By default the GPU if there is one.
        revision: Branch, tag or commit of the target's hub id.
        trust_remote_code: Allow transformers to run code that comes with the target.
    """

    to: str | None = None
    out: Path | None = None
    target: str | None = None
    drafter: str | None = None
    plan: Path | None = None
    verifier_id: str | None = None
    dtype: str = "auto"
    num_speculative_tokens: int | None = None
    dry_run: bool = False
    check: bool = False
    check_url: str | None = None
    vllm_python: Path | None = None
    engine_python: Path | None = None
    llama_cpp: Path | None = None
    measure: bool = True
    prompts: int = 4
    new_tokens: int = 48
    device: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False


def export(options: ExportOptions, as_json: bool) -> int:
    """Write the folder, print the launch command and what is lost, and run the smoke test if that was asked for."""
    if options.to is None or options.out is None:
        raise InputError(f"give --to ({', '.join(ENGINES)}) and --out, the folder that is written")
    if options.to not in ENGINES:
        raise unknown("engine", options.to, ENGINES)
    python = _python(options)
    if options.llama_cpp is not None and options.to != "llama.cpp":
        raise InputError(f"--llama-cpp goes with --to llama.cpp, got --to {options.to}")
    if options.llama_cpp is not None and not (options.llama_cpp / CONVERTER).is_file():
        raise InputError(f"there is no {CONVERTER} in {options.llama_cpp}; give llama.cpp's folder")
    with progress.importing():
        from outrider.cli.opened import tell_loading
    from outrider.cli.printed import print_json
    from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
    from outrider.handoff.export import export as written
    from outrider.handoff.order import ExportRequest
    from outrider.handoff.smoke import run_check
    from outrider.handoff.source import as_folder

    if options.target is None and options.drafter is None:
        target, drafter = str(EMBEDDED_TARGET), "model" if options.dry_run else str(EMBEDDED_DRAFT)
    else:
        target, drafter = options.target or str(EMBEDDED_TARGET), options.drafter or "suffix"
    given = {each.name: getattr(options, each.name) for each in fields(ExportRequest)}
    order = ExportRequest(**given | {"target": target, "drafter": drafter})
    tell_loading()
    with progress.shown(f"writing the export for {options.to}"):
        exported = written(order)
    if as_json:
        print_json(exported.values())
    else:
        _print(exported)
    if options.llama_cpp is not None:
        from outrider.handoff.convert import convert

        with progress.shown("converting with llama.cpp's script"):
            convert(
                order, exported.drafter, options.llama_cpp / CONVERTER, options.engine_python or Path(sys.executable)
            )
    if python is None:
        return 0
    with tempfile.TemporaryDirectory() as room, progress.shown(f"checking the export with {options.to}"):
        # The room is for the weights of a GGUF file, if the engine reads none.
        where = ["--target", as_folder(target, options.to, Path(room))] if options.check_url is None else None
        done = run_check(order.out, python, where or ["--url", str(options.check_url)])
    print(done.stdout, end="", file=sys.stdout if done.returncode == 0 else sys.stderr)
    return 1 if done.returncode else 0


def _python(options: ExportOptions) -> Path | None:
    """The Python that runs the smoke test; None where it is not run."""
    python = options.vllm_python or options.engine_python
    if options.vllm_python is not None and options.to != "vllm":
        raise InputError(f"--vllm-python goes with --to vllm, got --to {options.to}; give --engine-python")
    if (options.check or options.check_url is not None) and not options.measure:
        raise InputError("the smoke test compares what was measured here; leave out --no-measure")
    if options.check_url is not None:
        # The smoke test then needs Python alone.
        return Path(sys.executable)
    if not options.check:
        return None
    if options.to in SERVERS:
        raise InputError(f"{options.to} is checked by its server; start it, and give --check-url with its address")
    if python is None:
        name = "--vllm-python" if options.to == "vllm" else "--engine-python"
        raise InputError(f"--check runs in {options.to}'s environment; give its Python with {name}")
    if not python.is_file():
        raise InputError(f"there is no Python {python}; give the interpreter of {options.to}'s environment")
    return python


def _print(exported: "Exported") -> None:
    """The result for people."""
    drafter, expected = exported.drafter, exported.expected
    drawn = ", with weights drawn at random" if exported.order.dry_run else ""
    print(
        f"{exported.order.out}: a drafter of the kind {drafter.name} for {exported.order.to} ({drafter.method}){drawn}"
    )
    if "tokens_per_step" in expected:
        print(
            f"measured here at temperature 0: {expected['tokens_per_step']:.2f} tokens per step with drafts of "
            f"{drafter.length} tokens"
        )
    print(f"\nstart it with `sh {exported.order.out / 'launch.sh'}`:")
    print("\n".join(f"  {line}" for line in exported.command[2:]))
    print("\nwhat is lost:")
    print("\n".join(f"- {line}" for line in exported.losses))
