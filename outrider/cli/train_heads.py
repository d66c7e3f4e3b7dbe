"""The commands below `outrider train` that train heads. Each imports its code when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.head_options import Eagle3Options, EagleOptions, HeadOptions, MedusaOptions
from outrider.cli.options import Json, with_options
from outrider.cli.train import Data, train
from outrider.core.inputs import InputError
from outrider.training.loop.settings import Settings

app = train
"""The commands below `outrider train`, these included."""
Target = Annotated[str, typer.Option(help="The target: a directory or a hub id.")]
Out = Annotated[Path, typer.Option(help="Folder for the head. If it holds this run, the run goes on where it stopped.")]


@app.command()
@with_options()
def medusa(
    settings: Settings,
    options: HeadOptions,
    heads: MedusaOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train Medusa heads: each guesses one depth of a draft from the target's last hidden state.

    The command ends with the tree that fits the heads' accuracies, for --tree.
    """
    from_extra()
    from outrider.cli.train_head import Task, run_medusa

    run_medusa(
        Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json), heads
    )


@app.command()
@with_options()
def eagle(
    settings: Settings,
    options: HeadOptions,
    head: EagleOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train an EAGLE head: a layer that continues the target's last hidden states.

    With --tree dynamic it drafts as EAGLE-2.
    """
    from_extra()
    from outrider.cli.train_head import Task, run_eagle

    run_eagle(
        Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json), head
    )


@app.command()
@with_options()
def eagle3(
    settings: Settings,
    options: HeadOptions,
    head: Eagle3Options,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train an EAGLE-3 head: a layer that continues three fused hidden states of the target, on its own outputs."""
    from_extra()
    from outrider.cli.train_head import Task, run_eagle3

    run_eagle3(
        Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json), head
    )


def from_extra() -> None:
    """Raise InputError if the libraries of training are not there."""
    try:
        import outrider.training.loop.steps  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}; `pip install outrider[train]` installs it") from error
