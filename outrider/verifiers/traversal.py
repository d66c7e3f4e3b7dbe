"""Traversal: judge a tree from its leaves upwards, each leaf with the path that leads to it (Weng et al. 2025)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.sampling import rows_at_once
from outrider.core.types import Draft, Verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.protocol import Decision, child_rows, upload, verdict_at
from outrider.verifiers.traits import CHAINS, StatedVerifier

PIECES = 16
"""How many times the rows that fit a cache are worked on in step; more would be memory that is never used again."""
LEAST_MASS = 1e-300
"""What a division by nothing divides by; what is divided is then 0."""


@dataclass(frozen=True, kw_only=True)
class TraversalVerifier(StatedVerifier):
    r"""Visit the nodes in post-order. Accept the first node whose coin succeeds, with the path above it; otherwise drop
    it.

    Every node has a weight: 1 at the root, and $w(x) = \min(1, w(v) P_v(x)/Q_v(x))$ for a child x of v, at first with
    $P = p$ and $Q = q$. The coin of a node without children succeeds with probability w. A dropped node changes its
    parent: with $R = (w(v) P_v - Q_v)_+$ and $S = \sum R$, the weight becomes $S/(S + 1 - w(v))$, $P_v = R/S$, and
    $Q_v(x) = 0$, or in a union of chains $Q_v$ is one-hot at the next child. The root needs no coin. The next token is
    drawn from the $P$ of the accepted node. On a chain this is block verification.

    How the rows of a node change depends on its own children and on its first weight, not on what happens below these
    children, and no weight depends on outcomes. So all nodes of one depth are worked on together, from the root
    downwards, one child after the other. The coins are thrown afterwards: on a CPU in turn, elsewhere all at once.

    References:
        Weng et al. 2025, Traversal Verification, algorithm 1. https://arxiv.org/abs/2505.12398
    """

    kinds = CHAINS | {"deduplicated iid paths", "tree drawn without replacement", "union of chains"}
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        accepted, tokens = draft.offsets[:-1].copy(), list[Int[Tensor, " some"]]()
        for requests in _parts(draft, target_rows):
            visits = [_visits(draft, request) for request in requests.tolist()]
            weighed = _weigh(draft, target_rows, requests)
            _throw(draft, requests, visits, weighed.weights.numpy(), dice, accepted)
            last = torch.from_numpy(accepted[requests])
            tokens.append(dice.pick(weighed.after(last, target_rows), _recovering(requests)))
        return verdict_at(draft, accepted, torch.cat(tokens))

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        if not draft.branches:
            # On a chain this is block verification, with the same random numbers.
            return BlockVerifier().decide(draft, target_rows, dice)
        device, decisions = target_rows.device, list[Decision]()
        slots = _slots(draft)
        for requests in _parts(draft, target_rows):
            visits = [_visits(draft, request) for request in requests.tolist()]
            weighed = _weigh(draft, target_rows, requests)
            # Behind the last visit stands the root, which needs no coin. The padding before it never lands.
            table = np.full((len(requests), max(map(len, visits)) + 1), -1)
            table[:, -1] = draft.offsets[requests]
            for row, visited in zip(table, visits, strict=True):
                row[: len(visited)] = visited
            tried = table[:, :-1]
            draws = Draws(
                requests=np.repeat(requests, tried.shape[1]), slots=slots[tried].ravel(), purpose=Purpose.ACCEPT
            )
            nodes = upload(table, device)
            chances = weighed.weights[nodes[:, :-1]].masked_fill(nodes[:, :-1] < 0, 0.0)
            misses = ~dice.toss(chances, draws)
            last = nodes.gather(1, misses.cumprod(1).sum(1, keepdim=True)).squeeze(1)
            tokens = dice.pick(weighed.after(last, target_rows), _recovering(requests))
            decisions.append(Decision(last=last, next_tokens=tokens))
        if len(decisions) == 1:
            return decisions[0]
        return Decision(
            last=torch.cat([part.last for part in decisions]),
            next_tokens=torch.cat([part.next_tokens for part in decisions]),
        )


def _parts(draft: Draft, target_rows: Float[Tensor, "nodes vocab"]) -> list[Int[np.ndarray, " some"]]:
    """The requests, as many in a part as are worked on at once."""
    count = max(1, draft.num_requests * PIECES * rows_at_once(target_rows) // len(target_rows))
    return [np.arange(first, min(first + count, draft.num_requests)) for first in range(0, draft.num_requests, count)]


def _recovering(requests: Int[np.ndarray, " some"]) -> Draws:
    return Draws(requests=requests, slots=np.zeros_like(requests), purpose=Purpose.RECOVER)


def _slots(draft: Draft) -> Int[np.ndarray, " nodes"]:
    """The place of each node's link among the links of its request."""
    places = np.zeros(len(draft.parents), dtype=np.int64)
    places[draft.links] = np.arange(len(draft.links))
    firsts = draft.first_child[draft.offsets[:-1]]
    return places - np.repeat(firsts, np.diff(draft.offsets))


