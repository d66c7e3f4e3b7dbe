"""A request as it was served: when it came, when its tokens came, and what each step drafted and accepted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ServedStep:
    """One step of a request.

    Attributes:
        drafted: Draft tokens; of a tree its nodes.
        accepted: Accepted ones, before the output is cut at its end.
        emitted: Tokens that it added to the output.
        at: Seconds from the beginning of the run to the arrival of these tokens.
    """

    drafted: int
    accepted: int
    emitted: int
    at: float


@dataclass(frozen=True, kw_only=True)
class Served:
    """A request as it was served. Times are seconds from the beginning of the run.

    Attributes:
        id: The conversation's, with the number of the turn behind it where there are several.
        conversation: The conversation's id.
        turn: Number of the answer in its conversation, from 0.
        num_tokens: Tokens of the answer, counted one by one.
        arrived: When the request came.
        first: When its first tokens came; None where an engine does not tell.
        ended: When its last token came.
        steps: Its steps; empty where an engine does not tell.
        draft_tokens: Draft tokens of all steps, where an engine tells them without its steps.
        accepted_tokens: Accepted ones, likewise.
    """

    id: str
    conversation: str
    category: str
    turn: int
    prompt_tokens: int
    num_tokens: int
    arrived: float
    first: float | None
    ended: float
    steps: tuple[ServedStep, ...] = ()
    draft_tokens: int | None = None
    accepted_tokens: int | None = None

    def written(self) -> dict[str, Any]:
        """As a value of JSON; a step is a list of four numbers, times have six digits behind the point."""
        values = dict(vars(self))
        for name in ("arrived", "first", "ended"):
            values[name] = None if values[name] is None else round(values[name], 6)
        return values | {"steps": [[s.drafted, s.accepted, s.emitted, round(s.at, 6)] for s in self.steps]}

    @classmethod
    def read(cls, value: Mapping[str, Any]) -> "Served":
        """The request that `written` wrote."""
        return cls(**{**value, "steps": tuple(ServedStep(*step) for step in value["steps"])})
