"""The help of commands: options below headings, the ones that people use first at the top, nothing cut off."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

FIRST = (
    *("prompt", "prompt_file", "target", "drafter", "data", "out", "length", "max_new_tokens", "temperature", "seed"),
    *("compare", "as_json"),
)
"""Options that people use first."""
OPTIONS = "Options"
"""The heading of options that have no other."""


class Command(TyperCommand):
    """A command whose help has a list of options for each heading."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options. A name that is longer than its column stands on a line of its own."""
        parts: dict[str, list[tuple[str, str]]] = {OPTIONS: []}
        shown = [param for param in self.get_params(ctx) if param.get_help_record(ctx) is not None]
        first = [param for name in FIRST for param in shown if param.name == name]
        for param in [*first, *(param for param in shown if param not in first)]:
            heading = OPTIONS if param in first else getattr(param, "rich_help_panel", None) or OPTIONS
            names, help = param.get_help_record(ctx)  # type: ignore[misc]
            parts.setdefault(heading, []).append((names, help))
        for heading, rows in parts.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class Commands(TyperGroup):
    """A list of commands, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(limit=1000)) for name, each in self.commands.items()])


class App(typer.Typer):
    """Commands with this help; `-h` asks for it too."""

    def __init__(self, *, cls: type[Commands] = Commands, **settings: Any) -> None:
        super().__init__(
            cls=cls,
            no_args_is_help=True,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
            **settings,
        )

    def command(self, *arguments: Any, **settings: Any) -> Callable[[Any], Any]:
        """Add a command."""
        return super().command(*arguments, cls=Command, **settings)
