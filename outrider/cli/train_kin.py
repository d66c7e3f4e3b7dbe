"""The commands below `outrider train` that train kin of EAGLE heads. Each imports its code when it runs."""

from outrider.cli.head_options import EagleOptions, HeadOptions
from outrider.cli.kin_options import GriffinOptions, JakiroOptions, PossOptions
from outrider.cli.options import Json, with_options
from outrider.cli.train import Data
from outrider.cli.train_blocks import app
from outrider.cli.train_heads import Out, Target, from_extra
from outrider.training.loop.settings import Settings

__all__ = ["app"]


@app.command()
@with_options()
def poss(
    settings: Settings,
    options: HeadOptions,
    head: PossOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train an EAGLE or EAGLE-3 head with position specialists: each learns some of the draft tokens."""
    from_extra()
    from outrider.cli.train_head import Task
    from outrider.cli.train_head_kin import run_poss

    run_poss(
        Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json), head
    )


@app.command()
@with_options()
def griffin(
    settings: Settings,
    options: HeadOptions,
    trunk: EagleOptions,
    head: GriffinOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train a GRIFFIN head: an EAGLE head that learns only behind draft tokens which it would have guessed."""
    from_extra()
    from outrider.cli.train_head import Task
    from outrider.cli.train_head_kin import run_griffin

    task = Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json)
    run_griffin(task, trunk, head)


@app.command()
@with_options(without=("intermediate_size",))
def jakiro(
    settings: Settings,
    options: HeadOptions,
    trunk: EagleOptions,
    head: JakiroOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train a Jakiro head: an EAGLE head with two small experts, which also guesses one token further."""
    from_extra()
    from outrider.cli.train_head import Task
    from outrider.cli.train_head_kin import run_jakiro

    task = Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json)
    run_jakiro(task, trunk, head)
