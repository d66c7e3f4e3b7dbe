"""Several drafters for one request: copy where that promises more than the last of them, otherwise let it draft."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast

import numpy as np
from jaxtyping import Float

from outrider.core.types import Guess, Request, Running, Step
from outrider.drafters.protocol import Copying, fits
from outrider.drafters.several import CombinedDrafter, SeveralOf
from outrider.drafters.union import UnionDrafter, UnionOf
from outrider.lengths.acceptance import FADE, PRIOR, copy_rate
from outrider.lengths.costs import CostTable
from outrider.lm.target_info import TargetInfo

WEIGHT = 8.0
"""As how many tested tokens the acceptance counts that is taken for granted before any is seen."""
LONGEST = 16
"""Matches of so many tokens and longer ones are of one kind."""
FORWARD = 0.1
"""What a forward of the last drafter costs, as a share of a step that copies, where costs are not known."""

Kind = tuple[int, int]
"""A kind of drafts: the drafter's number, and for copies how long the match was, as `int.bit_length`; otherwise 0."""


@dataclass(frozen=True, kw_only=True)
class DraftWorth:
    """How many draft tokens of a kind were tested, and how many of these were accepted. Earlier steps count less."""

    tested: float = 0.0
    accepted: float = 0.0

    def rate(self, prior: float) -> float:
        """The acceptance of the next token.

        Example:
            >>> DraftWorth().rate(0.5), DraftWorth(tested=8, accepted=8).rate(0.5)
            (0.5, 0.75)
        """
        return (self.accepted + WEIGHT * prior) / (self.tested + WEIGHT)

    def after(self, tested: int, accepted: int) -> "DraftWorth":
        """The same after a step."""
        return DraftWorth(tested=FADE * self.tested + tested, accepted=FADE * self.accepted + accepted)


@dataclass(frozen=True, kw_only=True)
class FirstState:
    """What is kept of a request. A new value replaces it in each step, so that a failed step can be undone.

    Attributes:
        request: The request.
        states: What each drafter keeps of it; these may change in place.
        worth: What was seen of each kind of drafts.
        lengths: The state of the length policy for each drafter that was chosen before, by its number.
        kind: The kind that was chosen for this step; None where there was no room for a draft.
        num_read: How many tokens there were when the last drafter drafted last.
    """

    request: Request
    states: tuple[object, ...]
    worth: Mapping[Kind, DraftWorth] = field(default_factory=dict)
    lengths: Mapping[int, object] = field(default_factory=dict)
    kind: Kind | None = None
    num_read: int = 0


