"""The commands below `outrider train` that train heads which guess blocks. Each imports its code when it runs."""

from pathlib import Path

from outrider.cli.block_options import BlockOptions, MarkovOptions
from outrider.cli.head_options import HeadOptions
from outrider.cli.options import Json, with_options
from outrider.cli.train import Data
from outrider.cli.train_heads import Out, Target, app, from_extra
from outrider.training.loop.settings import Settings

__all__ = ["app"]
OTHERS = ("decay", "draft_vocab")
"""Options of heads that these lack."""


@app.command()
@with_options(without=OTHERS)
def dflash(
    settings: Settings,
    options: HeadOptions,
    block: BlockOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train a DFlash head: it guesses a block of tokens in one forward, each without the others."""
    _run("dflash", settings, options, target, data, out, as_json, block)


@app.command()
@with_options(without=OTHERS)
def dflare(
    settings: Settings,
    options: HeadOptions,
    block: BlockOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train a DFlare head: DFlash with a mixture of the target's layers for each layer of the head."""
    _run("dflare", settings, options, target, data, out, as_json, block)


@app.command()
@with_options(without=OTHERS)
def dspark(
    settings: Settings,
    options: HeadOptions,
    block: BlockOptions,
    sequential: MarkovOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train a DSpark head: DFlash with a small sequential head that corrects each guess by the token before it."""
    _run("dspark", settings, options, target, data, out, as_json, block, sequential)


def _run(
    method: str,
    settings: Settings,
    options: HeadOptions,
    target: str,
    data: list[str],
    out: Path,
    as_json: bool,
    block: BlockOptions,
    sequential: MarkovOptions | None = None,
) -> None:
    from_extra()
    from outrider.cli.train_block import run_block
    from outrider.cli.train_head import Task

    task = Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json)
    run_block(task, method, block, sequential)  # type: ignore[arg-type]
