"""outrider generate: stream one prompt, or run many, and say what was measured."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from outrider.bench.compare import Comparison, compare
from outrider.cli import options
from outrider.cli.options import Setup
from outrider.constraints.grammar import Grammar
from outrider.engine.engine import Engine
from outrider.engine.output import Output, succeeded
from outrider.engine.prompts import Prompt
from outrider.load import ASSETS
from outrider.proof.gate import gate
from outrider.types import InputError, Sampling, Step


def generate(
    prompt: Annotated[list[str] | None, typer.Option(help="The text to continue; may be given several times.")] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="A text file (one prompt), or JSON lines with `prompt` or `turns`.")
    ] = None,
    target: options.Target = None,
    drafter: options.Drafter = None,
    tree: options.Tree = "chain",
    verifier: options.Verifier = None,
    length: options.Length = None,
    decoding: options.Decoding = "step",
    allow_lossy: options.AllowLossy = False,
    max_new_tokens: options.MaxNewTokens = 128,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repetition_penalty: options.RepetitionPenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    json_schema: options.JsonSchema = None,
    regex: options.Regex = None,
    grammar: options.GrammarFile = None,
    n: Annotated[int, typer.Option("-n", help="Outputs per prompt.")] = 1,
    seed: options.Seed = None,
    batch_size: options.BatchSize = 8,
    max_context: options.MaxContext = None,
    compile: options.Compile = False,
    prepack: options.Prepack = None,
    device: options.Device = None,
    dtype: options.Dtype = "auto",
    attn_implementation: options.Attention = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    profile: Annotated[bool, typer.Option("--profile", help="Print where the time of a step goes.")] = False,
    with_plain: Annotated[
        bool, typer.Option("--compare", help="Also decode plainly, and print the measured speedup.")
    ] = False,
) -> None:
    """Continue a prompt, with exactly the target's law, in fewer forwards of the target."""
    prompts = _prompts(prompt, prompt_file)
    constraint = options.constraint(json_schema, regex, grammar)
    if constraint is not None and with_plain:
        raise InputError("--compare measures decoding without a grammar; leave out --compare or the grammar")
    engine = Setup(
        target=target,
        drafter=drafter,
        tree=tree,
        verifier=verifier,
        length=length,
        decoding=decoding,
        allow_lossy=allow_lossy,
        device=device,
        dtype=dtype,
        attn_implementation=attn_implementation,
        revision=revision,
        trust_remote_code=trust_remote_code,
        batch_size=batch_size,
        max_context=max_context,
        compile=compile,
        prepack=prepack,
    ).engine()
    settings = options.sampling(
        engine.sampling,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        seed=seed,
    )
    steps: list[Step] = []
    if len(prompts) == 1 and n == 1 and not as_json:
        outputs = [_stream(engine, prompts[0], settings, max_new_tokens, stop or [], constraint, steps)]
    else:
        outputs = _run(engine, prompts, settings, max_new_tokens, stop or [], constraint, n, as_json)
        steps = [step for output in outputs for step in output.steps]
    report: dict[str, Any] = {}
    if with_plain:
        comparison = _compare(engine, prompts, settings, max_new_tokens)
        report = {"speedup": comparison.speedup, "plain": comparison.plain} | {
            "tokens_per_second": {r.configuration: comparison.median(r.configuration) for r in comparison.runs}
        }
    if as_json:
        for output in outputs:
            print(json.dumps(_object(output) | ({"compare": report} if report else {}), ensure_ascii=not _is_utf8()))
        return
    if len(outputs) > 1:
        _print_outputs(outputs)
    _print_measures(outputs)
    if profile:
        _print_profile(steps)
    if report:
        _print_report(report)


def _prompts(given: Sequence[str] | None, file: Path | None) -> list[Prompt]:
    """What was asked for: options, then a file, then standard input; a prompt that ships with Outrider otherwise."""
    if given and file is not None:
        raise InputError("--prompt and --prompt-file were given together; give one of them")
    if given:
        return list(given)
    if file is not None:
        return read_file(file)
    if sys.stdin is not None and not sys.stdin.isatty() and (text := _piped()):
        return [text]
    return read_prompts((ASSETS / "prompts.jsonl").read_text(encoding="utf-8"))[:1]


def _piped() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error.reason} at byte {error.start}") from error


def read_file(file: Path) -> list[Prompt]:
    """Prompts of a text file, which is one, or of JSON lines."""
    text = options.text_of(file, "prompt", "a text file or JSON lines")
    return read_prompts(text) if file.suffix == ".jsonl" else [text]


def read_prompts(text: str) -> list[Prompt]:
    """Prompts of JSON lines: `prompt` is continued; `turns` is a conversation, the user first, the assistant next."""
    found: list[Prompt] = []
    # Not by splitlines, which also parts lines at characters that may stand in JSON strings.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            found.append(_prompt(line, number))
    if not found:
        raise InputError("the prompt file is empty; give JSON lines with `prompt` or `turns`")
    return found


def _prompt(line: str, number: int) -> Prompt:
    """One line of JSON lines."""
    try:
        entry = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"line {number} of the prompts is not JSON: {error}") from error
    given = entry if isinstance(entry, dict) else {}
    prompt, turns = given.get("prompt"), given.get("turns")
    if isinstance(prompt, str):
        return prompt
    if prompt is None and isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]
    raise InputError(
        f"line {number} of the prompts is not a JSON object with `prompt`, a text, or `turns`, a list of texts"
    )


