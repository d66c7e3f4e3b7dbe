"""What drafters of several share: those that copy come first, then one that drafts by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from outrider.core.types import Frontier, Guess, InputError, Request, Running
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Drafter, Observed, Rows, Unbound, UnboundCheckpoint
from outrider.drafters.stateful import StatefulDrafter
from outrider.drafters.token_only import TokenOnly
from outrider.lm.target_info import TargetInfo


class SeveralStates(Protocol):
    """What is kept of a request.

    Attributes:
        states: What each drafter keeps of it; these may change in place.
    """

    @property
    def states(self) -> tuple[object, ...]: ...


Kept = TypeVar("Kept", bound=SeveralStates)


@dataclass(frozen=True, kw_only=True)
class CombinedDrafter(StatefulDrafter[Kept]):
    """The base of drafters of several. A subclass says what is kept of a request, and who drafts in a step.

    A drafter that need not see every step, such as a draft model, reads what it has missed when it drafts next. Asked
    directly, the last drafter guesses.

    Attributes:
        drafters: Drafters that copy, then one draft model or head.
    """

    rows: ClassVar[Rows] = "sampled"
    context_pure: ClassVar[bool] = False
    keeps_cache: ClassVar[bool] = True
    exports: ClassVar[Exports] = Exports(has_files=False)

    drafters: tuple[Drafter, ...]

    @property
    def components(self) -> tuple[Drafter, ...]:
        return self.drafters

    @property
    def taps(self) -> tuple[int, ...]:
        return self.drafters[-1].taps

    @property
    def device(self) -> torch.device | None:
        return self.drafters[-1].device

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return self.drafters[-1].modules

    @property
    def estimates(self) -> bool:
        return self.drafters[-1].estimates

    @property
    def chains_only(self) -> str | None:
        return self.drafters[-1].chains_only

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        return self.drafters[-1].begin([self.seen_by(-1, state) for state in states], depths)

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        return self.drafters[-1].expand([self.seen_by(-1, state) for state in states], frontier)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        for number, drafter in enumerate(self.drafters):
            if not drafter.waits:
                drafter.observe([self.seen_by(number, state) for state in states], observed)

    def needs(self, state: object, length: int) -> int:
        kept = self.checked(state).states
        return min(drafter.needs(each, length) for drafter, each in zip(self.drafters, kept, strict=True))

    def ended(self, state: Running) -> None:
        for number, drafter in enumerate(self.drafters):
            drafter.ended(self.seen_by(number, state))

    def forget(self) -> None:
        for drafter in self.drafters:
            drafter.forget()

    def predicted(self, state: object) -> tuple[int, int]:
        pairs = zip(self.drafters, self.checked(state).states, strict=True)
        counts = [drafter.predicted(each) for drafter, each in pairs]
        return sum(accepted for accepted, _ in counts), sum(rejected for _, rejected in counts)

    def close(self, state: object) -> None:
        for drafter, each in zip(self.drafters, self.checked(state).states, strict=True):
            drafter.close(each)

    def cast(self, target_info: TargetInfo) -> Drafter:
        return replace(self, drafters=tuple(drafter.cast(target_info) for drafter in self.drafters))

    def on_tables(self, vocab_size: int, seed: int) -> Drafter:
        return replace(self, drafters=tuple(drafter.on_tables(vocab_size, seed) for drafter in self.drafters))

    def seen_by(self, number: int, state: Running) -> Running:
        """A request as one of the drafters sees it."""
        return replace(state, drafter=self.drafters[number], drafter_state=self.state_of(state).states[number])

    def opened(self, request: Request) -> tuple[object, ...]:
        """What each drafter keeps of a new request."""
        return tuple(drafter.open(request) for drafter in self.drafters)

    def reused(self, state: object, request: Request, length: int) -> tuple[object, ...]:
        """What each drafter keeps of a request whose first tokens are those of `state`'s text, which is used up."""
        pairs = zip(self.drafters, self.checked(state).states, strict=True)
        return tuple(drafter.reuse(each, request, length) for drafter, each in pairs)

    def forked(self, state: object, request: Request, length: int) -> tuple[object, ...]:
        """As `reused`, but the old state stays valid."""
        pairs = zip(self.drafters, self.checked(state).states, strict=True)
        return tuple(drafter.fork(each, request, length) for drafter, each in pairs)


@dataclass(frozen=True, kw_only=True)
class SeveralOf:
    """The base of drafters of several before they are bound to a target.

    Attributes:
        name: The name of the method.
        last: What the last drafter may be, as an error says it.
        drafters: Drafters that copy (`ngram`, `suffix`), then a draft model or head.
    """

    name: ClassVar[str]
    last: ClassVar[str] = "a draft model or a head"

    drafters: tuple[Any, ...]

    def __post_init__(self) -> None:
        self.check_order(self.drafters)

    @classmethod
    def holding(cls, components: Sequence[object]) -> "SeveralOf":
        """The drafter of some components."""
        return cls(drafters=tuple(components))

    @classmethod
    def may_be_last(cls, drafter: object) -> bool:
        """Whether a drafter, bound or not, may be the last one."""
        return not isinstance(drafter, TokenOnly | SeveralOf | CombinedDrafter)

    @classmethod
    def check_order(cls, drafters: Sequence[object]) -> None:
        """Raise InputError unless the first drafters copy, and the last one is of another kind."""
        example = f"as in {cls.name}:suffix,model:path=DIR"
        if len(drafters) < 2:
            raise InputError(f"{cls.name} needs two drafters or more, {example}, got {len(drafters)}")
        for number, drafter in enumerate(drafters[:-1], 1):
            if not hasattr(drafter, "promise"):
                raise InputError(f"drafter {number} of {cls.name} must copy, so it is ngram or suffix, {example}")
        if not isinstance(drafters[-1], Drafter | Unbound) or not cls.may_be_last(drafters[-1]):
            raise InputError(f"the last drafter of {cls.name} must be {cls.last}, {example}")

    def check_files(self) -> None:
        """Raise InputError if there is no such checkpoint."""
        for drafter in self.drafters:
            if isinstance(drafter, UnboundCheckpoint):
                drafter.check_files()

    def bound(self, target_info: TargetInfo) -> tuple[Drafter, ...]:
        """The drafters, each bound to the target."""
        return tuple(each.bind(target_info) if isinstance(each, Unbound) else each for each in self.drafters)
