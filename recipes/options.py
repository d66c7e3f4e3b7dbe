"""Options that several recipes share, each declared once."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, get_origin

import typer

from outrider.core.types import InputError

Target = Annotated[str | None, typer.Option(help="Directory or hub id of the target; by default the embedded one.")]
Draft = Annotated[Path, typer.Option(help="Directory or GGUF file of the draft model.")]
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
# Of recipes that compare draft lengths.
Drafter = Annotated[str | None, typer.Option(help="The drafter, by default that of the defaults.")]
AtOnce = Annotated[str, typer.Option(help="How many requests run at once.")]
Temperatures = Annotated[str, typer.Option(help="Temperatures; above 0 with seeds and without.")]
# Of recipes that train drafters.
Data = Annotated[Path, typer.Option(help="Texts as JSON lines, plain or gzipped.")]
TargetOfAll = Annotated[str, typer.Option(help="Directory or hub id of the target; by default the embedded one.")]
BeginsWith = Annotated[
    Path | None, typer.Option(help="Draft model that all begin with; by default one that learns text before.")
]
Work = Annotated[Path, typer.Option(help="Folder of the target's answers and of the drafters.")]
NumTexts = Annotated[int, typer.Option(min=2, help="Texts to learn from.")]
Length = Annotated[int, typer.Option(min=44, help="Tokens of a text.")]
Precision = Annotated[
    str, typer.Option(help="Of products in training: CPUs without bfloat16 products are many times as fast with `no`.")
]
Steps = Annotated[int, typer.Option(min=1, help="Optimizer steps of every drafter.")]
TextSteps = Annotated[int, typer.Option(min=1, help="Steps on text, before, of twice as many rows.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Rows of a step.")]
LearningRate = Annotated[float, typer.Option(help="Highest learning rate.")]


def with_fields(
    kind: type[Any], *, without: Collection[str] = (), **defaults: object
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a recipe's function, whose first parameter is a dataclass: the dataclass's fields become options.

    A field whose type is annotated with an option is that option. The function's other parameters stay options.

    Args:
        kind: The dataclass.
        without: Fields that the recipe has no option for; they keep their own defaults.
        defaults: Defaults of fields, where they differ from the dataclass's.

    Example:
        >>> @dataclasses.dataclass
        ... class Setting:
        ...     num_prompts: NumPrompts = 8
        ...     seeds: Seeds = 1
        >>> @with_fields(Setting, num_prompts=40)
        ... def main(setting: Setting, clock: Clock = False) -> None:
        ...     print(setting.num_prompts, setting.seeds, clock)
        >>> main()
        40 1 False
        >>> main(seeds=3, clock=True)
        40 3 True
    """
    known = {f.name: f.type for f in dataclasses.fields(kind) if get_origin(f.type) is Annotated}
    if unknown := {*without, *defaults} - set(known):
        raise TypeError(f"{', '.join(sorted(unknown))} are no fields of a {kind.__name__.lower()}")
    usual = inspect.signature(kind).parameters
    fields = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=defaults.get(name, usual[name].default), annotation=option
        )
        for name, option in known.items()
        if name not in without
    ]

    def decorate(main: Callable[..., Any]) -> Callable[..., Any]:
        _, *others = inspect.signature(main).parameters.values()
        keyed = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in others]
        signature = inspect.Signature([*fields, *keyed])

        @functools.wraps(main)
        def run(**given: Any) -> Any:
            bound = signature.bind(**given)
            bound.apply_defaults()
            values = bound.arguments
            return main(kind(**{field.name: values.pop(field.name) for field in fields}), **values)

        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return run

    return decorate


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


def words(text: str, option: str = "", known: Collection[str] | None = None) -> list[str]:
    """The words of an option that takes several.

    Args:
        known: What it takes; None takes anything.

    Raises:
        InputError: A word is not known.

    Example:
        >>> words("empty, kept", "--states", ("empty", "kept"))
        ['empty', 'kept']
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if known is not None and (wrong := [word for word in found if word not in known]):
        raise InputError(f"{option} must be of {', '.join(known)}, with commas between them, got {wrong[0]!r}")
    return found


def numbers(option: str, text: str) -> tuple[float, ...]:
    """The same for numbers that may have fractions.

    Example:
        >>> numbers("--temperatures", "1, 0.5")
        (0.5, 1.0)
    """
    try:
        return tuple(sorted({float(part) for part in text.split(",")}))
    except ValueError as error:
        raise InputError(f"{option} must be numbers with commas between them, got {text!r}") from error