def _stream(
    engine: Engine,
    prompt: Prompt,
    settings: Sampling,
    max_new_tokens: int,
    stop: Sequence[str],
    constraint: Grammar | None,
    steps: list[Step],
) -> Output:
    """Print one output as it comes. An interrupt ends it and says how far it came."""
    id = engine.add(prompt, max_new_tokens=max_new_tokens, sampling=settings, stop=stop, constraint=constraint)
    if isinstance(prompt, str):
        Console(highlight=False, soft_wrap=True).print(prompt, style="dim", end="", markup=False)
    output: Output | None = None
    try:
        while output is None:
            for update in engine.step(sink=steps.append):
                print(succeeded(update).text, end="", flush=True)
                output = update.output
    except KeyboardInterrupt:
        output = engine.cancel(id)
        count = 0 if output is None else len(output.tokens)
        print(f"\ninterrupted after {count} of at most {max_new_tokens} tokens", file=sys.stderr)
        raise typer.Exit(130) from None
    print()
    return output


def _run(
    engine: Engine,
    prompts: Sequence[Prompt],
    settings: Sampling,
    max_new_tokens: int,
    stop: Sequence[str],
    constraint: Grammar | None,
    n: int,
    quiet: bool,
) -> list[Output]:
    """All prompts together, with a progress bar on standard error."""
    done = 0
    with Progress(console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("generating", total=len(prompts) * n)

        def ended(output: Output) -> None:
            nonlocal done
            done += 1
            progress.advance(task)

        try:
            return engine.generate(
                prompts,
                max_new_tokens=max_new_tokens,
                sampling=settings,
                n=n,
                stop=stop,
                progress=ended,
                constraint=constraint,
            )
        except KeyboardInterrupt:
            progress.stop()
            print(f"interrupted after {done} of {len(prompts) * n} outputs", file=sys.stderr)
            raise typer.Exit(130) from None


def _compare(engine: Engine, prompts: Sequence[Prompt], settings: Sampling, max_new_tokens: int) -> Comparison:
    rounds = 3
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("comparing with plain decoding", total=rounds + 2)
        gate(engine)
        progress.advance(task)
        return compare(
            engine,
            [engine.encode(p) for p in prompts],
            max_new_tokens=max_new_tokens,
            sampling=settings,
            rounds=rounds,
            progress=lambda: progress.advance(task),
        )


def _is_utf8() -> bool:
    """Whether all characters can be written to standard output."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower() in ("utf-8", "utf8")


def _object(output: Output) -> dict[str, Any]:
    return {
        "id": output.id,
        "text": output.text,
        "tokens": output.tokens,
        "prompt_tokens": output.prompt_tokens,
        "finish_reason": output.finish_reason,
        "num_steps": output.num_steps,
        "num_draft_tokens": output.num_draft_tokens,
        "num_accepted_tokens": output.num_accepted_tokens,
        "accepted_per_position": output.accepted_per_position,
        "block_efficiency": output.block_efficiency,
        "seconds": output.seconds,
        "tokens_per_second": output.tokens_per_second,
    }


def _print_outputs(outputs: Sequence[Output]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for i, output in enumerate(outputs):
        console.rule(f"output {i + 1}: {output.finish_reason}, {len(output.tokens)} tokens", align="left")
        console.print(output.text, markup=False)


def _print_measures(outputs: Sequence[Output]) -> None:
    tokens = sum(len(o.tokens) for o in outputs)
    steps = sum(o.num_steps for o in outputs)
    drafted, accepted = sum(o.num_draft_tokens for o in outputs), sum(o.num_accepted_tokens for o in outputs)
    line = f"{tokens} tokens in {steps} steps: block efficiency {tokens / max(1, steps):.2f}"
    if drafted:
        line += f", {accepted} of {drafted} draft tokens accepted ({accepted / drafted:.0%})"
    if len(outputs) == 1:
        line += f", {outputs[0].tokens_per_second:.0f} tokens/s"
    Console(stderr=True, highlight=False, soft_wrap=True).print(line, style="cyan")


def _print_profile(steps: Sequence[Step]) -> None:
    timings = list({id(step.timing): step.timing for step in steps}.values())
    total = sum(timing.total for timing in timings)
    table = Table(title=f"where the time of {len(timings)} iterations goes", title_justify="left", box=None)
    for column in ("part", "ms per iteration", "share"):
        table.add_column(column, justify="right" if column != "part" else "left")
    for part in ("target", "drafter", "rows", "verify", "commit", "replay", "rest"):
        seconds = sum(getattr(timing, part) for timing in timings)
        table.add_row(part, f"{1000 * seconds / max(1, len(timings)):.2f}", f"{seconds / (total or 1):.1%}")
    if overlap := sum(timing.overlap for timing in timings):
        table.add_row("at once", f"{-1000 * overlap / len(timings):.2f}", f"{-overlap / (total or 1):.1%}")
    Console(stderr=True).print(table)


def _print_report(report: dict[str, Any]) -> None:
    table = Table(title="measured side by side, medians of 3 interleaved runs", title_justify="left", box=None)
    table.add_column("configuration")
    table.add_column("tokens/s", justify="right")
    for name, rate in report["tokens_per_second"].items():
        table.add_row(name, f"{rate:.1f}")
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(table)
    console.print(
        f"speedup {report['speedup']:.2f} over {report['plain']}, the fastest that drafts nothing", style="cyan"
    )
