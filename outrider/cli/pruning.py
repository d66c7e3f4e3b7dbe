"""The commands of `outrider prune` and their options. The code is imported when a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.help import App
from outrider.cli.options import Json, with_options
from outrider.core import progress
from outrider.training.options import NOT_OF_PROMPTS, DataOptions

app = App(help="Cut a draft model out of a target, plan which shape would pay, or count the tokens of a text.")

Target = Annotated[
    str | None,
    typer.Option(help="The target: directory, GGUF file or hub id. By default the one that ships with Outrider."),
]
Device = Annotated[str | None, typer.Option(help="Where the target runs; by default the GPU where there is one.")]
Out = Annotated[Path, typer.Option(help="New folder for the draft model and its tokenizer.")]
NumTokens = Annotated[int, typer.Option(min=1, help="Most tokens of text to read.")]


@app.command()
@with_options(without=NOT_OF_PROMPTS)
def experts(
    texts: DataOptions,
    out: Out,
    experts: Annotated[int, typer.Option(help="Experts that each layer keeps.")],
    target: Target = None,
    method: Annotated[
        str, typer.Option(help="uncurl merges similar experts; frequency keeps the most used, reap the loudest.")
    ] = "uncurl",
    experts_per_token: Annotated[
        int | None, typer.Option(help="Experts that each token uses; by default as many as before.")
    ] = None,
    num_tokens: NumTokens = 100_000,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a mixture-of-experts model with fewer experts, by what a text needs."""
    with progress.importing():
        from outrider.cli.prune import PruneOptions, prune_experts

    job = PruneOptions(target=target, device=device, data=texts, out=out, num_tokens=num_tokens, as_json=as_json)
    prune_experts(job, experts, method, experts_per_token)


@app.command()
@with_options(without=NOT_OF_PROMPTS)
def shape(
    texts: DataOptions,
    out: Out,
    target: Target = None,
    layers: Annotated[int | None, typer.Option(help="Layers to keep.")] = None,
    width: Annotated[int | None, typer.Option(help="Coordinates of the residual stream to keep.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads to keep in each layer.")] = None,
    feed_forward: Annotated[int | None, typer.Option(help="Neurons to keep in each layer.")] = None,
    num_tokens: NumTokens = 100_000,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write a model of a smaller shape, with the parts that matter most on a text. A size not given stays."""
    with progress.importing():
        from outrider.cli.prune import PruneOptions, prune_shape

    job = PruneOptions(target=target, device=device, data=texts, out=out, num_tokens=num_tokens, as_json=as_json)
    prune_shape(job, layers=layers, width=width, heads=heads, feed_forward=feed_forward)


@app.command()
@with_options(without=NOT_OF_PROMPTS)
def tokens(
    texts: DataOptions,
    out: Annotated[Path, typer.Option(help="New file of JSON for the ids and their counts.")],
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Count the target's tokens in a text, for a draft model that proposes the most frequent ones alone (token_map).

    Of a prompt with its answer, the answer is counted.
    """
    with progress.importing():
        from outrider.cli.prune import count_tokens

    count_tokens(target, texts, out, as_json)


@app.command()
def plan(
    target: Target = None,
    parameters: Annotated[
        int | None, typer.Option(help="Parameters of the draft model; by default a fifth of the target's.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Depths to compare, with commas; by default 1,2,4,... up to the target's.")
    ] = None,
    alpha: Annotated[
        str, typer.Option(help="Share of draft tokens that is accepted: one number, or one for each depth.")
    ] = "0.7",
    context: Annotated[int, typer.Option(min=1, help="Tokens before the timed forwards.")] = 256,
    rounds: Annotated[int, typer.Option(min=1, help="How often each forward is timed.")] = 20,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Say which shape of a draft model pays on this machine, before one is trained."""
    with progress.importing():
        from outrider.cli.prune import plan

    plan(
        target,
        parameters=parameters,
        layers=layers,
        alpha=alpha,
        context=context,
        rounds=rounds,
        device=device,
        as_json=as_json,
    )
