"""Several drafters for one request at once: what is copied and what is drawn make one tree."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, ClassVar

from outrider.core.types import Draft, Request, Running
from outrider.drafters.several import CombinedDrafter, SeveralOf
from outrider.lm.target_info import TargetInfo
from outrider.trees.union import united


@dataclass(kw_only=True)
class UnionState:
    """What is kept of a request; changes in place.

    Attributes:
        states: What each drafter keeps of it.
        numbers: For each drafter, its own numbers of the last draft's nodes that it drafted.
    """

    states: tuple[object, ...]
    numbers: list[Mapping[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.numbers = [{} for _ in self.states]


@dataclass(frozen=True, kw_only=True)
class UnionDrafter(CombinedDrafter[UnionState]):
    """Draft with all drafters in each step, and join their drafts to one tree.

    The last drafter's chain is drawn as it would be alone. A chain that another drafter copied begins at the root too,
    and leaves the drawn one where the two differ. So the last drafter's tokens are worth at least what they are worth
    alone, and a copy adds what the target says otherwise. With a chosen tree in place of the drawn chain, copies are
    further branches of it.

    At a node with a drawn and a copied child, the drawn one is judged with the row that it was drawn from, and the
    copied one, a point mass, against what is left.

    Attributes:
        drafters: Drafters that copy, then one draft model or head.
    """

    state: ClassVar[type[Any]] = UnionState
    unites: ClassVar[bool] = True

    def __post_init__(self) -> None:
        UnionOf.check_order(self.drafters)

    def unite(self, states: Sequence[Running], drafts: Sequence[Draft]) -> Draft:
        union = united(drafts[:-1], drafts[-1])
        for i, state in enumerate(states):
            # Requests of other drafters are in the batch too; their drafts are empty.
            if state.drafter is self:
                self.state_of(state).numbers = [numbers[i] for numbers in union.numbers]
        return union.draft

    def open(self, request: Request) -> UnionState:
        return UnionState(states=self.opened(request))

    def commit(self, states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
        for place, drafter in enumerate(self.drafters):
            numbers = [self.state_of(state).numbers[place] for state in states]
            # A drafter has the beginning of a path, as far as it drafted the same tokens.
            parts = [
                [known[node] for node in takewhile(known.__contains__, path)]
                for known, path in zip(numbers, paths, strict=True)
            ]
            drafter.commit([self.seen_by(place, state) for state in states], parts)

    def reuse(self, state: object, request: Request, length: int) -> UnionState:
        return UnionState(states=self.reused(state, request, length))

    def fork(self, state: object, request: Request, length: int) -> UnionState:
        return UnionState(states=self.forked(state, request, length))


@dataclass(frozen=True, kw_only=True)
class UnionOf(SeveralOf):
    """Several drafters whose drafts make one tree, before they are bound to a target: `union:suffix,model:path=...`.

    They are written as those of `first`.

    Attributes:
        drafters: Drafters that copy (`ngram`, `suffix`), then a draft model or head.
    """

    name: ClassVar[str] = "union"

    def bind(self, target_info: TargetInfo) -> UnionDrafter:
        """Bind each of them."""
        return UnionDrafter(drafters=self.bound(target_info))
