"""Every command once on real models, with its defaults but for smaller batches of training: time, memory, silence.

`make real` fetches SmolLM2-135M-Instruct and the pair of Qwen2.5-Coder 1.5B and 0.5B, makes the environments of the
other engines where they are missing, and runs the commands on a terminal as a user does, with a cache of Outrider's own
that is empty at first. All are given as GGUF files, and what is trained, exported and opened as SmolLM2's folder too;
`--pair-folders` gives the pair's folders in bfloat16 instead, of which a token takes three times as long.

A command that ends with another status than 0 is shown with its last lines, and makes the recipe end with status 1.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.engines import llama
from outrider.bench.engines.environments import CannotMake
from outrider.bench.folder import folder as results
from outrider.bench.report import Findings, Table
from outrider.bench.side_by_side.peers import OUTSIDE, usual_folder
from outrider.core.types import InputError
from recipes import options
from recipes.command_run import CommandRun, run, served
from recipes.opening import DEFAULT, READING
from recipes.real_models import chosen, fetched, models_folder, unpacked

QUESTIONS = ("Write a Python function that reverses a string.", "What is 12 times 9?", "Name three colours.")
PROMPT = "def quicksort(arr):"
PARTS = ("models", "engines", "smollm2", "pair")
"""What the recipe consists of."""
ENGINES = ("llama", "openvino", "vllm")
SILENT = 5.0
"""Seconds without a line or a bar that are too many."""
OUTRIDER = (sys.executable, "-m", "outrider")
OPENING = "start and memory"
SHOWN = 12
"""Lines of a command's output that are shown where it failed."""
QUICK = {"parts": "smollm2", "only": "generate"}


