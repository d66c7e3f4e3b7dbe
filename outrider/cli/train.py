"""The commands below `outrider train`. Each imports its code when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options import Json, with_options
from outrider.cli.request import RequestOptions
from outrider.core.inputs import InputError
from outrider.setup import Setup
from outrider.training.loop.settings import Settings

train = typer.Typer(
    name="train", help="Train drafters, and make the data for it.", no_args_is_help=True, pretty_exceptions_enable=False
)
OF_ANSWERS = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
"""Options of requests that answers for training have."""
OTHERS = sorted(set(RequestOptions.__dataclass_fields__) - set(OF_ANSWERS))
"""Options of requests that they lack."""
Data = Annotated[
    list[str],
    typer.Option(
        help="Text or JSON lines (also .gz), a folder of these, a folder that `datasets` has saved, or a dataset on "
        "the Hub; may be given several times."
    ),
]
Split = Annotated[str, typer.Option(help="The split of a dataset.")]
Subset = Annotated[str | None, typer.Option(help="The configuration of a dataset, also called subset.")]
SeenAt = Annotated[
    str,
    typer.Option(
        help="Where the draft model sees the tokens: plain; padding, for tables of absolute positions; gaps, for "
        "rotary positions."
    ),
]
Capture = Annotated[
    bool,
    typer.Option(
        help="Capture the target's hidden states along --data once, in the folder of the run, and read them in every "
        "epoch. That pays where texts come more than once."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column", help="What the data calls a field, such as `prompt=question`; may be given several times."
    ),
]


@train.command()
@with_options(without=OTHERS)
def data(
    setup: Setup,
    request: RequestOptions,
    data: Data,
    out: Annotated[
        Path, typer.Option(help="A file of JSON lines. Answers in the file are kept, and the rest is added to it.")
    ],
    split: Split = "train",
    subset: Subset = None,
    column: Columns = None,
    limit: Annotated[int | None, typer.Option(help="Read only this many documents.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of a text without a prompt that become the prompt.")] = 32,
    as_json: Json = False,
) -> None:
    """Let the target answer the prompts of a corpus, through the engine, to a file that a drafter can be trained on.

    A prompt is what stands before an answer, or the beginning of a text. A run that was killed continues where it
    stopped.
    """
    from outrider.cli.train_data import DataPart, Task, run

    run(
        Task(
            setup=setup,
            request=request,
            sources=tuple(data),
            out=out,
            part=DataPart(split=split, subset=subset, columns=tuple(column or ())),
            limit=limit,
            prompt_tokens=prompt_tokens,
            as_json=as_json,
        )
    )


@train.command()
@with_options()
def distill(
    settings: Settings,
    target: Annotated[str, typer.Option(help="The target: a directory or a hub id.")],
    drafter: Annotated[str, typer.Option(help="The draft model to begin from, with the target's tokenizer.")],
    data: Data,
    out: Annotated[
        Path, typer.Option(help="Folder for the draft model. If it holds this run, the run goes on where it stopped.")
    ],
    divergence: Annotated[
        str,
        typer.Option(
            help="The loss: fkl, rkl, jsd:beta=0.5, tvd, nla, lk; with top_k=K over the target's likeliest tokens "
            "alone; ce learns the texts and not the target's rows."
        ),
    ] = "fkl",
    texts: Annotated[
        str,
        typer.Option(
            help="What to learn on: the fixed texts of --data; the target's answers to their prompts (target); what "
            "the draft model itself continues them with (on_policy); or mixed:share=0.5 of both."
        ),
    ] = "fixed",
    positions: SeenAt = "plain",
    capture: Capture = False,
    held_out: Annotated[
        list[str] | None,
        typer.Option(help="Texts to watch, best written by the target; a twentieth of --data otherwise."),
    ] = None,
    depth: Annotated[int, typer.Option(help="Draft tokens per step whose acceptance is watched.")] = 5,
    watch_temperature: Annotated[
        int, typer.Option(min=0, max=1, help="Keep the drafter with the best block efficiency at this temperature.")
    ] = 1,
    split: Split = "train",
    subset: Subset = None,
    limit: Annotated[int | None, typer.Option(help="Read only this many documents.")] = None,
    as_json: Json = False,
) -> None:
    """Train a draft model to guess what a target says. The result is a plain transformers model.

    The same command runs on several processes: `accelerate launch -m outrider train distill ...`.
    """
    try:
        from outrider.cli.train_distill import Task, run
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}; `pip install outrider[train]` installs it") from error

    run(
        Task(
            settings=settings,
            target=target,
            drafter=drafter,
            sources=tuple(data),
            out=out,
            divergence=divergence,
            texts=texts,
            positions=positions,
            capture=capture,
            held_out=tuple(held_out or ()),
            depth=depth,
            watch_temperature=watch_temperature,
            split=split,
            subset=subset,
            limit=limit,
            as_json=as_json,
        )
    )


@train.command()
@with_options()
def steer(
    settings: Settings,
    target: Annotated[str, typer.Option(help="The target: a directory or a hub id.")],
    drafter: Annotated[str, typer.Option(help="The draft model to begin from, with the target's tokenizer.")],
    data: Data,
    out: Annotated[
        Path, typer.Option(help="Folder for the drafter. If it holds this run, the run goes on where it stopped.")
    ],
    divergence: Annotated[str, typer.Option(help="The loss, as for distill.")] = "fkl",
    regenerate: Annotated[
        bool, typer.Option(help="Learn on the target's answers to the prompts of --data, not on its texts.")
    ] = False,
    rank: Annotated[int | None, typer.Option(help="Rank of the steering; by default a full matrix.")] = None,
    taps: Annotated[
        str | None, typer.Option(help="The target's hidden states that steer, the highest first, such as 30x17x4.")
    ] = None,
    frozen: Annotated[bool, typer.Option(help="Keep the draft model as it is; the steering alone learns.")] = False,
    positions: SeenAt = "plain",
    capture: Capture = False,
    held_out: Annotated[
        list[str] | None,
        typer.Option(help="Texts to watch, best written by the target; a twentieth of --data otherwise."),
    ] = None,
    depth: Annotated[
        int, typer.Option(help="Draft tokens per step: how old the states may be, and whose acceptance is watched.")
    ] = 5,
    watch_temperature: Annotated[
        int, typer.Option(min=0, max=1, help="Keep the drafter with the best block efficiency at this temperature.")
    ] = 1,
    split: Split = "train",
    subset: Subset = None,
    limit: Annotated[int | None, typer.Option(help="Read only this many documents.")] = None,
    as_json: Json = False,
) -> None:
    """Train a draft model together with vectors from the target's hidden states (SD²).

    The result is a transformers model with a steering beside it, for --drafter steered:path=OUT.
    """
    try:
        from outrider.cli.train_steer import Task, run
    except ModuleNotFoundError as error:
        raise InputError(f"training needs {error.name}; `pip install outrider[train]` installs it") from error
    if taps is not None and not all(tap.isdecimal() for tap in taps.split("x")):
        raise InputError(f"taps must be numbers with x between them, such as 30x17x4, got {taps!r}")
    run(
        Task(
            settings=settings,
            target=target,
            drafter=drafter,
            sources=tuple(data),
            out=out,
            divergence=divergence,
            texts="target" if regenerate else "fixed",
            held_out=tuple(held_out or ()),
            depth=depth,
            watch_temperature=watch_temperature,
            split=split,
            subset=subset,
            limit=limit,
            as_json=as_json,
            rank=rank,
            taps=None if taps is None else tuple(int(tap) for tap in taps.split("x")),
            frozen=frozen,
            positions=positions,
            capture=capture,
        )
    )