def _throw(
    draft: Draft,
    requests: Int[np.ndarray, " some"],
    visits: list[list[int]],
    weights: Float[np.ndarray, " nodes"],
    dice: Dice,
    accepted: Int[np.ndarray, " requests"],
) -> None:
    """Throw the coins of each request's visits in turn until one lands, and write down the node."""
    slots, undecided = _slots(draft), np.ones(len(visits), dtype=bool)
    lengths = np.array([len(visited) for visited in visits])
    for i in range(max(lengths)):
        tried = np.flatnonzero(undecided & (lengths > i))
        if not len(tried):
            break
        nodes = np.array([visits[r][i] for r in tried.tolist()], dtype=np.int64)
        draws = Draws(requests=requests[tried], slots=slots[nodes], purpose=Purpose.ACCEPT)
        landed = dice.accept(weights[nodes], draws)
        accepted[requests[tried[landed]]] = nodes[landed]
        undecided[tried[landed]] = False


@dataclass(frozen=True, kw_only=True)
class _Weighed:
    """What the visits come to.

    Attributes:
        rows: $P$ of each node that has children, when they are gone.
        place: Where each node's row is; -1 of a leaf, whose row is the target's.
        empty: Whether nothing is left of a row; rounding alone leads here, and the target's row stands.
        weights: Chance of each node when its turn comes.
    """

    rows: Float[Tensor, "inner vocab"]
    place: Int[np.ndarray, " nodes"]
    empty: Bool[Tensor, " inner"]
    weights: Float[Tensor, " nodes"]

    def after(self, nodes: Int[Tensor, " n"], target_rows: Float[Tensor, "nodes vocab"]) -> Float[Tensor, "n vocab"]:
        """Weights of the token that follows each accepted node."""
        plain = target_rows.index_select(0, nodes)
        at = upload(self.place, plain.device)[nodes]
        if not len(self.rows) or (plain.device.type == "cpu" and bool((at < 0).all())):
            return plain
        leaf = (at < 0) | self.empty[at]
        return torch.where(leaf[:, None], plain, self.rows[at])


def _visits(draft: Draft, request: int) -> list[int]:
    """The nodes of one request below its root, children before parents, siblings in drawing order."""
    visited: list[int] = []
    first, links = draft.first_child, draft.links
    stack = [int(draft.offsets[request])]
    while stack:
        # Parents before children and the last sibling first is the same order from its end.
        node = stack.pop()
        visited.append(node)
        stack += links[first[node] : first[node + 1]].tolist()
    return visited[:0:-1]


