"""Who gets which update: one mailbox for each request that a caller waits for, and one for all other requests."""

from collections import deque

from outrider.engine.output import Update


class Mailboxes:
    """Updates that nobody has read yet. A step that one caller makes also produces updates for other callers."""

    def __init__(self) -> None:
        self._claimed: dict[str, deque[Update]] = {}
        self._unclaimed: deque[Update] = deque()

    @property
    def waits(self) -> bool:
        """Whether an update of an unclaimed request is unread."""
        return bool(self._unclaimed)

    def claim(self, id: str) -> None:
        """Open a mailbox for this request; `take(id)` reads it."""
        self._claimed[id] = deque()

    def disown(self, id: str) -> None:
        """Drop the mailbox of this request, with all unread updates."""
        self._claimed.pop(id, None)

    def is_claimed(self, id: str) -> bool:
        """Whether a caller waits for this request."""
        return id in self._claimed

    def deliver(self, update: Update) -> None:
        """Put an update into the mailbox of its request, or into the common one."""
        self._claimed.get(update.id, self._unclaimed).append(update)

    def take(self, id: str | None = None) -> list[Update]:
        """Remove and return the unread updates of a claimed request, or of all unclaimed requests."""
        box = self._unclaimed if id is None else self._claimed[id]
        updates = list(box)
        box.clear()
        return updates
