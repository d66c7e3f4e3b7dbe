"""The command line: what goes wrong becomes one sentence, and an exit status says what kind of wrong it was."""

import io
import os
import sys
from contextlib import suppress

from outrider.inputs import InputError

WRONG_INPUT = 2
"""Exit status where what was typed is wrong."""
INTERRUPTED = 130
"""Exit status after an interrupt, as shells have it."""


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Where a terminal cannot show a character, something stands in its place.
            stream.reconfigure(errors="replace")
    try:
        from outrider.cli.commands import app

        try:
            app(prog_name="outrider")
        finally:
            if sys.stdout is not None:
                # What cannot be written fails here, and not when Python ends.
                sys.stdout.flush()
    except InputError as error:
        complain(error)
        sys.exit(WRONG_INPUT)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            complain(error)
        _discard()
        sys.exit(1)


def complain(error: Exception) -> None:
    """Say on standard error what is wrong."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)


def _discard() -> None:
    """Let what is still buffered go nowhere."""
    if sys.stdout is not None:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main()
