"""Suffix decoding: what most often followed the recurring ends of the context (Oliaro et al. 2024)."""

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Frontier, Guess, InputError, Request, Running
from outrider.drafters.automaton import SEPARATOR, CopiedTokens, Followers, Match, SuffixAutomaton
from outrider.drafters.continuations import CopiedBranches, CopyState
from outrider.drafters.exports import Exports
from outrider.drafters.memory import LEAD, KnownTexts, TextMemory
from outrider.drafters.prediction import PredictedText, counts, note_accepted, promised
from outrider.drafters.protocol import Promise
from outrider.drafters.token_only import USUAL_HITS, TokenOnly
from outrider.lengths.acceptance import copy_rate
from outrider.lm.target_info import TargetInfo

REACH = 64
"""Longest end of a context, in tokens, that is looked for in other texts."""
LEAST = 0.1
"""A draft ends before the product of its tokens' shares falls below this."""
LOOK = 16
"""Tokens of a draft by which possible drafts are compared. So a shorter draft is the beginning of a longer one."""
LIKELY = [copy_rate(match) for match in range(129)]
"""How likely a copied token is right, by how many tokens before it match."""
READ = 32
"""Tokens of ended requests that are read in a step, for each request that drafts. A step emits fewer."""


@dataclass(kw_only=True)
class SuffixState(CopyState):
    """What is known of one request; changes in place.

    Attributes:
        automaton: Of the request's own tokens.
        remembers: Whether it may draft from the texts of other requests.
        draft: The newest draft.
        looked: Of how many tokens the context was for which it was found.
        depth: How many tokens were looked for.
        source: The remembered texts that it was found in, if it was.
    """

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    remembers: bool = True
    draft: CopiedTokens = field(default_factory=CopiedTokens)
    looked: int = 0
    depth: int = 0
    source: KnownTexts | None = None


