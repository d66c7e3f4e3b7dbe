"""Who gets which update: a mailbox per request that somebody waits for, one more for all others."""

from collections import deque

from outrider.engine.output import Update


class Mailboxes:
    """Updates that were made and not read yet. A step that one caller makes may bring updates to others."""

    def __init__(self) -> None:
        self._claimed: dict[str, deque[Update]] = {}
        self._unclaimed: deque[Update] = deque()

    def claim(self, id: str) -> None:
        """From now on the updates of this request wait for whoever asks by its id."""
        self._claimed[id] = deque()

    def disown(self, id: str) -> None:
        """Nobody waits for this request any more; what was not read is dropped."""
        self._claimed.pop(id, None)

    def is_claimed(self, id: str) -> bool:
        """Whether somebody waits for this request."""
        return id in self._claimed

    def deliver(self, update: Update) -> None:
        """Put an update where it will be read."""
        self._claimed.get(update.id, self._unclaimed).append(update)

    def take(self, id: str | None = None) -> list[Update]:
        """All updates of a claimed request that wait, or of all unclaimed ones."""
        box = self._unclaimed if id is None else self._claimed[id]
        found = list(box)
        box.clear()
        return found
