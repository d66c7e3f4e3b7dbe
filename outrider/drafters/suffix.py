"""Suffix decoding: what most often followed the longest recurring end of the context (Oliaro et al. 2024)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Frontier, Guess, InputError, Request, Running
from outrider.drafters.automaton import SEPARATOR, SuffixAutomaton
from outrider.drafters.exports import Exports
from outrider.drafters.prediction import PredictedText, counts, note_accepted, promised
from outrider.drafters.protocol import Promise
from outrider.drafters.token_only import USUAL_HITS, TokenOnly
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class SuffixMatch:
    """The longest end of the context that one automaton knows.

    Attributes:
        automaton: The automaton.
        state: Its state after that end.
        length: Length of that end, in tokens.
    """

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def step(self, token: int) -> "SuffixMatch":
        state, length = self.automaton.step(self.state, self.length, token)
        return replace(self, state=state, length=length)

    def shorten(self) -> "SuffixMatch":
        state, length = self.automaton.shorten(self.state, self.length)
        return replace(self, state=state, length=length)


@dataclass(kw_only=True)
class SuffixState:
    """One request's automaton, its place in the shared one, the draft's matches by node, and the text that the client
    predicts, if there is one; changes in place.
    """

    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    shared: SuffixMatch | None = None
    drafting: dict[int, list[SuffixMatch]] = field(default_factory=dict)
    prediction: PredictedText | None = None


@dataclass(frozen=True, kw_only=True)
class SuffixDrafter(CheckedOptions, TokenOnly):
    """Follow the longest end of the context that has occurred before, in the request or in a shared corpus.

    Where several tokens followed it, the most frequent one is proposed, the latest on a tie. The request's own
    automaton wins where both know an equally long end.

    Attributes:
        min_match: Shortest end, in tokens, that is trusted.
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

    min_match: int = option(2, least=1)
    corpus: str | None = None
    _shared: SuffixAutomaton | None = field(default=None, repr=False, compare=False)

    def bind(self, target_info: TargetInfo) -> "SuffixDrafter":
        """Read the corpus, if there is one."""
        return self if self.corpus is None else replace(self, _shared=_read(Path(self.corpus), target_info))

    def open(self, request: Request) -> SuffixState:
        shared = None if self._shared is None else SuffixMatch(automaton=self._shared)
        return SuffixState(shared=shared, prediction=PredictedText.of(request))

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        tokens = []
        for state in states:
            drafter_state = _suffix_state(state)
            drafter_state.drafting = {0: _matches(state)}
            predicted = -1 if drafter_state.prediction is None else drafter_state.prediction.begin(state.tokens)
            tokens.append(predicted if predicted >= 0 else self._likeliest(drafter_state.drafting[0]))
        return Guess(tokens=np.array(tokens))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        tokens = []
        for owner, node, parent, depth, token in zip(
            frontier.owners.tolist(),
            frontier.nodes.tolist(),
            frontier.parents.tolist(),
            frontier.depths.tolist(),
            frontier.tokens.tolist(),
            strict=True,
        ):
            drafter_state = _suffix_state(states[owner])
            if drafter_state.prediction is not None and drafter_state.prediction.drafts:
                tokens.append(drafter_state.prediction.further(depth))
                continue
            drafter_state.drafting[node] = [match.step(token) for match in drafter_state.drafting[parent]]
            tokens.append(self._likeliest(drafter_state.drafting[node]))
        return Guess(tokens=np.array(tokens))

    def promise(self, state: Running, most: int) -> Promise | None:
        if (promise := promised(_suffix_state(state).prediction, state.tokens, most)) is not None:
            return promise
        match = _best(_matches(state)).length
        return Promise(match=match, tokens=most) if match >= self.min_match else None

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        note_accepted([_suffix_state(state).prediction for state in states], paths)

    def predicted(self, state: object) -> tuple[int, int]:
        return counts(state.prediction if isinstance(state, SuffixState) else None)

    def _likeliest(self, matches: Sequence[SuffixMatch]) -> int:
        best = _best(matches)
        return best.automaton.likeliest(best.state) if best.length >= self.min_match else -1


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


def _matches(state: Running) -> list[SuffixMatch]:
    """The longest ends of a context that its own automaton and the shared one know."""
    drafter_state = _suffix_state(state)
    automaton = drafter_state.automaton
    for token in state.tokens[automaton.size :]:
        automaton.append(token)
        drafter_state.shared = None if drafter_state.shared is None else drafter_state.shared.step(token)
    here = automaton.repeated_suffix()
    own = SuffixMatch(automaton=automaton, state=here, length=automaton.length[here])
    return [own] if drafter_state.shared is None else [own, drafter_state.shared]


def _best(matches: Sequence[SuffixMatch]) -> SuffixMatch:
    """The longest of some matches that something follows; the first of equal ones."""
    return max((match.shorten() for match in matches), key=lambda match: match.length)


def _suffix_state(state: Running) -> SuffixState:
    if not isinstance(state.drafter_state, SuffixState):
        raise TypeError(f"suffix keeps a SuffixState, got {type(state.drafter_state).__name__}")
    return state.drafter_state
