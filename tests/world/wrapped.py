"""Drafters around another one, whose attributes and methods they have unless they define them themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.types import Running
from outrider.drafters.protocol import Drafter, Observed


@dataclass(frozen=True, kw_only=True)
class Wrapped(Drafter):
    """Does what the inner drafter does."""

    inner: Drafter

    def __getattribute__(self, name: str) -> object:
        own = object.__getattribute__(self, "__dict__")
        kinds = type(self).__mro__
        known = name in own or any(name in vars(kind) for kind in kinds[: kinds.index(Wrapped)])
        if known or name in ("__class__", "__dict__"):
            return object.__getattribute__(self, name)
        return getattr(own["inner"], name)


@dataclass(frozen=True, kw_only=True)
class Breaks(Wrapped):
    """Raises once, at a call of `observe`, after the drafter has taken in what it was shown."""

    left: list[int] = field(default_factory=lambda: [4])

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        self.inner.observe(states, observed)
        self.left[0] -= 1
        if self.left[0] == 0:
            raise RuntimeError("once")
