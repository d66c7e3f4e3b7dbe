"""The engine of a command."""

from transformers.utils import logging

from outrider.assembly import assemble
from outrider.engine.engine import Engine
from outrider.setup import Setup


def opened(setup: Setup) -> Engine:
    """The engine that a setup describes, without transformers' own messages."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return assemble(setup)
