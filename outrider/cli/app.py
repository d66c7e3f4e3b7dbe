"""The command line: one file per command; errors of the person typing become one sentence and exit status 2."""

import io
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

from outrider import __version__
from outrider.cli.chat import chat
from outrider.cli.doctor import doctor
from outrider.cli.generate import generate
from outrider.cli.methods import methods
from outrider.cli.prove import prove
from outrider.types import InputError

app = typer.Typer(
    name="outrider",
    help="Lossless speculative decoding for Hugging Face causal language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(prove)
app.command()(doctor)
app.command()(methods)


def _version(wanted: bool) -> bool:
    if wanted:
        print(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Lossless speculative decoding for Hugging Face causal language models."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Where a terminal cannot show a character, something stands in its place.
            stream.reconfigure(errors="replace")
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                # What cannot be written fails here, and not when Python ends.
                sys.stdout.flush()
    except InputError as error:
        _complain(error)
        sys.exit(2)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _complain(error)
        _discard()
        sys.exit(1)


def _complain(error: Exception) -> None:
    Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)


def _discard() -> None:
    """Let what is still buffered go nowhere."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


if __name__ == "__main__":
    main()
