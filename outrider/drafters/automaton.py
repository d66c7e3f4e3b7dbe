"""A suffix automaton over token ids, grown token by token, that knows what followed each substring, and how often."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

SUFFIXES = 64
"""How many suffixes of the text learn what followed them, longest first; only periodic text has more."""

ENDS = 8
"""How many of a match's suffixes are compared, longest first. Those that occur at the same places count once."""

Followers = Mapping[int, tuple[int, int]]
"""For each token that followed some tokens: how often, and where last."""

SEPARATOR = -1
"""Stands between texts that do not continue one another; nothing is ever said to be followed by it."""


@dataclass(kw_only=True)
class CopiedTokens:
    """What most often followed an end of a context in a text, token by token.

    Attributes:
        tokens: The tokens.
        shares: The share of each token in all that followed there.
        length: Tokens of the end of the context.
        place: Where in the text the first token stood last.
    """

    tokens: list[int] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    length: int = 0
    place: int = -1

    @property
    def expected(self) -> float:
        """How many of the tokens will come, if each comes as often as its share says."""
        total, reached = 0.0, 1.0
        for share in self.shares:
            reached *= share
            total += reached
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Match:
    """An end of a context that occurs in a text.

    Attributes:
        automaton: Of the text.
        state: Its state.
        length: Its tokens.
    """

    automaton: "SuffixAutomaton"
    state: int
    length: int

    def step(self, token: int) -> "Match":
        """The longest end that still occurs behind one more token."""
        state, length = self.automaton.step(self.state, self.length, token)
        return Match(automaton=self.automaton, state=state, length=length)

    def ends(self, min_match: int) -> Iterator[tuple[int, Followers]]:
        """The match and its suffixes, longest first: the length of each, and what followed it."""
        state, length = self.state, self.length
        for _ in range(ENDS):
            if length < min_match:
                break
            yield length, self.automaton.followers(state)
            state = self.automaton.link[state]
            length = self.automaton.length[state]


class SuffixAutomaton:
    """Recognises every substring of what was fed to it; a state stands for substrings with the same end positions.

    Growing by one token costs O(1) amortised, and one count for each suffix that occurs elsewhere too.

    Example:
        >>> automaton = SuffixAutomaton([1, 2, 3, 1, 2])
        >>> automaton.likeliest(automaton.repeated_suffix())
        3

    References:
        Blumer et al. 1985, The smallest automaton recognizing the subwords of a text.
        https://doi.org/10.1016/0304-3975(85)90157-4
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.size = 0
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self._followers: list[dict[int, tuple[int, int]]] = [{}]
        self._last = 0
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Grow by one token, or by the separator."""
        if token != SEPARATOR:
            self._count(token)
        self.size += 1
        new = self._state(self.length[self._last] + 1)
        here = self._last
        while here >= 0 and token not in self.next[here]:
            self.next[here][token] = new
            here = self.link[here]
        if here < 0:
            self.link[new] = 0
        else:
            old = self.next[here][token]
            if self.length[old] == self.length[here] + 1:
                self.link[new] = old
            else:
                clone = self._state(self.length[here] + 1)
                self.next[clone] = dict(self.next[old])
                self._followers[clone] = dict(self._followers[old])
                self.link[clone] = self.link[old]
                while here >= 0 and self.next[here].get(token) == old:
                    self.next[here][token] = clone
                    here = self.link[here]
                self.link[old] = self.link[new] = clone
        self._last = new

    def repeated_suffix(self) -> int:
        """The state of the longest suffix of the text that also occurs earlier; 0 is the empty one."""
        return max(self.link[self._last], 0)

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow a match through one more token: state and length of the longest suffix that still occurs."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = self.length[state]
        if token in self.next[state]:
            return self.next[state][token], length + 1
        return 0, 0

    def match(self, tokens: Iterable[int]) -> tuple[int, int]:
        """State and length of the longest suffix of some tokens that occurs."""
        state = length = 0
        for token in tokens:
            state, length = self.step(state, length, token)
        return state, length

    def shorten(self, state: int, length: int) -> tuple[int, int]:
        """The longest suffix of a match that something follows; the empty one if need be."""
        while state > 0 and not self._followers[state]:
            state = self.link[state]
            length = self.length[state]
        return state, length

    def followers(self, state: int) -> Followers:
        """What followed a state's substrings."""
        return self._followers[state]

    def likeliest(self, state: int) -> int:
        """The token that followed a state's substrings most often, the latest of them on a tie; -1 if none did."""
        followers = self._followers[state]
        return max(followers, key=followers.__getitem__) if followers else -1

    def continued(
        self, state: int, length: int, most: int, *, min_match: int = 1, min_reach: float = 0.0
    ) -> CopiedTokens:
        """What most often followed a match, token by token. Where nothing follows it, it is shortened.

        Args:
            state: The state of the match.
            length: Its length.
            most: Most tokens.
            min_match: The continuation ends where a shorter match would have to be followed.
            min_reach: It ends before the product of its shares falls below this.
        """
        found, reached = CopiedTokens(length=length), 1.0
        while len(found.tokens) < most:
            state, length = self.shorten(state, length)
            if length < min_match or (token := self.likeliest(state)) < 0:
                break
            followers = self._followers[state]
            share = followers[token][0] / sum([count for count, _ in followers.values()])
            reached *= share
            if reached < min_reach:
                break
            if not found.tokens:
                found.place = followers[token][1]
            found.tokens.append(token)
            found.shares.append(share)
            state, length = self.next[state][token], length + 1
        return found

    def best_continuation(
        self, state: int, length: int, most: int, *, min_match: int = 1, min_reach: float = 0.0
    ) -> CopiedTokens:
        """Of the continuations of a match and of its suffixes, the one that expects the most tokens; of equal ones that
        of the longest. The arguments are those of `continued`.
        """
        best = CopiedTokens()
        for _ in range(ENDS):
            if length < min_match or best.expected >= most:
                break
            found = self.continued(state, length, most, min_match=min_match, min_reach=min_reach)
            if found.expected > best.expected:
                best = found
            state = self.link[state]
            length = self.length[state]
        return best

    def _count(self, token: int) -> None:
        """Note for every suffix of the text, so far unfollowed at its newest occurrence, that `token` follows."""
        here = self._last
        for _ in range(SUFFIXES):
            followers = self._followers[here]
            followers[token] = (followers.get(token, (0, 0))[0] + 1, self.size)
            here = self.link[here]
            if here < 0:
                break

    def _state(self, length: int) -> int:
        self.next.append({})
        self.link.append(-1)
        self.length.append(length)
        self._followers.append({})
        return len(self.length) - 1
