"""The base of drafters that keep a value of one kind for each request."""

from typing import Any, ClassVar, Generic, TypeVar, cast

from outrider.core.types import Running
from outrider.drafters.protocol import Drafter

State = TypeVar("State")


class StatefulDrafter(Drafter, Generic[State]):
    """A drafter whose state of a request is a `State`.

    Attributes:
        state: The class of these values.
    """

    state: ClassVar[type[Any]]

    def state_of(self, running: Running) -> State:
        """What this drafter keeps of a request. Raises TypeError if another drafter keeps it."""
        return self.checked(running.drafter_state)

    def checked(self, state: object) -> State:
        """The same value with its type. Raises TypeError if it is another drafter's."""
        if not isinstance(state, self.state):
            raise TypeError(f"this drafter keeps a {self.state.__name__}, got {type(state).__name__}")
        return cast(State, state)