@dataclass(frozen=True, kw_only=True)
class SuffixDrafter(CheckedOptions, TokenOnly):
    r"""Follow the ends of the context that have occurred before: in the request, in ended requests, or in a corpus.

    For each end that has occurred before, the tokens that most often followed it are a possible draft, the latest on a
    tie. The share $s_i$ of a token among all that followed there is how likely it seems. Of the possible drafts the one
    with the most expected tokens $\sum_j \prod_{i \le j} s_i$ is taken; of equal ones that of the longest end, and the
    request's own before others.

    A tree of chosen tokens (`dynamic`, `opt`) gets several tokens behind each node, those that followed any of its
    ends, with the chances that `continuations` gives them.

    The outputs of ended requests are remembered, for requests of the same owner. A request that repeats its text by a
    seed does not draft from them, because what it draws would then depend on other requests.

    Attributes:
        min_match: Shortest end, in tokens, that is trusted.
        max_warm_tokens: Most tokens of ended requests that are remembered, of all owners together. Those whose texts
            were used longest ago are forgotten. 0 remembers nothing. A token takes about a kilobyte.
        corpus: JSON lines with `text` or `tokens`, read once when the engine is put together; entries stay apart.

    Example:
        >>> from outrider.core.types import Sampling
        >>> request = Request(id="r", prompt=(5, 1, 2, 5, 3, 2, 5, 3, 9, 2, 5), max_new_tokens=8, sampling=Sampling())
        >>> drafter = SuffixDrafter()
        >>> state = Running(request=request, tokens=list(request.prompt), slot=0, drafter=drafter,
        ...                 drafter_state=drafter.open(request))
        >>> drafter.begin([state], [1]).tokens
        array([3])

    References:
        Oliaro et al. 2024, SuffixDecoding. https://arxiv.org/abs/2411.04975
    """

    exports: ClassVar[Exports] = Exports(vllm="suffix", draws=False, has_files=False)

    waits: ClassVar[bool] = True
    usual_hits: ClassVar[float] = USUAL_HITS
    looks_up: ClassVar[bool] = True

    min_match: int = option(2, least=1)
    max_warm_tokens: int = option(1 << 15, least=0, note=" (0 remembers nothing)")
    corpus: str | None = None
    _shared: SuffixAutomaton | None = field(default=None, repr=False, compare=False)
    _memory: TextMemory = field(default_factory=lambda: TextMemory(0), repr=False, compare=False)

    def bind(self, target_info: TargetInfo) -> "SuffixDrafter":
        """Read the corpus, if there is one, and begin to remember."""
        shared = None if self.corpus is None else _read(Path(self.corpus), target_info)
        return replace(self, _shared=shared, _memory=TextMemory(self.max_warm_tokens))

    def open(self, request: Request) -> SuffixState:
        return SuffixState(prediction=PredictedText.of(request), remembers=not request.repeats)

    @property
    def branching(self) -> CopiedBranches:
        """What guesses for trees of chosen tokens."""
        return CopiedBranches(drafter=self)

    def look_up(self, states: Sequence[Running], depths: Sequence[int]) -> list[Sequence[float]]:
        r"""Find the next draft of each request.

        A token with the share $s$ behind m matching tokens is promised with $s\,m / (m + 2)$: the longer the match, the
        likelier the copy. So it was in greedy answers of SmolLM2-135M-Instruct: 0.64 behind 2 or 3 tokens, 0.80 behind
        4 to 7, 0.95 behind 16 to 31; in drawn ones 0.40, 0.59 and 0.80.
        """
        self._find(states, depths)
        return [self._rates(state, depth) for state, depth in zip(states, depths, strict=True)]

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        self._find(states, depths)
        tokens = []
        for state in states:
            drafter_state = _suffix_state(state)
            prediction, draft = drafter_state.prediction, drafter_state.draft.tokens
            predicted = -1 if prediction is None else prediction.begin(state.tokens)
            tokens.append(predicted if predicted >= 0 else draft[0] if draft else -1)
        return Guess(tokens=np.array(tokens))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        tokens = []
        for owner, depth in zip(frontier.owners.tolist(), frontier.depths.tolist(), strict=True):
            drafter_state = _suffix_state(states[owner])
            if drafter_state.prediction is not None and drafter_state.prediction.drafts:
                tokens.append(drafter_state.prediction.further(depth))
                continue
            draft = drafter_state.draft.tokens
            tokens.append(draft[depth] if depth < len(draft) else -1)
        return Guess(tokens=np.array(tokens))

    def promise(self, state: Running, most: int) -> Promise | None:
        if (promise := promised(_suffix_state(state).prediction, state.tokens, most)) is not None:
            return promise
        self._find([state], [most])
        draft = _suffix_state(state).draft
        return Promise(match=draft.length, tokens=min(most, len(draft.tokens))) if draft.tokens else None

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        for state, path in zip(states, paths, strict=True):
            drafter_state = _suffix_state(state)
            if path and drafter_state.source is not None:
                self._memory.use(drafter_state.source, drafter_state.draft.place)
            drafter_state.source = None
        note_accepted([_suffix_state(state).prediction for state in states], paths)

    def ended(self, state: Running) -> None:
        if state.output:
            lead = max(0, len(state.request.prompt) - LEAD)
            self._memory.add(state.request.owner, state.tokens[lead:])

    def forget(self) -> None:
        self._memory.forget()

    def predicted(self, state: object) -> tuple[int, int]:
        return counts(state.prediction if isinstance(state, SuffixState) else None)

    def state_of(self, state: Running) -> SuffixState:
        return _suffix_state(state)

    def look(self, state: Running) -> list[Match]:
        """The longest end of a request's context in each text that it may draft from. Where that of a remembered text
        is the longest, a draft of which a token is accepted counts as a use of that text.
        """
        self._read([state])
        drafter_state = _suffix_state(state)
        own = drafter_state.automaton
        here = own.repeated_suffix()
        found = [longest := Match(automaton=own, state=here, length=own.length[here])]
        drafter_state.source = None
        for automaton, known in self._others(state.request, drafter_state):
            place, length = automaton.match(state.tokens[-REACH:])
            found.append(Match(automaton=automaton, state=place, length=length))
            place, length = automaton.shorten(place, length)
            if length > longest.length:
                longest, drafter_state.source = found[-1], known
                drafter_state.draft = automaton.continued(place, length, 1)
        return found

    def follow(self, found: Sequence[Match], token: int) -> list[Match]:
        return [match.step(token) for match in found]

    def ends(self, state: Running, found: Sequence[Match]) -> Iterator[tuple[int, Followers]]:
        return heapq.merge(*[match.ends(self.min_match) for match in found], key=lambda end: -end[0])

    def _find(self, states: Sequence[Running], depths: Sequence[int]) -> None:
        """Find the drafts of requests whose contexts have grown, of at most so many tokens each."""
        due = [
            (state, drafter_state, depth)
            for state, drafter_state, depth in zip(states, map(_suffix_state, states), depths, strict=True)
            if drafter_state.looked != len(state.tokens) or drafter_state.depth < depth
        ]
        self._read([state for state, _, _ in due])
        for state, drafter_state, depth in due:
            drafter_state.looked, drafter_state.depth = len(state.tokens), max(depth, LOOK)
            drafter_state.draft, drafter_state.source = self._best_draft(state, drafter_state)

    def _read(self, states: Sequence[Running]) -> None:
        """Read the new tokens of some requests, and some of what is to be remembered."""
        self._memory.read(READ * len(states))
        for state in states:
            automaton = _suffix_state(state).automaton
            for token in state.tokens[automaton.size :]:
                automaton.append(token)

    def _best_draft(self, state: Running, drafter_state: SuffixState) -> tuple[CopiedTokens, KnownTexts | None]:
        """The best draft of the wanted depth, and the remembered texts that it comes from, if it does."""
        own, depth = drafter_state.automaton, drafter_state.depth
        here = own.repeated_suffix()
        best, source = self._best(own, here, own.length[here], depth), None
        for automaton, known in self._others(state.request, drafter_state):
            found = self._best(automaton, *automaton.match(state.tokens[-REACH:]), depth)
            if (found.expected, found.length) > (best.expected, best.length):
                best, source = found, known
        return best, source

    def _rates(self, state: Running, depth: int) -> Sequence[float]:
        drafter_state = _suffix_state(state)
        draft = drafter_state.draft
        if (promise := promised(drafter_state.prediction, state.tokens, depth)) is not None:
            return LIKELY[promise.match : promise.match + promise.tokens]
        return [share * LIKELY[min(draft.length + i, len(LIKELY) - 1)] for i, share in enumerate(draft.shares[:depth])]

    def _best(self, automaton: SuffixAutomaton, state: int, length: int, depth: int) -> CopiedTokens:
        return automaton.best_continuation(state, length, depth, min_match=self.min_match, min_reach=LEAST)

    def _others(
        self, request: Request, drafter_state: SuffixState
    ) -> Iterator[tuple[SuffixAutomaton, KnownTexts | None]]:
        """What other texts a request may draft from, and which of them are remembered ones."""
        if drafter_state.remembers:
            yield from ((known.automaton, known) for known in self._memory.known(request.owner))
        if self._shared is not None:
            yield self._shared, None


