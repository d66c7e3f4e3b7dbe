"""The data of a step, made in a thread while the step before runs."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from outrider.host.threads import release_threads
from outrider.learning.batch import TrainBatch


@dataclass(frozen=True, kw_only=True)
class StepData:
    """The rows of an optimizer step that one process runs.

    Attributes:
        parts: What it runs at once, one after the other.
        num_learnt: Learnt tokens of the whole step, over all processes.
    """

    parts: Sequence[TrainBatch]
    num_learnt: int


class Prefetch:
    """Makes the data of one step ahead.

    The data of a step depends on its number alone, so nothing changes by that but the time.

    Args:
        make: Makes the data of a step.
        steps: How many steps there are; no data is made behind the last.
        begin: Called in the thread before anything else.
    """

    def __init__(self, make: Callable[[int], StepData], steps: int, begin: Callable[[], object] | None = None) -> None:
        self._make, self._steps = make, steps
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data", initializer=begin)
        self._begun: dict[int, Future[StepData]] = {}

    def __call__(self, step: int) -> StepData:
        """The data of a step. What goes wrong while it is made is raised here."""
        data = self._started(step)
        if step + 1 < self._steps:
            self._begun[step + 1] = self._worker.submit(self._data_of, step + 1)
        return data.result()

    def close(self) -> None:
        """Drop what was made ahead, and end the thread."""
        self._worker.shutdown(cancel_futures=True)

    def _data_of(self, step: int) -> StepData:
        """The data of a step, in the thread."""
        try:
            return self._make(step)
        finally:
            release_threads()

    def _started(self, step: int) -> Future[StepData]:
        future = self._begun.pop(step, None)
        return self._worker.submit(self._data_of, step) if future is None else future
