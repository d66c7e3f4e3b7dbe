"""What may follow a context, by what followed its ends before: prediction by partial matching (Cleary, Witten 1984)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from outrider.core.types import Choices, Frontier, Guess, Running
from outrider.drafters.automaton import Followers
from outrider.drafters.prediction import PredictedText
from outrider.lengths.acceptance import prior_rates

COPIED = [0.0, *prior_rates(128).tolist()]
"""How likely a copied token is right, by how many tokens before it match."""
MOST = 10
"""Most tokens that are proposed behind one node."""


def continuations(ends: Iterable[tuple[int, Followers]]) -> dict[int, float]:
    r"""How likely each token seems that followed an end of a context before.

    Behind an end of m tokens one of those that followed it before comes with $c_m = \sigma(\operatorname{logit} 0.6 +
    0.4 \ln m)$, each by its share. Otherwise a token comes that did not follow this end, by the shorter ends.

    Args:
        ends: The lengths of some ends, the longest first, and what followed each.

    Example:
        >>> found = continuations([(2, {7: (3, 20), 8: (1, 9)}), (1, {7: (4, 20), 9: (1, 2)})])
        >>> {token: round(chance, 3) for token, chance in found.items()}
        {7: 0.498, 8: 0.166, 9: 0.201}

    References:
        Cleary and Witten 1984, Data compression using adaptive coding and partial string matching.
        https://doi.org/10.1109/TCOM.1984.1096090
    """
    chances, left = dict[int, float](), 1.0
    for length, followers in ends:
        fresh = [(count, place, token) for token, (count, place) in followers.items() if token not in chances]
        if not fresh:
            continue
        copied = COPIED[min(length, len(COPIED) - 1)]
        total = sum(count for count, _, _ in fresh)
        for count, _, token in sorted(fresh, reverse=True):
            chances[token] = left * copied * count / total
        left *= 1 - copied
    return chances


@dataclass(kw_only=True)
class CopyState:
    """What drafters that copy keep of one request; changes in place.

    Attributes:
        prediction: The text that the client predicts, if there is one; it goes before other texts.
        nodes: Of the newest tree, what `Copier` knows of the context of each node that was expanded, by its number.
    """

    prediction: PredictedText | None = None
    nodes: dict[int, Any] = field(default_factory=dict, compare=False)


class Copier(Protocol):
    """A drafter that finds ends of a context in texts."""

    def state_of(self, state: Running) -> CopyState:
        """What it keeps of a request."""
        ...

    def look(self, state: Running) -> Any:
        """Look for the ends of a request's context. Returns where they are."""
        ...

    def follow(self, found: Any, token: int) -> Any:
        """Where the ends are of a context that is one token longer."""
        ...

    def ends(self, state: Running, found: Any) -> Iterable[tuple[int, Followers]]:
        """The lengths of the ends, the longest first, and what followed each."""
        ...


@dataclass(frozen=True, kw_only=True)
class CopiedBranches:
    """Guesses several tokens behind each node of a tree. What a client predicts is a chain, and goes before.

    Attributes:
        drafter: Whose texts and request states it reads.
    """

    drafter: Copier

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        behind = []
        for state in states:
            kept, found = self.drafter.state_of(state), self.drafter.look(state)
            kept.nodes = {0: found}
            predicted = -1 if kept.prediction is None else kept.prediction.begin(state.tokens)
            behind.append({predicted: 1.0} if predicted >= 0 else continuations(self.drafter.ends(state, found)))
        return Guess(choices=choices(behind))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        behind = []
        nodes, parents = frontier.nodes.tolist(), frontier.parents.tolist()
        for i, (owner, token) in enumerate(zip(frontier.owners.tolist(), frontier.tokens.tolist(), strict=True)):
            state = states[owner]
            kept = self.drafter.state_of(state)
            if kept.prediction is not None and kept.prediction.drafts:
                predicted = kept.prediction.further(int(frontier.depths[i]))
                behind.append({predicted: 1.0} if predicted >= 0 else {})
                continue
            kept.nodes[nodes[i]] = found = self.drafter.follow(kept.nodes[parents[i]], token)
            behind.append(continuations(self.drafter.ends(state, found)))
        return Guess(choices=choices(behind))


def choices(nodes: Sequence[Mapping[int, float]]) -> Choices:
    """The likeliest of the tokens behind each node. Of equally likely ones those of the longest end."""
    best = [sorted(chances.items(), key=lambda item: -item[1])[:MOST] for chances in nodes]
    most = max(map(len, best), default=0)
    tokens, table = np.full((len(best), most), -1), np.zeros((len(best), most))
    for row, pairs in enumerate(best):
        tokens[row, : len(pairs)] = [token for token, _ in pairs]
        table[row, : len(pairs)] = [chance for _, chance in pairs]
    return Choices(tokens=tokens, chances=table)