def _read(path: Path, target_info: TargetInfo) -> SuffixAutomaton:
    if not path.is_file():
        raise InputError(f"there is no corpus file {path}; give JSON lines with `text` or `tokens`")
    automaton = SuffixAutomaton()
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                for token in _entry(line, f"line {number} of {path}", target_info):
                    automaton.append(token)
                automaton.append(SEPARATOR)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text; give JSON lines with `text` or `tokens`") from error
    return automaton


def _entry(line: str, place: str, target_info: TargetInfo) -> list[int]:
    """Token ids of one entry of a corpus. They are checked, because a drafted id that the target lacks would fail."""
    if not line.strip():
        return []
    try:
        entry = json.loads(line)
    except (RecursionError, ValueError):
        entry = None
    tokens, text = (entry.get("tokens"), entry.get("text")) if isinstance(entry, dict) else (None, None)
    if tokens is None and isinstance(text, str):
        if target_info.tokenizer is None:
            raise InputError(f"{place} holds text and there is no tokenizer; give `tokens` instead")
        tokens = target_info.tokenizer(text, add_special_tokens=False)["input_ids"]
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise InputError(f"{place} is not a JSON object with `text`, a string, or `tokens`, a list of token ids")
    if wrong := [token for token in tokens if not 0 <= token < target_info.vocab_size]:
        raise InputError(f"{place}: token id {wrong[0]} is not in 0 .. {target_info.vocab_size - 1}")
    return tokens


def _suffix_state(state: Running) -> SuffixState:
    if not isinstance(state.drafter_state, SuffixState):
        raise TypeError(f"suffix keeps a SuffixState, got {type(state.drafter_state).__name__}")
    return state.drafter_state
