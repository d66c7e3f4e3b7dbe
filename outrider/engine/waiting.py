"""The requests that wait for a slot: the lowest priority number first, then the order in which they came."""

from collections import deque

from outrider.engine.seats import Seat


class Waiting:
    """Waiting requests. Changes in place.

    Attributes:
        num_tokens: Tokens of all waiting prompts.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._by_priority: dict[int, deque[Seat]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def add(self, seat: Seat) -> None:
        """Add a request behind all others of its priority."""
        self._by_priority.setdefault(seat.request.priority, deque()).append(seat)
        self.num_tokens += len(seat.request.prompt)

    def in_turn(self) -> list[Seat]:
        """All of them, in the order in which they get slots."""
        return [seat for priority in sorted(self._by_priority) for seat in self._by_priority[priority]]

    def remove(self, seat: Seat) -> None:
        """Remove a request, if it waits."""
        line = self._by_priority.get(seat.request.priority)
        if seat.running is not None or line is None or seat not in line:
            return
        line.remove(seat)
        self.num_tokens -= len(seat.request.prompt)
        if not line:
            del self._by_priority[seat.request.priority]
