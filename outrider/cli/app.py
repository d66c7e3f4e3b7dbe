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
            app(prog_name="outrider")
        finally:
            if sys.stdout is not None:
                # A write error must be raised here, not when Python ends.
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


def _discard() -> None:
    """Discard the output that is still buffered."""
    if sys.stdout is not None:
        with suppress(OSError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


if __name__ == "__main__":
    main()
