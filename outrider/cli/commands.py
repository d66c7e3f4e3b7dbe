"""The commands and their options. Each command imports its code when it runs, so that help is quick."""

from pathlib import Path
from typing import Annotated

import typer

from outrider import __version__
from outrider.cli import pruning
from outrider.cli.bench import NOT_MEASURED, BenchOptions
from outrider.cli.export import ExportOptions
from outrider.cli.help import App
from outrider.cli.learn import LearnOptions
from outrider.cli.learn_from import LearnSettings, SourceOptions
from outrider.cli.options import Json, with_options
from outrider.cli.plan import PlanOptions
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.serve import ServeOptions
from outrider.cli.train import train
from outrider.core import progress
from outrider.serve.limits import Limits
from outrider.serve.vllm.options import EngineChoice, EngineOptions
from outrider.setup import Setup
from outrider.training.options import WatchOptions

app = App(name="outrider", help="Lossless speculative decoding for Hugging Face causal language models.")
app.add_typer(train)
app.add_typer(pruning.app, name="prune")
DRAWS = 1000
"""Outputs that `prove` draws where no number is named: enough to see a wrong residual."""
PROVE_SECONDS, DOCTOR_SECONDS = 300.0, 90.0
"""Seconds that `prove` and `doctor` run models where no number is named."""
MEASURED = ("tree", "verifier", "length", "decoding", "reproducible", "allow_lossy")
"""Options that `doctor` lacks, because it measures chains for every verifier and length."""


