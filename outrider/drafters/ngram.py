"""Prompt lookup: what followed the last time that the context ended like this (Saxena 2023)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from outrider.core.types import Frontier, Guess, InputError, Request, Running
from outrider.drafters.automaton import Followers
from outrider.drafters.continuations import CopiedBranches, CopyState
from outrider.drafters.exports import Exports
from outrider.drafters.prediction import PredictedText, counts, note_accepted, promised
from outrider.drafters.protocol import Promise
from outrider.drafters.token_only import USUAL_HITS, TokenOnly

PLACES = 16
"""How many of an end's occurrences are counted for a tree, the newest ones."""


@dataclass(kw_only=True)
class NgramState(CopyState):
    """Where each n-gram of the context last ended, and what is being proposed; changes in place.

    Attributes:
        ends: For each n-gram, the positions behind its occurrences that something follows, the newest last.
        indexed: Tokens of the context that have been indexed.
        start: Position of the context that the next draft copies from; -1 where nothing matched.
    """

    ends: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    indexed: int = 0
    start: int = -1


@dataclass(frozen=True, kw_only=True)
class NgramDrafter(TokenOnly):
    """Copy what followed the newest earlier occurrence of the context's longest recurring end.

    Ends of `prompt_lookup_max` tokens are tried first, then shorter ones down to `prompt_lookup_min`. A step costs
    the tokens that are new since the last one, not the context. A draft ends where the context does.

    A tree of chosen tokens (`dynamic`, `opt`) gets several tokens behind each node: those that followed the newest
    occurrences of any of its ends, with the chances that `continuations` gives them.

    Attributes:
        prompt_lookup_max: Longest end, in tokens, that is looked for; the name is vLLM's, as is the next.
        prompt_lookup_min: Shortest end, in tokens, that is trusted.

    Example:
        >>> from outrider.core.types import Sampling
        >>> request = Request(id="r", prompt=(1, 2, 3, 4, 1, 2), max_new_tokens=8, sampling=Sampling())
        >>> drafter = NgramDrafter()
        >>> state = Running(request=request, tokens=list(request.prompt), slot=0, drafter=drafter,
        ...                 drafter_state=drafter.open(request))
        >>> drafter.begin([state], [1]).tokens
        array([3])

    References:
        Saxena 2023, prompt lookup decoding. https://github.com/apoorvumang/prompt-lookup-decoding
    """

    exports: ClassVar[Exports] = Exports(
        vllm="ngram", sglang="NGRAM", llama="ngram-simple", draws=False, has_files=False
    )

    waits: ClassVar[bool] = True
    usual_hits: ClassVar[float] = USUAL_HITS

    prompt_lookup_max: int = 4
    prompt_lookup_min: int = 2

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise InputError(
                "prompt_lookup_min must be between 1 and prompt_lookup_max="
                f"{self.prompt_lookup_max}, got {self.prompt_lookup_min}"
            )

    @property
    def branching(self) -> CopiedBranches:
        """What guesses for trees of chosen tokens."""
        return CopiedBranches(drafter=self)

    def open(self, request: Request) -> NgramState:
        return NgramState(prediction=PredictedText.of(request))

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        return Guess(tokens=np.array([self._begin(s.tokens, _ngram_state(s)) for s in states]))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        tokens = []
        for owner, depth in zip(frontier.owners.tolist(), frontier.depths.tolist(), strict=True):
            drafter_state = _ngram_state(states[owner])
            if drafter_state.prediction is not None and drafter_state.prediction.drafts:
                tokens.append(drafter_state.prediction.further(depth))
                continue
            context, at = states[owner].tokens, drafter_state.start + depth
            tokens.append(context[at] if at < len(context) else -1)
        return Guess(tokens=np.array(tokens))

    def promise(self, state: Running, most: int) -> Promise | None:
        drafter_state, context = _ngram_state(state), state.tokens
        if (promise := promised(drafter_state.prediction, context, most)) is not None:
            return promise
        match = self._look(context, drafter_state)
        return Promise(match=match, tokens=min(most, len(context) - drafter_state.start)) if match else None

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        note_accepted([_ngram_state(state).prediction for state in states], paths)

    def predicted(self, state: object) -> tuple[int, int]:
        return counts(state.prediction if isinstance(state, NgramState) else None)

    def state_of(self, state: Running) -> NgramState:
        return _ngram_state(state)

    def look(self, state: Running) -> tuple[int, ...]:
        """Index what is new. The end of the context says where its own ends are."""
        self._read(state.tokens, _ngram_state(state))
        return tuple(state.tokens[-self.prompt_lookup_max :])

    def follow(self, found: tuple[int, ...], token: int) -> tuple[int, ...]:
        return (*found, token)[-self.prompt_lookup_max :]

    def ends(self, state: Running, found: tuple[int, ...]) -> Iterator[tuple[int, Followers]]:
        for size in range(len(found), self.prompt_lookup_min - 1, -1):
            followers = dict[int, tuple[int, int]]()
            for place in _ngram_state(state).ends.get(found[len(found) - size :], [])[-PLACES:]:
                token = state.tokens[place]
                followers[token] = followers.get(token, (0, 0))[0] + 1, place
            yield size, followers

    def _begin(self, context: Sequence[int], drafter_state: NgramState) -> int:
        predicted = -1 if drafter_state.prediction is None else drafter_state.prediction.begin(context)
        return predicted if predicted >= 0 else self._first(context, drafter_state)

    def _first(self, context: Sequence[int], drafter_state: NgramState) -> int:
        return context[drafter_state.start] if self._look(context, drafter_state) else -1

    def _look(self, context: Sequence[int], drafter_state: NgramState) -> int:
        """Length of the longest end of the context that recurs; 0 if none does. Its place goes into `start`."""
        self._read(context, drafter_state)
        drafter_state.start = -1
        for size in range(min(self.prompt_lookup_max, len(context)), self.prompt_lookup_min - 1, -1):
            if places := drafter_state.ends.get(tuple(context[-size:])):
                drafter_state.start = places[-1]
                return size
        return 0

    def _read(self, context: Sequence[int], drafter_state: NgramState) -> None:
        """Index the new tokens of a context."""
        for end in range(max(drafter_state.indexed, 1), len(context)):
            for size in range(self.prompt_lookup_min, min(self.prompt_lookup_max, end) + 1):
                drafter_state.ends.setdefault(tuple(context[end - size : end]), []).append(end)
        drafter_state.indexed = len(context)


def _ngram_state(state: Running) -> NgramState:
    if not isinstance(state.drafter_state, NgramState):
        raise TypeError(f"ngram keeps an NgramState, got {type(state.drafter_state).__name__}")
    return state.drafter_state
