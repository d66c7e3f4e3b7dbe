"""Shared options of commands: each field of a dataclass parameter becomes an option, with the field's description."""

import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Collection
from dataclasses import fields, is_dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli.bench import BenchOptions
from outrider.cli.export import ExportOptions
from outrider.cli.failure import INTERRUPTED
from outrider.cli.learn import LearnOptions
from outrider.cli.learn_from import LearnSettings, SourceOptions
from outrider.cli.plan import PlanOptions
from outrider.cli.remote import RemoteOptions
from outrider.cli.request import RequestOptions
from outrider.cli.serve import ServeOptions
from outrider.core.inputs import field_value
from outrider.core.option import bounds_of
from outrider.learning.options import HeadOptions
from outrider.serve.limits import Limits
from outrider.serve.vllm.options import EngineChoice, EngineOptions
from outrider.setup import Setup, documentation
from outrider.training.loop.settings import TrainSettings
from outrider.training.options import DataOptions, WatchOptions

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]

HEADINGS = {
    Setup: "Setup",
    RequestOptions: "Sampling",
    LearnOptions: "Learning",
    TrainSettings: "Training",
    LearnSettings: "Training",
    SourceOptions: "A server",
    DataOptions: "Texts",
    WatchOptions: "Watching",
    BenchOptions: "Measuring",
    PlanOptions: "Planning",
    ExportOptions: "Export",
    ServeOptions: "Server",
    RemoteOptions: "A server",
    Limits: "Limits",
    EngineChoice: "Engine",
    EngineOptions: "Engine",
}
"""The heading of each dataclass's options in the help; of others, `DRAFTER`."""
DRAFTER = "Drafter"
FILES = "Files of options"

CONFIG = Parameter(
    "config",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="Read options from this TOML or JSON file; the command line goes first.",
            rich_help_panel=FILES,
        ),
    ],
)
SAVE_CONFIG = Parameter(
    "save_config",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(help="Write the options to this TOML or JSON file.", rich_help_panel=FILES),
    ],
)


def with_options(*, without: Collection[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each field of its dataclass parameters.

    A `Setup` also gets `--config` and `--save-config`. An interrupt ends the command with exit status 130.

    Args:
        without: Fields that do not become options.
    """

    def expanded(command: Callable[..., None]) -> Callable[..., None]:
        declared = inspect.signature(command).parameters.values()
        groups: dict[str, Any] = {each.name: each.annotation for each in declared if is_dataclass(each.annotation)}
        parameters: list[Parameter] = []
        for each in declared:
            group = groups.get(each.name)
            parameters += [each] if group is None else _parameters(group, without)

        @functools.wraps(command)
        def run(**values: Any) -> None:
            try:
                options = {name: _options_of(kind, values) for name, kind in groups.items()}
                command(**options, **values)
            except KeyboardInterrupt:
                print("interrupted", file=sys.stderr)
                raise typer.Exit(INTERRUPTED) from None

        signature = inspect.Signature([each.replace(kind=Parameter.KEYWORD_ONLY) for each in parameters])
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return expanded


def kind_of(hint: Any) -> Any:
    """What a value of a field is on the command line: the first type that the field allows; a table is a text.

    Example:
        >>> kind_of(int | None), kind_of(dict[str, int] | None), kind_of(tuple[int, ...])
        (<class 'int'>, <class 'str'>, list[int])
    """
    first = typing.get_args(hint)[0] if isinstance(hint, types.UnionType) else hint
    if typing.get_origin(first) is tuple:
        return list[typing.get_args(first)[0]]  # type: ignore[misc]
    return first if isinstance(first, type) and first in (bool, int, float, str, Path) else str


def _parameters(group: type, without: Collection[str]) -> list[Parameter]:
    """The options of a dataclass. An option that is not given is None, so that a file can set it."""
    heading = HEADINGS.get(group, DRAFTER)
    words, hints = documentation(group), typing.get_type_hints(group)
    parameters: list[Parameter] = []
    for field in fields(group):
        if field.name not in without:
            name, kind, bounds = (
                field.name.replace("_", "-"),
                kind_of(hints[field.name]),
                bounds_of(group).get(field.name),
            )
            if kind == list[int] and issubclass(group, HeadOptions | DataOptions):
                # Written as in 2x16x29.
                kind = str
            help, _, _ = words.get(field.name, "").partition(" In Python")
            option = typer.Option(
                f"--{name}/--no-{name}" if kind is bool else f"--{name}",
                help=help,
                show_default=str(field.default) if field.default and "By default" not in help else False,
                rich_help_panel=heading if bounds is None else bounds.heading or heading,
            )
            annotation = Annotated[kind | None, option]
            parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=None, annotation=annotation))
    return [*([CONFIG, SAVE_CONFIG] if group is Setup else []), *parameters]


def _options_of(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass of the options that were given; they are taken out of `values`."""
    raw = {field.name: values.pop(field.name, None) for field in fields(kind)}
    hints = typing.get_type_hints(kind)
    options = {name: _as_field(name, value, hints[name]) for name, value in raw.items() if value not in (None, [])}
    if issubclass(kind, HeadOptions):
        return kind.of(options)
    if kind is not Setup:
        return kind(**options)
    file, place = values.pop("config"), values.pop("save_config")
    setup = Setup.of(options if file is None else Setup.read(file).options() | options)
    if place is not None:
        setup.save(place)
    return setup


def _as_field(name: str, value: Any, hint: Any) -> Any:
    """A value as the field takes it. Raises InputError if a text is no list of whole numbers where one is wanted."""
    if isinstance(value, list):
        return tuple(value)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, str) and tuple[int, ...] in options:
        return field_value(name, value, hint)
    return value