def _version(wanted: bool) -> bool:
    if wanted:
        print(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face causal language models."""


@app.command()
@with_options()
def generate(
    setup: Setup,
    request: RequestOptions,
    learn: LearnOptions,
    engine: EngineOptions,
    remote: RemoteOptions,
    prompt: Annotated[list[str] | None, typer.Option(help="The text to continue; may be given several times.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="A text file (one prompt), or JSON lines with `prompt`, `turns` or `messages`; - is standard input."
        ),
    ] = None,
    n: Annotated[int, typer.Option("-n", help="Outputs per prompt.")] = 1,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Record the log-probability of each token and of this many likeliest ones; in JSON."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Write each output to this file of JSON lines as it ends. Outputs in the file are not made again."
        ),
    ] = None,
    as_json: Json = False,
    profile: Annotated[bool, typer.Option("--profile", help="Report where the time of a step goes.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Also decode plainly, and report both.")] = False,
) -> None:
    """Continue a prompt, with exactly the target's law, in fewer forwards of the target.

    Without a prompt, standard input is read: a text, or JSON lines. At a terminal, a prompt that ships with Outrider is
    continued.
    """
    with progress.importing():
        from outrider.cli.generate import GenerateTask, run

    task = GenerateTask(
        setup=setup,
        request=request,
        engine=engine,
        remote=remote,
        texts=tuple(prompt or ()),
        file=prompt_file,
        n=n,
        logprobs=logprobs,
        output=output,
        as_json=as_json,
        profile=profile,
        compare=compare,
        learn=learn,
    )
    run(task)


@app.command()
@with_options()
def chat(
    setup: Setup,
    request: RequestOptions,
    engine: EngineOptions,
    remote: RemoteOptions,
    system: Annotated[str | None, typer.Option(help="A system message before the conversation.")] = None,
) -> None:
    """Chat with the target, or with a server (--url). `/help` lists the commands; end of input leaves."""
    with progress.importing():
        from outrider.cli.chat import talk

    talk(setup, request, engine, remote, system)


@app.command()
@with_options()
def serve(setup: Setup, options: ServeOptions, limits: Limits, learn: LearnOptions, engine: EngineOptions) -> None:
    """Serve the target with the APIs of OpenAI and Anthropic, at 127.0.0.1 if no other host is named.

    A page at / shows what is drafted and accepted. The first SIGTERM or interrupt lets running requests end, the second
    one cancels them. With --engine vllm, vLLM's own server runs instead, until a signal ends both.
    """
    from outrider.cli.serve import serve, serve_vllm

    if engine.is_vllm:
        raise typer.Exit(serve_vllm(setup, options, limits, learn, engine))
    raise typer.Exit(serve(setup, options, limits, learn))


@app.command()
@with_options()
def learn(
    options: SourceOptions,
    settings: LearnSettings,
    watch: WatchOptions,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="A file of JSON lines with requests and answers, as gateways write them; or a server of Outrider that "
            "keeps its answers (`outrider serve --log-answers FILE`), as http://127.0.0.1:8000.",
        ),
    ],
    target: Annotated[str, typer.Option(help="The target that gave the answers: directory, GGUF file or hub id.")],
    drafter: Annotated[str, typer.Option(help="The drafter that learns, as `model:path=DIR` or `eagle3:path=DIR`.")],
    out: Annotated[Path, typer.Option(help="A new folder for the drafter that has learnt.")],
    as_json: Json = False,
) -> None:
    """Train a drafter on with the answers of a running server, and give the server the new weights.

    A server of Outrider takes them by its own route, a vLLM by its weight-update routes (`outrider serve --engine vllm
    --weight-updates`). Requests that run are answered first; nobody needs to restart anything.
    """
    from outrider.cli.learn_from import LearnTask
    from outrider.cli.learn_from import learn as learn_from
    from outrider.cli.train import run_training

    task = LearnTask(
        source=source,
        options=options,
        target=target,
        drafter=drafter,
        out=out,
        settings=settings,
        watch=watch,
    )
    run_training(drafter.partition(":")[0], learn_from(task), as_json)


@app.command()
@with_options()
def prove(
    setup: Setup,
    remote: RemoteOptions,
    num_draws: Annotated[int, typer.Option(help="Outputs to draw for the chi-square test; 0 leaves it out.")] = DRAWS,
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of the chi-square test; by default one at which it can tell outputs apart."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the chi-square test.")] = 0,
    time_limit: Annotated[
        float,
        typer.Option(
            help="Seconds for the whole command, about. A large model is checked on fewer tokens; while time is "
            "left, outputs are drawn until they can tell something."
        ),
    ] = PROVE_SECONDS,
    as_json: Json = False,
) -> None:
    """Check a pair. Exit status 1 if anything fails.

    Exact law: the verifier's law, enumerated on small tables, equals the target's. Dice: random draws keep their laws.
    Rows: in float32, logits and probabilities at drafts of a sampled batch are those of transformers. Greedy identical:
    in float32 this pair's greedy output is that of plain decoding. Greedy up to ties: in the pair's own dtype,
    differences are listed with their logit gap. Samples: drawn sequences fit the target's probabilities.

    With --url a server is checked by its own log-probabilities: greedy outputs against a forward without drafts, and
    drawn tokens against their probabilities.
    """
    if remote.url is not None:
        from outrider.cli.prove_url import prove_url

        prove_url(setup, remote, num_draws=num_draws, temperature=temperature, seed=seed, as_json=as_json)
        return
    with progress.importing():
        from outrider.cli.prove import prove

    prove(setup, num_draws=num_draws, temperature=temperature, seed=seed, time_limit=time_limit, as_json=as_json)


@app.command()
@with_options(without=NOT_MEASURED)
def bench(
    setup: Setup,
    request: RequestOptions,
    options: BenchOptions,
    remote: RemoteOptions,
    engine: EngineChoice,
    configuration_texts: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            help="A configuration, as `length=fixed:4` or `drafter=suffix,tree=chain,name=mine`; may be given several "
            "times. Without any, the setup itself is measured.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure configurations against plain decoding and other engines. Exit status 1 if one is not lossless.

    All take turns on the same prompts, after the gate of `prove` and a warm-up. Without options, the pair that ships
    with Outrider is measured on built-in prompts, in at most three minutes. The first line is the verdict: faster,
    slower, or no difference found.

    With --url a server is measured over HTTP, by itself; with --engine vllm, vLLM without drafts and then with them.
    """
    if remote.url is not None or engine.is_vllm:
        from outrider.cli.bench_url import bench_url

        raise typer.Exit(bench_url(setup, request, options, engine, remote, configuration_texts or [], as_json))
    from outrider.cli.bench import bench

    raise typer.Exit(bench(setup, request, options, configuration_texts or [], as_json))


@app.command()
@with_options(without=NOT_MEASURED)
def plan(
    setup: Setup,
    request: RequestOptions,
    options: PlanOptions,
    more_drafters: Annotated[
        list[str] | None,
        typer.Option("--with", help="Another drafter to compare, as `ngram` or `model:path=...`; several times."),
    ] = None,
    flags_for: Annotated[
        str | None, typer.Option("--for", help="Print the flags of another engine: vllm, sglang or llama.cpp.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict what each drafter, tree, verifier and length would bring, and say what to use.

    The target answers your prompts once, the drafters guess along, and steps are timed: nothing else is run. The first
    line is the advice. It may be not to speculate; then it says what would be needed.
    """
    from outrider.cli.plan import plan

    plan(setup, request, options, more_drafters or [], flags_for, as_json)


@app.command()
@with_options()
def export(options: ExportOptions, as_json: Json = False) -> None:
    """Write a drafter for another engine: its files, the command that starts it, and a smoke test to run there.

    A drafter that the engine cannot load is refused, with the nearest one that it can. Without a target, the draft
    model that ships with Outrider is exported.
    """
    from outrider.cli.export import export

    raise typer.Exit(export(options, as_json))


@app.command()
@with_options(without=MEASURED)
def doctor(
    setup: Setup,
    head: Annotated[
        str | None,
        typer.Argument(metavar="[HEAD]", help="A head: say why its acceptance is low. Nothing else is measured then."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="A text file, or JSON lines with `prompt` or `turns`; a few texts otherwise.")
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Length of the measured drafts.")] = 5,
    temperature: Annotated[float, typer.Option(help="Of target and drafter.")] = 1.0,
    num_tokens: Annotated[int, typer.Option(help="Most tokens of text to read.")] = 512,
    rounds: Annotated[int, typer.Option(help="How often costs are timed; 0 leaves them out.")] = 3,
    time_limit: Annotated[
        float, typer.Option(help="Seconds to measure, about. A large pair is measured on fewer tokens.")
    ] = DOCTOR_SECONDS,
    as_json: Json = False,
) -> None:
    """Report what works with a target, or why a head drafts badly.

    With a drafter, also compare the two and measure the speedup on this machine. Without a target, the pair that ships
    with Outrider is examined.
    """
    with progress.importing():
        from outrider.cli.doctor import DoctorOptions, doctor, examine_head

    if head is not None:
        examine_head(setup, head, text=text, as_json=as_json)
        return
    plan = DoctorOptions(
        num_speculative_tokens=num_speculative_tokens,
        temperature=temperature,
        num_tokens=num_tokens,
        rounds=rounds,
        time_limit=time_limit,
    )
    doctor(setup, plan, text=text, as_json=as_json)


@app.command()
@with_options()
def prepare(setup: Setup, as_json: Json = False) -> None:
    """Compile the forwards of the target and the draft model for this machine, time their steps, and keep both.

    This takes a minute or two for a dozen layers. Later commands find the result by the models' weights, and use it
    where it is the fastest way.
    """
    with progress.importing():
        from outrider.cli.prepare import prepare

    prepare(setup, as_json=as_json)


@app.command()
@with_options()
def methods(
    as_json: Json = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/guide/methods.md.")] = False,
) -> None:
    """List every drafter, tree, verifier, length policy and decoding, with its paper, fields and traits."""
    from outrider.cli.methods import methods

    methods(as_json=as_json, as_markdown=as_markdown)