@dataclass(frozen=True, kw_only=True)
class FirstDrafter(CombinedDrafter[FirstState]):
    r"""For each request and step, copy earlier text where that promises more tokens for its time than the last drafter.

    A draft of n tokens that are each accepted with probability a brings $1 + a + \dots + a^n$ tokens. A copy behind a
    match of m tokens is taken to have $a = m / (m + 2)$, m rounded down to a power of two, and the last drafter
    $a = 0.6$. Each is corrected by what such drafts have been worth in this request. Both are divided by what their
    steps cost, each at its best length. Length `goodput` has measured that, and what the last drafter has not read yet
    is a part of it. Where it is not known, each forward of the last drafter costs a tenth of a step.

    The choice reads committed tokens, earlier steps and costs, never a token of the draft that it chooses. So each step
    keeps the law if its rule keeps it for the drafts of each drafter. For a request with a seed it reads no other
    request.

    A copy is a chain, also where the tree of the others branches.

    Attributes:
        drafters: Drafters that copy, then one draft model, head or union.

    Example:
        >>> from outrider.drafters.model import ModelDrafter
        >>> from outrider.drafters.suffix import SuffixDrafter
        >>> from outrider.lm.tabular import TabularLM, random_rows
        >>> drafter = FirstDrafter(drafters=(SuffixDrafter(), ModelDrafter(lm=TabularLM(random_rows(9, seed=0), 9))))
        >>> def chosen(*prompt):
        ...     request = Request(id="r", prompt=prompt, max_new_tokens=8, sampling=Sampling())
        ...     state = Running(request=request, tokens=list(prompt), slot=0, drafter=drafter,
        ...                     drafter_state=drafter.open(request))
        ...     return drafter.drafters.index(drafter.choose([state], [4], None)[0].drafter)
        >>> from outrider.core.types import Sampling
        >>> chosen(1, 2, 3, 4, 5, 1, 2, 3, 4), chosen(1, 2, 3, 4, 5)
        (0, 1)
    """

    state: ClassVar[type[Any]] = FirstState

    def __post_init__(self) -> None:
        FirstOf.check_order(self.drafters)

    def choose(self, states: Sequence[Running], rooms: Sequence[int], costs: CostTable | None) -> list[Running]:
        chosen = []
        for state, room in zip(states, rooms, strict=True):
            kind = self._kind(state, room, len(states), costs) if room else None
            chosen.append(self._view(kind, state))
        return chosen

    def instead(self, state: Running) -> Running:
        return self._view((len(self.drafters) - 1, 0), state)

    def learn(self, state: Running, view: Running, step: Step) -> None:
        kept = self.state_of(state)
        if kept.kind is None:
            return
        number, worth, num_read = kept.kind[0], kept.worth, kept.num_read
        if step.num_draft_tokens:
            # The first rejected token of a draft is tested, and those behind it are not.
            tested = step.num_accepted_tokens + (not step.bonus)
            newest = worth.get(kept.kind, DraftWorth()).after(tested, step.num_accepted_tokens)
            worth = {kind: each.after(0, 0) for kind, each in worth.items()} | {kept.kind: newest}
            if number == len(self.drafters) - 1:
                num_read = len(state.tokens) - len(step.tokens)
        lengths = {**kept.lengths, number: view.length_state}
        state.drafter_state = replace(kept, worth=worth, lengths=lengths, num_read=num_read)

    def open(self, request: Request) -> FirstState:
        return FirstState(request=request, states=self.opened(request))

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        last = len(self.drafters) - 1
        for state in states:
            state.drafter_state = replace(self.state_of(state), kind=(last, 0))
        return super().begin(states, depths)

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        kinds = [self.state_of(state).kind for state in states]
        for number, drafter in enumerate(self.drafters):
            places = [i for i, kind in enumerate(kinds) if kind is not None and kind[0] == number]
            if places:
                drafter.commit([self.seen_by(number, states[i]) for i in places], [paths[i] for i in places])

    def reuse(self, state: object, request: Request, length: int) -> FirstState:
        return _shortened(self.checked(state), self.reused(state, request, length), request, length)

    def fork(self, state: object, request: Request, length: int) -> FirstState:
        return _shortened(self.checked(state), self.forked(state, request, length), request, length)

    def _kind(self, state: Running, room: int, num_requests: int, costs: CostTable | None) -> Kind:
        """The kind of drafts that promises most for its time, each at its best length."""
        *copying, drafting = self.drafters
        best, most, worth = (len(copying), 0), 0.0, self.state_of(state).worth
        seconds = self._seconds(state, room, num_requests, costs)
        if length := fits(drafting, len(state.tokens), room):
            most = _best_rate(worth.get(best, DraftWorth()).rate(PRIOR), length, seconds.drafted)
        for number, drafter in enumerate(copying):
            promise = cast(Copying, drafter).promise(self.seen_by(number, state), room)
            if promise is not None:
                kind = (number, min(promise.match, LONGEST).bit_length())
                rate = _best_rate(worth.get(kind, DraftWorth()).rate(_prior(kind)), promise.tokens, seconds.copied)
                if rate >= most:
                    best, most = kind, rate
        return best

    def _seconds(self, state: Running, room: int, num_requests: int, costs: CostTable | None) -> "_Seconds":
        """What steps cost in which the last drafter drafts for a request, and steps that copy."""
        request, drafting = state.request, self.drafters[-1]
        if request.repeats:
            # Its draws must depend neither on other requests nor on costs that another process does not know.
            num_requests, costs = 1, costs if costs is not None and costs.kept else None
        if costs is None:
            forwards = np.minimum(np.arange(room + 1), 1 if drafting.rows == "marginal" else room)
            return _Seconds(drafted=1 + FORWARD * forwards, copied=np.ones(room + 1))
        sampled, context = request.sampling.temperature > 0, len(state.tokens)
        drafted, copied = (
            table.steps(num_requests, sampled=sampled, context=context, longest=room)[num_requests]
            for table in (costs, costs.without_drafter)
        )
        waits = drafting.components[-1].waits
        late = costs.catch_up * (context - self.state_of(state).num_read) if waits else 0.0
        return _Seconds(drafted=drafted + late, copied=copied)

    def _view(self, kind: Kind | None, state: Running) -> Running:
        """A request as the drafter of a kind sees it, which drafts now; itself if nothing is drafted."""
        state.drafter_state = kept = replace(self.state_of(state), kind=kind)
        if kind is None:
            return state
        view = self.seen_by(kind[0], state)
        view.length_state = kept.lengths.get(kind[0], state.length_state)
        return view


def _shortened(kept: FirstState, states: tuple[object, ...], request: Request, length: int) -> FirstState:
    """The state of a text with the same first `length` tokens. What drafts were worth counts for the request alone."""
    if request is not kept.request:
        # What other requests left in a cache must not change the draws of one that repeats its text.
        kept = FirstState(request=request, states=(), num_read=0 if request.repeats else kept.num_read)
    return replace(kept, states=states, num_read=min(kept.num_read, length))


@dataclass(frozen=True, kw_only=True)
class _Seconds:
    """What steps cost in which the last drafter drafts, and steps that copy, by the length of drafts from 0 on."""

    drafted: Float[np.ndarray, " lengths"]
    copied: Float[np.ndarray, " lengths"]


def _best_rate(acceptance: float, longest: int, seconds: Float[np.ndarray, " lengths"]) -> float:
    """The most tokens per second of drafts of at most so many tokens, each accepted with the same probability."""
    tokens = np.cumsum(acceptance ** np.arange(longest + 1))
    return float((tokens / seconds[: longest + 1])[1:].max())


def _prior(kind: Kind) -> float:
    """The acceptance of a copy before any of its kind is seen."""
    return copy_rate(1 << (kind[1] - 1))


@dataclass(frozen=True, kw_only=True)
class FirstOf(SeveralOf):
    """Several drafters before they are bound to a target: `first:suffix,model:path=...`.

    In the text, a comma begins a drafter if a drafter's name or a place (a directory, a GGUF file, a hub id) stands
    behind it; all other commas belong to the drafter before. In Python they are a list: `{"first": ["suffix",
    "model:path=..."]}`, of texts or objects.

    Attributes:
        drafters: Drafters that copy (`ngram`, `suffix`), then a draft model, head or union.
    """

    name: ClassVar[str] = "first"

    @classmethod
    def may_be_last(cls, drafter: object) -> bool:
        return super().may_be_last(drafter) or isinstance(drafter, UnionOf | UnionDrafter)

    def bind(self, target_info: TargetInfo) -> FirstDrafter:
        """Bind each of them."""
        return FirstDrafter(drafters=self.bound(target_info))
