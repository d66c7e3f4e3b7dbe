"""The commands below `outrider train` that train heads which guess all draft tokens at once, each without the others.
Each imports its code when it runs.
"""

from outrider.cli.head_options import HeadOptions
from outrider.cli.marginal_options import BlockwiseOptions, ParallelOptions
from outrider.cli.options import Json, with_options
from outrider.cli.train import Data
from outrider.cli.train_heads import Out, Target, from_extra
from outrider.cli.train_kin import app
from outrider.training.loop.settings import Settings

__all__ = ["app"]
OTHERS = ("draft_vocab",)
"""Options of heads that these lack."""


@app.command()
@with_options(without=OTHERS)
def blockwise(
    settings: Settings,
    options: HeadOptions,
    heads: BlockwiseOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train blockwise heads: each guesses one depth of a draft from the target's last hidden state.

    All heads use the target's output layer. The command ends with the tree that fits their accuracies, for --tree.
    """
    from_extra()
    from outrider.cli.train_head import Task
    from outrider.cli.train_marginal import run_blockwise

    run_blockwise(
        Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json), heads
    )


@app.command()
@with_options(without=OTHERS)
def parallel(
    settings: Settings,
    options: HeadOptions,
    head: ParallelOptions,
    target: Target,
    data: Data,
    out: Out,
    as_json: Json = False,
) -> None:
    """Train a parallel head (ParallelSpec): a layer that guesses all draft tokens in one forward, at mask slots."""
    from_extra()
    from outrider.cli.train_head import Task
    from outrider.cli.train_marginal import run_parallel

    run_parallel(
        Task(settings=settings, options=options, target=target, sources=tuple(data), out=out, as_json=as_json), head
    )
