"""One tree of several drafts: the drawn one, and behind its children those that others copied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.core.types import Draft
from outrider.trees.protocol import union_structure


@dataclass(frozen=True, kw_only=True)
class UnitedDraft:
    """The union of several drafts of the same requests.

    Attributes:
        draft: The union.
        numbers: For each of the drafts and each request, the draft's own numbers of the union's nodes that it has, by
            their numbers in the union.
    """

    draft: Draft
    numbers: Sequence[Sequence[Mapping[int, int]]]


@dataclass(kw_only=True)
class _Nodes:
    """The growing union of one request; changes in place. Nodes are counted from its root.

    Attributes:
        tokens: Token of each node.
        parents: Number of its parent; -1 for the root.
        numbers: Its number for drafters.
        links: Its children.
        row_of: The row that its first child was drawn from; -1 where its children were chosen.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    links: list[list[int]] = field(default_factory=list)
    row_of: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, draft: Draft, tokens: Sequence[int], request: int) -> "_Nodes":
        """The nodes of one request of a draft."""
        first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
        return cls(
            tokens=list(tokens[first:end]),
            parents=[max(parent - first, -1) for parent in draft.parents[first:end].tolist()],
            numbers=draft.numbers[first:end].tolist(),
            links=[
                (draft.links[draft.first_child[node] : draft.first_child[node + 1]] - first).tolist()
                for node in range(first, end)
            ],
            row_of=draft.row_of[first:end].tolist(),
        )

    def add(self, other: "_Nodes") -> dict[int, int]:
        """Add what is not there yet. Returns the other's numbers of its nodes, by their numbers here."""
        places = [0]
        for token, parent in zip(other.tokens[1:], other.parents[1:], strict=True):
            above = places[parent]
            place = next((node for node in self.links[above] if self.tokens[node] == token), len(self.tokens))
            if place == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self.numbers.append(max(self.numbers) + 1)
                self.links[above].append(place)
                self.links.append([])
                self.row_of.append(-1)
            places.append(place)
        return {self.numbers[place]: number for place, number in zip(places, other.numbers, strict=True)}


def united(copied: Sequence[Draft], drawn: Draft) -> UnitedDraft:
    r"""The tree of all tokens that several drafts of the same requests have. A token that two of them have behind the
    same tokens is one node.

    The drawn child of a node stands before those that were copied, because more is accepted so. Let $q$ be its row and
    c the copy. Tried first, the drawn child is accepted with probability $\sum_x \min(p, q)$, and one of the two with
    $p(c) + \sum_{x \ne c} \min(p, q)$, which is the most that any rule can reach. The other order has
    $(1 - p(c))\,q$ in place of $q$. If both are one token, it is one child with the row $q$: a second trial of the same
    token could never be accepted.

    Args:
        copied: Drafts whose tokens were chosen.
        drawn: A draft of drawn chains, or of chosen trees.
    """
    drafts = [*copied, drawn]
    tokens = [draft.tokens.tolist() for draft in drafts]
    unions, numbers = list[_Nodes](), [list[Mapping[int, int]]() for _ in drafts]
    for request in range(drawn.num_requests):
        nodes = _Nodes.of(drawn, tokens[-1], request)
        numbers[-1].append({number: number for number in nodes.numbers})
        for number, draft in enumerate(copied):
            numbers[number].append(nodes.add(_Nodes.of(draft, tokens[number], request)))
        unions.append(nodes)
    return UnitedDraft(draft=_packed(unions, drawn), numbers=numbers)


def _packed(unions: Sequence[_Nodes], drawn: Draft) -> Draft:
    """The draft of these nodes, with the rows of the drawn one."""
    offsets = np.cumsum([0, *(len(nodes.tokens) for nodes in unions)])
    tokens, parents, depths, links, counts = list[int](), list[int](), list[int](), list[int](), list[int]()
    for nodes, first in zip(unions, offsets.tolist(), strict=False):
        tokens += nodes.tokens
        parents += [parent + first if parent >= 0 else -1 for parent in nodes.parents]
        for parent in nodes.parents:
            depths.append(depths[first + parent] + 1 if parent >= 0 else 0)
        links += [node + first for children in nodes.links for node in children]
        counts += [len(children) for children in nodes.links]
    return Draft(
        tokens=torch.tensor(tokens).to(drawn.tokens.device, non_blocking=True),
        parents=np.array(parents),
        depths=np.array(depths),
        numbers=np.array([number for nodes in unions for number in nodes.numbers]),
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(counts)]),
        links=np.array(links, dtype=np.int64),
        rows=drawn.rows,
        row_of=np.array([row for nodes in unions for row in nodes.row_of]),
        structure=union_structure(drawn.structure),
        short_list=drawn.short_list,
    )
