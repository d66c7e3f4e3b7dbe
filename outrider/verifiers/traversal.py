"""Traversal: judge a tree from its leaves upwards, each leaf with the path that leads to it (Weng et al. 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.sampling import rows_at_once
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import child_rows, upload
from outrider.verifiers.traits import CHAINS, StatedVerifier
from outrider.verifiers.walk import verdict_at

PIECES = 16
"""How many times the rows that fit a cache are worked on in step; more would be memory that is never used again."""


@dataclass(frozen=True, kw_only=True)
class TraversalVerifier(StatedVerifier):
    r"""Visit the nodes in post-order. Accept the first node whose coin succeeds, with the path above it; otherwise drop
    it.

    Every node has a weight: 1 at the root, and $w(x) = \min(1, w(v) P_v(x)/Q_v(x))$ for a child x of v, at first with
    $P = p$ and $Q = q$. The coin of a node without children succeeds with probability w. A dropped node changes its
    parent: with $R = (w(v) P_v - Q_v)_+$ and $S = \sum R$, the weight becomes $S/(S + 1 - w(v))$, $P_v = R/S$, and
    $Q_v(x) = 0$. The root needs no coin. The next token is drawn from the $P$ of the accepted node. On a chain this is
    block verification.

    The weights depend on the tree only, not on outcomes. So they are computed on the device, for some requests at a
    time, and copied to the host once. The coins are thrown there.

    References:
        Weng et al. 2025, Traversal Verification, algorithm 1. https://arxiv.org/abs/2505.12398
    """

    kinds = CHAINS | {"deduplicated iid paths", "tree drawn without replacement"}
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        count = max(1, draft.num_requests * PIECES * rows_at_once(target_rows) // len(target_rows))
        parts = [
            self._decide(draft, np.arange(first, min(first + count, draft.num_requests)), target_rows, dice)
            for first in range(0, draft.num_requests, count)
        ]
        return verdict_at(draft, np.concatenate([part[0] for part in parts]), torch.cat([part[1] for part in parts]))

    def _decide(
        self, draft: Draft, requests: Int[np.ndarray, " some"], target_rows: Float[Tensor, "nodes vocab"], dice: Dice
    ) -> tuple[Int[np.ndarray, " some"], Int[Tensor, " some"]]:
        """The accepted nodes of some requests, and the tokens that follow."""
        visits = [list(_visits(draft, request)) for request in requests.tolist()]
        span = slice(draft.offsets[requests[0]], draft.offsets[requests[-1] + 1])
        weighed = _weigh(draft, target_rows, visits, span)
        slots = np.empty(len(draft.parents), dtype=np.int64)
        slots[draft.links] = np.arange(len(draft.links))
        accepted = draft.offsets[requests]
        undecided = np.ones(len(visits), dtype=bool)
        for i in range(max(map(len, visits))):
            asked = np.flatnonzero(undecided & np.array([i < len(own) for own in visits]))
            nodes = np.array([visits[r][i].node for r in asked.tolist()], dtype=np.int64)
            own = slots[nodes] - draft.first_child[draft.offsets[requests[asked]]]
            draws = Draws(requests=requests[asked], slots=own, purpose=Purpose.ACCEPT)
            landed = dice.accept(weighed.weights[nodes], draws)
            accepted[asked[landed]] = nodes[landed]
            undecided[asked[landed]] = False
        draws = Draws(requests=requests, slots=np.zeros_like(requests), purpose=Purpose.RECOVER)
        return accepted, dice.pick(weighed.after(accepted, target_rows), draws)


@dataclass(frozen=True, kw_only=True)
class _Visit:
    """A node in post-order, and the nodes that are entered on the way to it, from above, itself included."""

    node: int
    entered: list[int]


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
    weights: Float[np.ndarray, " nodes"]

    def after(
        self, nodes: Int[np.ndarray, " n"], target_rows: Float[Tensor, "nodes vocab"]
    ) -> Float[Tensor, "n vocab"]:
        """Weights of the token that follows each accepted node."""
        plain = target_rows.index_select(0, upload(nodes, target_rows.device))
        if (self.place[nodes] < 0).all():
            return plain
        at = upload(self.place[nodes].clip(0), plain.device)
        leaf = upload(self.place[nodes] < 0, plain.device) | self.empty[at]
        return torch.where(leaf[:, None], plain, self.rows[at])


def _visits(draft: Draft, request: int) -> Iterator[_Visit]:
    """The nodes of one request below its root, children before parents, siblings in drawing order."""
    stack: list[tuple[int, int]] = [(int(draft.offsets[request]), 0)]
    entered: list[int] = []
    while stack:
        node, k = stack.pop()
        if k < draft.first_child[node + 1] - draft.first_child[node]:
            child = int(draft.links[draft.first_child[node] + k])
            stack += [(node, k + 1), (child, 0)]
            entered.append(child)
        elif stack:
            yield _Visit(node=node, entered=entered)
            entered = []


def _weigh(
    draft: Draft, target_rows: Float[Tensor, "nodes vocab"], visits: list[list[_Visit]], span: slice
) -> "_Weighed":
    """The $P$ and weight of every node of a span when its turn comes."""
    device = target_rows.device
    inner = span.start + np.flatnonzero(np.diff(draft.first_child[span.start : span.stop + 1]))
    place = np.full(len(draft.parents), -1)
    place[inner] = np.arange(len(inner))
    P = target_rows.index_select(0, upload(inner, device))
    Q = child_rows(draft, inner, P)
    w = torch.ones(len(place), 1, dtype=torch.float64, device=device)
    mass_p, mass_q = P.sum(-1, keepdim=True).double(), Q.sum(-1, keepdim=True).double()
    left, below = P.new_empty(len(visits), P.shape[1]), P.new_empty(len(visits), P.shape[1])
    for i in range(max(map(len, visits))):
        now = [own[i] for own in visits if i < len(own)]
        for k in range(max(len(visit.entered) for visit in now)):
            nodes = np.array([visit.entered[k] for visit in now if k < len(visit.entered)])
            above, v, at = (upload(x, device) for x in (draft.parents[nodes], place[draft.parents[nodes]], nodes))
            p, q = P[v, draft.tokens[at]][:, None].double(), Q[v, draft.tokens[at]][:, None].double()
            chance = w[above] * (p * mass_q[v]) / (q * mass_p[v])
            w[at] = torch.where((p > 0) & (q > 0), chance, 0.0).clamp(max=1)
        nodes = np.array([visit.node for visit in now])
        above, v = (upload(x, device) for x in (draft.parents[nodes], place[draft.parents[nodes]]))
        token = draft.tokens[upload(nodes, device)]
        # Without mass the parent's weight is 0, its row stays empty, and it will be forgotten too.
        scale = torch.where(mass_p[v] > 0, w[above] / mass_p[v], 0.0).to(P)
        gone = torch.where(mass_q[v] > 0, 1 / mass_q[v], 0.0).to(P)
        rest = torch.index_select(P, 0, v, out=left[: len(nodes)]).mul_(scale)
        rest.addcmul_(torch.index_select(Q, 0, v, out=below[: len(nodes)]), gone, value=-1).clamp_min_(0)
        mass = rest.sum(-1, keepdim=True).double()
        w[above] = torch.where(mass > 0, mass / (mass + (1 - w[above])), 0.0)
        P.index_copy_(0, v, rest)
        mass_p[v] = mass
        mass_q[v] = (mass_q[v] - Q[v, token][:, None].double()).clamp_min(0)
        Q[v, token] = 0
    return _Weighed(rows=P, place=place, empty=(mass_p <= 0).squeeze(1), weights=w.squeeze(1).cpu().numpy())
