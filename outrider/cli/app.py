"""The command line. An error becomes one sentence and an exit status."""

import io
import os
import sys
from contextlib import suppress

from outrider.cli.failure import INTERRUPTED, WRONG_INPUT, complain
from outrider.core.inputs import InputError


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A character that the terminal cannot show is replaced.
            stream.reconfigure(errors="replace")
    try:
        from outrider.cli.commands import app

        try:
            status = app(prog_name="outrider", standalone_mode=False)
        finally:
            if sys.stdout is not None:
                # A write error must be raised here, not when Python ends.
                sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
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
    except Exception as error:
        _refuse_options(error)
        sys.exit(WRONG_INPUT)


def _refuse_options(error: Exception) -> None:
    """Print what is wrong with the options. Raises errors again that are not about options."""
    # The class of such errors has other names and places in other versions of typer.
    message = getattr(error, "format_message", None)
    if message is None:
        raise error
    if type(error).__name__ == "NoArgsIsHelpError":
        print(message(), file=sys.stderr)
        return
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "outrider")
    listed = "commands" if hasattr(getattr(context, "command", None), "commands") else "options"
    complain(InputError(f"{message().rstrip('.')}; `{command} --help` lists the {listed}"))


def _discard() -> None:
    """Discard the output that is still buffered."""
    if sys.stdout is not None:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main()
