"""The places in the queue: who waits, who runs, and whether there is room for more."""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.core.inputs import InputError
from outrider.serve.errors import QueueFull
from outrider.serve.limits import Limits
from outrider.serve.run.outputs import OutputTask


@dataclass(kw_only=True)
class _Place:
    """The place of one task."""

    tokens: int
    owner: str | None
    waits: bool = True


class QueueSlots:
    """The tasks in flight. Any thread may call; changes in place.

    Args:
        max_slots: Most tasks that run at once.
        max_tokens: Most prompt tokens that wait.
    """

    def __init__(self, limits: Limits, *, max_slots: int, max_tokens: int) -> None:
        self._limits = limits
        self._max_slots = max_slots
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._places: dict[str, _Place] = {}
        self._owners: Counter[str] = Counter()
        self._waiting = 0
        self._waiting_tokens = 0

    @property
    def in_flight(self) -> int:
        """Number of tasks that wait or run."""
        return len(self._places)

    @property
    def running(self) -> int:
        """Number of tasks that run."""
        return len(self._places) - self._waiting

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        return self._waiting

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the tasks that wait for a slot."""
        return self._waiting_tokens

    @property
    def free(self) -> int:
        """How many more tasks would be taken now."""
        return max(0, self._limits.max_queue + self._max_slots - len(self._places))

    def take(self, tasks: Sequence[OutputTask], *, retry_after: float | None = None) -> None:
        """Take a place for each of some tasks, or for none of them. Tasks for free slots do not count as waiting.

        Raises:
            QueueFull: There is no room for all of them.
            InputError: A task of this name is in flight.
        """
        tokens = sum(len(task.prompt) for task in tasks)
        owners = Counter(task.owner for task in tasks if task.owner is not None)
        with self._lock:
            if len({task.id for task in tasks} - self._places.keys()) < len(tasks):
                names = ", ".join(task.id for task in tasks)
                raise InputError(f"the ids of running requests must be unique, got {names}")
            if len(tasks) > self.free:
                raise QueueFull(
                    f"{self._waiting} requests wait already, and at most {self._limits.max_queue} may; try again later",
                    retry_after=retry_after,
                )
            if self._waiting and self._waiting_tokens + tokens > self._max_tokens:
                raise QueueFull(
                    f"{self._waiting_tokens} prompt tokens wait already, and the limit is {self._max_tokens}; try "
                    "again later",
                    code="too_many_tokens_queued",
                    retry_after=retry_after,
                )
            most = self._limits.max_concurrent_per_key
            if most is not None and any(self._owners[owner] + count > most for owner, count in owners.items()):
                raise QueueFull(
                    f"this key may have {most} requests at once; wait for one to end",
                    code="too_many_requests_per_key",
                    retry_after=retry_after,
                )
            for task in tasks:
                self._places[task.id] = _Place(tokens=len(task.prompt), owner=task.owner)
            self._owners.update(owners)
            self._waiting += len(tasks)
            self._waiting_tokens += tokens

    def admit(self, id: str) -> None:
        """A task got its slot."""
        with self._lock:
            self._admit(self._places.get(id))

    def leave(self, id: str) -> None:
        """A task has ended; nothing happens where it has left already."""
        with self._lock:
            place = self._places.pop(id, None)
            self._admit(place)
            if place is not None and place.owner is not None:
                self._owners[place.owner] -= 1
                if not self._owners[place.owner]:
                    del self._owners[place.owner]

    def _admit(self, place: _Place | None) -> None:
        if place is not None and place.waits:
            place.waits = False
            self._waiting -= 1
            self._waiting_tokens -= place.tokens
