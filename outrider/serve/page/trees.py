"""The drafts of requests that someone looks at, taken from the engine's steps."""

from dataclasses import dataclass
from typing import Literal

from outrider.decoding.protocol import Cycle, Watch
from outrider.engine.engine import Engine

NodeKind = Literal["anchor", "accepted", "rejected", "recovered", "bonus", "plain"]


@dataclass(frozen=True, kw_only=True)
class ShownNode:
    """A node of a draft, or the token that the target added.

    Attributes:
        parent: Number of its parent in the list; -1 for the root.
    """

    token: int
    parent: int
    kind: NodeKind


class Trees:
    """The newest draft of each request that someone looks at. While there is one, the engine is watched, which costs
    every request of its steps a little time.

    Called from the event loop; `look` runs in the engine's thread.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._newest: dict[str, list[ShownNode]] = {}
        self._before: Watch | None = None

    def open(self, id: str) -> None:
        """Look at a request from now on."""
        if not self._newest:
            # A drafter that learns watches too.
            self._before, self._engine.watch = self._engine.watch, self.look
        self._newest[id] = []

    def close(self, id: str) -> None:
        """Look away."""
        if self._newest.pop(id, None) is not None and not self._newest:
            self._engine.watch = self._before

    def newest(self, id: str) -> list[ShownNode]:
        """The draft of the request's newest step, roots first; empty before its first one."""
        return self._newest.get(id, [])

    def look(self, cycle: Cycle) -> None:
        """Note the drafts of one step."""
        if self._before is not None:
            self._before(cycle)
        for number, state in enumerate(cycle.states):
            if state.request.id in self._newest:
                self._newest[state.request.id] = nodes(cycle, number)


def nodes(cycle: Cycle, number: int) -> list[ShownNode]:
    """The draft of one request of a step, and behind its accepted path the token that the target added."""
    draft, verdict = cycle.draft, cycle.verdict
    first, end = int(draft.offsets[number]), int(draft.offsets[number + 1])
    path = [int(each) - first for each in verdict.paths[number][: int(verdict.num_accepted[number])]]
    last = path[-1] if path else 0
    shown: list[ShownNode] = []
    for i, token in enumerate(draft.tokens[first:end].tolist()):
        kind: NodeKind = "accepted" if i in path else "rejected" if i else "anchor"
        shown.append(ShownNode(token=token, parent=int(draft.parents[first + i]) - first if i else -1, kind=kind))
    is_leaf = draft.first_child[first + last] == draft.first_child[first + last + 1]
    following: NodeKind = "plain" if len(shown) == 1 else "bonus" if is_leaf else "recovered"
    return [*shown, ShownNode(token=int(verdict.next_tokens[number]), parent=last, kind=following)]