def asked_by_openai(url: str) -> str:
    """The answer to a question, streamed to OpenAI's client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    name = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": QUESTIONS[1]}], max_tokens=48, temperature=0, stream=True
    )
    return "".join(piece.choices[0].delta.content or "" for piece in stream if piece.choices)


def asked_by_check(folder: Path) -> Callable[[str], str]:
    """The smoke test of an export, against a server."""

    def ask(url: str) -> str:
        command = [sys.executable, str(folder / "check.py"), "--url", url]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    return ask


def decoding(given: Sequence[str], prompt: str) -> Iterator[tuple[str, list[str], str]]:
    """The commands that decode with a target and a drafter: name, command, and what is typed into it."""
    yield "generate", [*OUTRIDER, "generate", *given, "--prompt", prompt], ""
    yield "prepare", [*OUTRIDER, "prepare", *given], ""
    yield "generate, prepared", [*OUTRIDER, "generate", *given, "--prompt", prompt], ""
    yield "generate --compare", [*OUTRIDER, "generate", *given, "--prompt", prompt, "--compare"], ""
    yield "generate --profile", [*OUTRIDER, "generate", *given, "--prompt", prompt, "--profile"], ""
    yield "chat", [*OUTRIDER, "chat", *given], "\n".join(QUESTIONS) + "\n"
    yield "doctor", [*OUTRIDER, "doctor", *given], ""
    yield "prove", [*OUTRIDER, "prove", *given], ""
    yield "plan", [*OUTRIDER, "plan", *given], ""


def training(target: Path, work: Path) -> Iterator[tuple[str, list[str], str]]:
    """The commands that make drafters for a target."""
    answers, head, draft, better = (work / name for name in ("answers.jsonl", "head", "draft", "better"))
    prompts = work / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS * 4), encoding="utf-8")
    given = ["--target", str(target)]
    learnt = [*given, "--data", str(answers)]
    yield "train data", [*OUTRIDER, "train", "data", *given, "--data", str(prompts), "--out", str(answers)], ""
    # A head's loss is over the whole vocabulary: on two cores a step of the default batch, 32 rows, takes a minute.
    few = ["--steps", "20", "--batch-size", "4"]
    yield (
        "train eagle3 --steps 20 --batch-size 4",
        [*OUTRIDER, "train", "eagle3", *learnt, "--out", str(head), *few],
        "",
    )
    yield "prune shape", [*OUTRIDER, "prune", "shape", *learnt, "--layers", "6", "--out", str(draft)], ""
    distill = ["train", "distill", *given, "--drafter", str(draft), "--data", str(answers), "--out", str(better)]
    yield "train distill --steps 20 --batch-size 4", [*OUTRIDER, *distill, *few], ""


def exports(target: Path, work: Path, pythons: Mapping[str, Path]) -> Iterator[tuple[str, list[str], str]]:
    """Exports of what was trained, each with its check where the engine needs no server."""
    out, given = work / "exports", ["--target", str(target)]
    out.mkdir(exist_ok=True)
    draft = [*given, "--drafter", f"model:path={work / 'better'}"]
    export = [*OUTRIDER, "export", "--dtype", "float32", "--to"]
    check = ["--check", "--engine-python"]
    own = [*export, "transformers", *draft, "--out", str(out / "transformers"), *check, sys.executable]
    yield "export --to transformers --check", own, ""
    if "vllm" in pythons:
        head = [*export, "vllm", *given, "--drafter", str(work / "head"), "--out", str(out / "vllm")]
        yield "export --to vllm --check", [*head, "--check", "--vllm-python", str(pythons["vllm"])], ""
    if "openvino" in pythons:
        there = [*export, "openvino", *draft, "--out", str(out / "openvino"), *check, str(pythons["openvino"])]
        yield "export --to openvino --check", there, ""


def by_llama(target: Path, work: Path, environments: Path, *, limit: float) -> Iterator[CommandRun]:
    """The export to llama.cpp, converted by its own script, and its check by its server."""
    out = work / "exports" / "llama"
    given = ["--target", str(target), "--drafter", f"model:path={work / 'better'}", "--dtype", "float32"]
    environment = OUTSIDE["llama"].environment
    assert environment is not None
    room = environment.ready(environments)
    server = llama.server_of(room)
    convert = ["--llama-cpp", str(room.place / llama.SCRIPTS), "--engine-python", sys.executable]
    command = [*OUTRIDER, "export", "--to", "llama.cpp", *given, "--out", str(out), *convert]
    yield run("export --to llama.cpp", "smollm2", command, limit=limit)
    start: list[str | Path] = [server, "-m", out / "target.gguf", "-md", out / "draft.gguf"]
    start += ["--spec-type", "draft-simple", "--spec-draft-n-max", "5", "-np", "1"]
    yield served("check.py, llama.cpp's server", "smollm2", start, asked_by_check(out), limit=limit)


def environments_of(folder: Path) -> tuple[dict[str, Path], list[CommandRun]]:
    """The Python of each other engine, and how long its environment took; engines that cannot be made are left out."""
    pythons, made = {}, []
    for name in ENGINES:
        environment, began = OUTSIDE[name].environment, time.monotonic()
        assert environment is not None
        print(f"{name}: its environment", flush=True)
        said, status = [], 0
        try:
            pythons[name] = environment.ready(folder).python
        except CannotMake as error:
            said, status = [str(error)], 1
        seconds = time.monotonic() - began
        made.append(
            CommandRun(
                name=f"environment of {name}", model="", status=status, seconds=seconds, memory=0, silence=0, said=said
            )
        )
    return pythons, made


def findings(runs: Sequence[CommandRun]) -> Findings:
    """The table, and what went wrong."""
    head = ("command", "model", "status", "seconds", "peak memory, GB", "longest silence, s")
    lines = [
        [
            each.name,
            each.model,
            str(each.status),
            f"{each.seconds:.1f}",
            f"{each.memory / 1e9:.2f}",
            f"{each.silence:.1f}",
        ]
        for each in runs
    ]
    failed = [each.name for each in runs if each.status]
    silent = [each.name for each in runs if each.silence > SILENT]
    text = f"{len(runs)} commands, {sum(each.seconds for each in runs) / 60:.1f} minutes. "
    text += (
        f"Ended badly: {', '.join(failed) or 'none'}. Silent for more than {SILENT:g} s: {', '.join(silent) or 'none'}."
    )
    return Findings(tables=[Table(head=head, lines=lines)], text=text)


def main(
    out: options.Out = None,
    models: Annotated[
        Path, typer.Option(help="Where models are kept; by default in the user's cache.", show_default=False)
    ] = models_folder(),  # noqa: B008
    environments: Annotated[
        Path, typer.Option(help="Folder of the engines' environments, several GB.", show_default=False)
    ] = usual_folder(),  # noqa: B008
    parts: Annotated[str, typer.Option(help=f"Of {', '.join(PARTS)}, with commas.")] = ",".join(PARTS),
    only: Annotated[str, typer.Option(help="Run only commands that begin so.")] = "",
    pair_folders: Annotated[bool, typer.Option("--pair-folders", help="Give the pair as folders in bfloat16.")] = False,
    limit: Annotated[float, typer.Option(help="Minutes after which a command is stopped.")] = 20,
) -> None:
    """Run the commands, and print the table."""
    wanted = chosen(parts)
    if unknown := [part for part in wanted if part not in PARTS]:
        raise InputError(f"unknown part {unknown[0]!r}; available: {', '.join(PARTS)}")
    with results(out, "real", {"parts": parts, "only": only, "pair_folders": pair_folders}) as place:
        with tempfile.TemporaryDirectory() as work:
            found = []
            for each in all_runs(Path(work), models, environments, wanted, only, pair_folders, 60 * limit):
                state = "ended well" if each.status == 0 else f"ended with status {each.status}"
                print(f"{each.name} ({each.model}): {state} after {each.seconds:.0f} s", flush=True)
                if each.status or each.name == OPENING:
                    print("\n".join(f"    {line}" for line in each.said[-SHOWN:]), flush=True)
                place.add(dataclasses.asdict(each) | {"phase": "commands", "turn": f"{each.model} {each.name}"})
                found.append(each)
        place.finish(findings(found))
    if any(each.status for each in found):
        raise typer.Exit(1)


def all_runs(
    work: Path, folder: Path, environments: Path, parts: Sequence[str], only: str, pair_folders: bool, limit: float
) -> Iterator[CommandRun]:
    """The commands of the wanted parts, one after the other."""
    # Outrider's own cache is empty at first, as it is for a new user.
    os.environ["OUTRIDER_CACHE"] = str(work / "cache")
    small = fetched("smollm2", folder)
    pythons: dict[str, Path] = {}
    if "engines" in parts:
        pythons, made = environments_of(environments)
        yield from made
    if "smollm2" in parts:
        given = ["--target", str(small)]
        commands = [*decoding(given, PROMPT), opened([unpacked("smollm2", folder)], [READING, DEFAULT], rounds=3)]
        commands += [benched(given, work, environments, pythons)]
        commands += [*training(small, work), *exports(unpacked("smollm2", folder), work, pythons)]
        yield from each_run("smollm2", commands, only, limit)
        if only in ("", "serve"):
            yield served("serve, and a client", "smollm2", [*OUTRIDER, "serve", *given], asked_by_openai, limit=limit)
        if "llama" in pythons and not only:
            yield from by_llama(unpacked("smollm2", folder), work, environments, limit=limit)
    if "pair" in parts:
        pair = [(unpacked if pair_folders else fetched)(name, folder) for name in ("coder-1.5b", "coder-0.5b")]
        given = ["--target", str(pair[0]), "--drafter", f"model:path={pair[1]}"]
        commands = [*decoding(given, PROMPT), opened(pair, [DEFAULT], rounds=1)]
        commands += [benched(given, work / "pair", environments, {})]
        yield from each_run("coder pair", commands, only, limit)
        if only in ("", "serve"):
            yield served(
                "serve, and a client", "coder pair", [*OUTRIDER, "serve", *given], asked_by_openai, limit=limit
            )


def each_run(
    model: str, commands: Sequence[tuple[str, list[str], str]], only: str, limit: float
) -> Iterator[CommandRun]:
    """Run commands one after the other."""
    for name, command, typed in commands:
        if name.startswith(only):
            print(f"{name} ({model}) ...", flush=True)
            yield run(name, model, command, typed=typed, limit=limit)


def opened(models: Sequence[Path], ways: Sequence[str], *, rounds: int) -> tuple[str, list[str], str]:
    """Seconds and memory of opening a target, and a draft model beside it.

    transformers takes a minute to unpack the files of the pair, so that these are opened in few ways.
    """
    given = [f"--{role}={model}" for role, model in zip(("target", "draft"), models, strict=False)]
    given += ["--rounds", str(rounds), "--ways", ",".join(ways)]
    return OPENING, [sys.executable, "-m", "recipes", "opening", *given], ""


def benched(
    given: Sequence[str], work: Path, environments: Path, pythons: Mapping[str, Path]
) -> tuple[str, list[str], str]:
    """`outrider bench`, beside the engines that are here."""
    peers = ["transformers", *(name for name in ("llama", "openvino") if name in pythons)]
    own = ["--peers", ",".join(peers), "--environments", str(environments), "--out", str(work / "bench")]
    return "bench --peers " + ",".join(peers), [*OUTRIDER, "bench", *given, *own], ""
