"""Options that several recipes share, each declared once."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.types import InputError

Target = Annotated[str | None, typer.Option(help="Directory or hub id of the target; by default the embedded one.")]
Draft = Annotated[Path, typer.Option(help="Directory of the draft model.")]
Prompts = Annotated[Path, typer.Option(help="JSON lines with `id`, `category`, and `prompt` or `turns`.")]
Out = Annotated[
    Path | None, typer.Option(help="Folder for rows, tables, plots and circumstances; without it nothing is written.")
]
NumPrompts = Annotated[int, typer.Option(min=1, help="How many prompts are measured.")]
Seeds = Annotated[int, typer.Option(min=1, help="How many seeds each prompt is run with.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Most tokens per request.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often every run is repeated.")]
Dtype = Annotated[str, typer.Option(help="What the models compute in; auto is the weights' own.")]
Clock = Annotated[
    bool, typer.Option("--clock", help="Time steps instead of counting them, one request at a time; wants quiet.")
]
AsIs = Annotated[
    bool, typer.Option("--as-is", help="Run nothing more: judge by the prompts that all methods have done.")
]
Timed = Annotated[
    Path | None, typer.Option(help="Folder that --clock wrote; without it nothing is said of tokens per second.")
]


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of an option that takes several, in ascending order.

    Example:
        >>> whole_numbers("--sizes", "8, 1")
        (1, 8)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise InputError(f"{option} must be whole numbers >= 1 with commas between them, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The same for numbers that need not be whole.

    Example:
        >>> numbers("--temperatures", "1, 0.5")
        (0.5, 1.0)
    """
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise InputError(f"{option} must be numbers with commas between them, got {text!r}") from error