def _weigh(draft: Draft, target_rows: Float[Tensor, "nodes vocab"], requests: Int[np.ndarray, " some"]) -> "_Weighed":
    """The $P$ and weight of every node of some requests when its turn comes."""
    device = target_rows.device
    span = slice(int(draft.offsets[requests[0]]), int(draft.offsets[requests[-1] + 1]))
    sizes = np.diff(draft.first_child[span.start : span.stop + 1])
    inner = span.start + np.flatnonzero(sizes)
    sizes = sizes[sizes > 0]
    # By depth, so that parents come first; within a depth by number of children, so that those with a k-th one lead.
    order = np.lexsort((-sizes, draft.depths[inner]))
    inner, sizes = inner[order], sizes[order]
    place = np.full(len(draft.parents), -1)
    place[inner] = np.arange(len(inner))
    at = upload(inner, device)
    P = target_rows.index_select(0, at)
    Q = child_rows(draft, inner, P)
    weights = torch.ones(len(place), dtype=torch.float64, device=device)
    if len(inner):
        ranks = np.minimum(np.arange(int(sizes.max())), sizes[:, None] - 1)
        children = upload(draft.links[draft.first_child[inner][:, None] + ranks], device)
        masses = torch.stack([P.sum(-1), Q.sum(-1)]).double()
        rows = _Rows(P=P, Q=Q, masses=masses, one_drawn=draft.structure == "union")
        ends = np.flatnonzero(np.diff(draft.depths[inner], append=-1)) + 1
        for first, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            rows.visit(slice(first, end), sizes[first:end], at, children, draft.tokens, weights)
        empty = rows.masses[0] <= 0
    else:
        empty = torch.zeros(0, dtype=torch.bool, device=device)
    return _Weighed(rows=P, place=place, empty=empty, weights=weights)


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """$P$ and $Q$ of nodes with children, neither normalised, and the sums of both; they change in place.

    Attributes:
        one_drawn: Whether children behind the first one are point masses.
    """

    P: Float[Tensor, "inner vocab"]
    Q: Float[Tensor, "inner vocab"]
    masses: Float[Tensor, "2 inner"]
    one_drawn: bool

    def visit(
        self,
        level: slice,
        sizes: Int[np.ndarray, " n"],
        nodes: Int[Tensor, " inner"],
        children: Int[Tensor, "inner most"],
        tokens: Int[Tensor, " all"],
        weights: Float[Tensor, " all"],
    ) -> None:
        """Enter and drop the children of the nodes of one depth, in turn.

        Args:
            sizes: How many children each has, descending.
            nodes: Where each node stands in the draft.
            children: Where its children stand.
            tokens: All tokens of the draft.
            weights: All weights of the draft; changes in place.
        """
        few = rows_at_once(self.P) if self.P.device.type == "cpu" else level.stop
        for first in range(level.start, level.stop, few):
            here = slice(first, min(first + few, level.stop))
            counts = sizes[here.start - level.start : here.stop - level.start]
            numerators = torch.ones(2, len(counts), dtype=torch.float64, device=weights.device)
            numerators[0] = weights[nodes[here]]
            following = children[here]
            symbols = tokens[following]
            for k in range(int(counts[0])):
                count = int((counts > k).sum())
                part = slice(first, first + count)
                chances = self._drop(part, symbols[:count, k : k + 1], numerators[:, :count])
                weights.index_copy_(0, following[:count, k], chances)
                if self.one_drawn and (count := int((counts > k + 1).sum())):
                    part = slice(first, first + count)
                    self.Q[part].zero_().scatter_(1, symbols[:count, k + 1 : k + 2], 1.0)
                    self.masses[1, part] = 1
            weights.index_copy_(0, nodes[here], numerators[0])

    def _drop(self, part: slice, x: Int[Tensor, "n 1"], numerators: Float[Tensor, "2 n"]) -> Float[Tensor, " n"]:
        """The weight of each node's next child, which is then dropped.

        Args:
            x: The child's token.
            numerators: The node's weight, which changes in place, and 1.
        """
        P, Q, masses, w = self.P[part], self.Q[part], self.masses[:, part], numerators[0]
        drawn = torch.cat([P.gather(1, x), Q.gather(1, x)], 1).double().T
        above, below = drawn * masses.flip(0)
        chances = (w * above / below).masked_fill_(below <= 0, 0.0).clamp_(max=1)
        # Without mass the node's weight is 0, its row stays empty, and it will be forgotten too.
        scale, gone = (numerators / masses).masked_fill_(masses <= 0, 0.0).to(P)[:, :, None]
        P.mul_(scale).addcmul_(Q, gone, value=-1).clamp_min_(0)
        mass = P.sum(-1).double()
        torch.div(mass, (mass + (1 - w)).clamp_min_(LEAST_MASS), out=w)
        masses[0] = mass
        masses[1].sub_(drawn[1]).clamp_min_(0)
        Q.scatter_(1, x, 0.0)
        return chances
