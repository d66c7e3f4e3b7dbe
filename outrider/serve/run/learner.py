"""A draft model that learns from the requests of a server. A mistake in it ends the learning, never the service."""

import logging

from outrider.decoding.protocol import Cycle
from outrider.engine.engine import Engine
from outrider.training.online.learning import Learning

log = logging.getLogger("outrider.serve")


class OnlineLearner:
    """Keeps what a draft model does to learn apart from the requests that it learns from.

    Optimizer steps and snapshots are made in a thread of their own. The engine's thread only notes what a verification
    found, and puts new weights in place between two steps.

    Args:
        engine: The engine, which learns already and serves nobody yet.
        learning: What it learns with.
    """

    def __init__(self, engine: Engine, learning: Learning) -> None:
        self._engine, self._learning = engine, learning
        self._watch, self._between = engine.watch, engine.between
        engine.watch, engine.between = self._note, self._swap

    @property
    def num_rounds(self) -> int:
        """Number of optimizer steps so far, over all draft models."""
        return sum(pupil.draft.num_rounds for pupil in self._learning.pupils)

    def finish(self) -> None:
        """End learning when nothing is served any more. The last snapshot is written."""
        try:
            self._learning.finish()
        except Exception as error:
            log.error("what the draft model learnt last is lost", exc_info=error)

    def _note(self, cycle: Cycle) -> None:
        try:
            if self._watch is not None:
                self._watch(cycle)
        except Exception as error:
            self._stop(error)

    def _swap(self) -> None:
        try:
            if self._between is not None:
                self._between()
        except Exception as error:
            self._stop(error)

    def _stop(self, error: Exception) -> None:
        """Go on with the weights that new requests have now."""
        log.error("the draft model has stopped learning", exc_info=error)
        self._watch = self._between = None
