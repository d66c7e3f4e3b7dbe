"""What an engine remembers of ended requests: their texts, apart by owner, the most recently used ones."""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafters.automaton import SEPARATOR, SuffixAutomaton

LEAD = 64
"""How many tokens of its prompt a remembered output keeps, so that its beginning is found behind the same prompt."""


@dataclass(kw_only=True)
class KnownTexts:
    """Texts of one owner, and an automaton of them all; changes in place.

    Attributes:
        owner: Whose texts they are.
        automaton: Knows all of them, each with a separator behind it.
        texts: The texts, in the order in which they were read.
        starts: Where each begins in what the automaton has read.
        used: Numbers of the texts that were used since.
    """

    owner: str | None
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    texts: list[tuple[int, ...]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    used: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True)
class NewText:
    """A text that is to be remembered."""

    owner: str | None
    tokens: tuple[int, ...]


class TextMemory:
    """Texts of ended requests, which those of the same owner draft from. Changes in place.

    There are two generations of texts, the recent and the older ones. New texts, and older ones that were used, become
    recent. When the recent ones hold half of the tokens that may be kept, the older ones are forgotten, and the recent
    ones become the older. So each token is read once, and once more if it is used, and a text that is forgotten was
    used before all texts that are kept.

    A text is read a few tokens at a time, because requests wait meanwhile.

    Attributes:
        num_read: Tokens that were read so far.

    Args:
        max_tokens: Most tokens that are kept.

    Example:
        >>> memory = TextMemory(100)
        >>> memory.add("a", [1, 2, 3, 4])
        >>> memory.read(99)
        >>> len(memory.known("a")), len(memory.known("b"))
        (1, 0)
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_read = 0
        self._half = max_tokens // 2
        self._recent: dict[str | None, KnownTexts] = {}
        self._older: dict[str | None, KnownTexts] = {}
        self._num_recent = 0
        self._new: deque[NewText] = deque()
        self._num_new = 0
        self._begun = 0

    def add(self, owner: str | None, tokens: Sequence[int]) -> None:
        """Remember a text, at most the newest half of all tokens that may be kept. Later calls of `read` read it."""
        text = NewText(owner=owner, tokens=tuple(tokens[-self._half :]) if self._half else ())
        if not text.tokens or text in self._new:
            return
        self._new.append(text)
        self._num_new += len(text.tokens)
        # Where nobody reads, because nobody drafts, those that have waited longest are dropped.
        first = int(self._begun > 0)
        while self._num_new > self._half and len(self._new) > first + 1:
            self._num_new -= len(self._new[first].tokens)
            del self._new[first]

    def read(self, most: int) -> None:
        """Read at most so many tokens of the texts that are to be remembered."""
        while most > 0 and self._new:
            text = self._new[0]
            if not self._begun and not self._make_room(text):
                continue
            known = self._recent[text.owner]
            chunk = text.tokens[self._begun : self._begun + most]
            for token in chunk:
                known.automaton.append(token)
            self._begun += len(chunk)
            self.num_read += len(chunk)
            most -= len(chunk)
            if self._begun == len(text.tokens):
                known.automaton.append(SEPARATOR)
                self._leave_queue()

    def known(self, owner: str | None) -> list[KnownTexts]:
        """The texts of an owner, recent ones first."""
        return [texts[owner] for texts in (self._recent, self._older) if owner in texts]

    def use(self, known: KnownTexts, place: int) -> None:
        """Note that a text was drafted from, to keep it longer.

        Args:
            known: The texts that it belongs to.
            place: A place in what their automaton has read.
        """
        if self._older.get(known.owner) is known:
            number = bisect_right(known.starts, place) - 1
            if number not in known.used:
                known.used.add(number)
                self.add(known.owner, known.texts[number])

    def forget(self) -> None:
        """Forget all texts."""
        self._recent, self._older, self._num_recent = {}, {}, 0
        self._new.clear()
        self._num_new = self._begun = 0

    def _make_room(self, text: NewText) -> bool:
        """Get ready to read a text. False if it need not be read, because it is known."""
        known = self._recent.get(text.owner)
        if known is not None and text.tokens in known.texts:
            self._leave_queue()
            return False
        if self._num_recent + len(text.tokens) > self._half:
            self._older, self._recent, self._num_recent = self._recent, {}, 0
        known = self._recent.setdefault(text.owner, KnownTexts(owner=text.owner))
        known.texts.append(text.tokens)
        known.starts.append(known.automaton.size)
        self._num_recent += len(text.tokens)
        return True

    def _leave_queue(self) -> None:
        """Take the first text out of the queue."""
        self._num_new -= len(self._new.popleft().tokens)
        self._begun = 0
