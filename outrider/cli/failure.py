"""How a command fails: one sentence on standard error, and an exit status."""

WRONG_INPUT = 2
"""Exit status for wrong input."""
INTERRUPTED = 130
"""Exit status after an interrupt, as in shells."""


def complain(error: Exception) -> None:
    """Print an error on standard error."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(f"error: {error}", style="red", markup=False, highlight=False)
