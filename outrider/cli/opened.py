"""The engine of a command."""

import logging
import os
import sys
import warnings

from transformers.utils import logging as transformers_logging

from outrider.assembly import assemble
from outrider.cli.printed import print_line
from outrider.core import progress
from outrider.core.inputs import InputError
from outrider.core.ranks import is_first
from outrider.engine.crowd import CrowdedWarning
from outrider.engine.engine import Engine
from outrider.host.versions import UntestedWarning
from outrider.lm.hf.open import LOADING
from outrider.lm.hf.weights import check_weights
from outrider.setup import Setup

USUAL = warnings.formatwarning
"""How Python shows warnings."""


def opened(setup: Setup, *, divided: bool = False) -> Engine:
    """The engine that a setup describes, without transformers' own messages. Its warning is one line.

    Args:
        divided: Whether the command can run in several processes that hold one target. The first one prints.

    Raises:
        InputError: The target is to be divided among processes, and the command cannot run so.
    """
    if not divided:
        check_undivided(setup)
    warnings.formatwarning = _one_line
    tell_loading()
    with progress.shown("loading"):
        engine = assemble(setup)
    if not is_first():
        # Errors reach standard error all the same.
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    return engine


def tell_loading() -> None:
    """Say on standard error what is loaded, instead of what transformers says about it."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    log = logging.getLogger(LOADING)
    if is_first() and not log.handlers and not logging.getLogger("outrider").handlers:
        log.addHandler(_Line())
        log.setLevel(logging.INFO)
        log.propagate = False


class _Line(logging.Handler):
    """Prints a record as a line on standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print_line(record.getMessage())


def check_undivided(setup: Setup) -> None:
    """Raise InputError if the target is to be divided among processes, for a command that runs in one."""
    if setup.tp_plan is not None:
        raise InputError(
            "tp_plan is for `outrider generate` and for outrider.load; other commands run in one process, so leave it "
            "out"
        )


def check_numbers(engine: Engine) -> None:
    """Raise InputError if a weight of the target or of the drafter is not a number. It reads all of them."""
    for what, part in (("the target", engine.parts.target), ("the drafter", engine.parts.drafter)):
        for module in part.modules.values():
            check_weights(module, what)


def _one_line(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning as standard error shows it. Warnings for the user are a line without a place in the code."""
    if issubclass(category, CrowdedWarning | UntestedWarning):
        return f"warning: {message}\n"
    return USUAL(message, category, filename, lineno, line)
