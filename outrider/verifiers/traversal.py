"""Traversal: judge a tree from its leaves upwards, each leaf with the path that leads to it (Weng et al. 2025)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.dice import Dice, Draws
from outrider.types import Draft, Verdict
from outrider.verifiers.protocol import child_rows, everyone, upload
from outrider.verifiers.walk import verdict_at


@dataclass(frozen=True, kw_only=True)
class Traversal:
    r"""Visit the nodes in post-order; accept the first whose coin lands, with the path above it; else forget it.

    Every node has a weight: 1 at the root, and $w(x) = \min(1, w(v) P_v(x)/Q_v(x))$ for a child x of v, at first with
    $P = p$ and $Q = q$. The coin of a node without children lands with probability w. A node that is forgotten changes
    its parent: with $R = (w(v) P_v - Q_v)_+$ and $S = \sum R$, the weight becomes $S/(S + 1 - w(v))$, $P_v = R/S$, and
    $Q_v(x) = 0$. What the last node leaves to the root needs no coin. The next token is drawn from the $P$ of the node
    that was accepted. On a chain this is block verification.

    The weights follow from the tree alone, so they are worked out on the device, all requests in step, and copied to
    the host once; the coins are thrown there.

    References:
        Weng et al. 2025, Traversal Verification, algorithm 1. https://arxiv.org/abs/2505.12398
    """

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        visits = [list(_visits(draft, request)) for request in range(draft.num_requests)]
        P, weights = _weigh(draft, target_rows, visits)
        slots = np.empty(len(draft.parents), dtype=np.int64)
        slots[draft.links] = np.arange(len(draft.links))
        accepted = draft.offsets[:-1].copy()
        undecided = np.ones(len(visits), dtype=bool)
        for i in range(max(map(len, visits))):
            asked = np.flatnonzero(undecided & np.array([i < len(own) for own in visits]))
            nodes = np.array([visits[r][i].node for r in asked.tolist()], dtype=np.int64)
            own = slots[nodes] - draft.first_child[draft.offsets[asked]]
            landed = dice.accept(weights[nodes], Draws(requests=asked, slots=own, purpose="accept"))
            accepted[asked[landed]] = nodes[landed]
            undecided[asked[landed]] = False
        tokens = dice.pick(P[upload(accepted, P.device)], everyone(draft, 0, "recover"))
        return verdict_at(draft, accepted, tokens)


@dataclass(frozen=True, kw_only=True)
class _Visit:
    """A node in post-order, and the nodes that are entered on the way to it, from above, itself included."""

    node: int
    entered: list[int]


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
    draft: Draft, target_rows: Float[Tensor, "nodes vocab"], visits: list[list[_Visit]]
) -> tuple[Float[Tensor, "nodes vocab"], Float[np.ndarray, " nodes"]]:
    """Every node's $P$ and weight when its turn comes."""
    P, device = target_rows.clone(), target_rows.device
    Q = child_rows(draft, np.arange(len(draft.parents)), target_rows)
    w = torch.ones(len(P), 1, dtype=torch.float64, device=device)
    mass_p, mass_q = P.sum(-1, keepdim=True), Q.sum(-1, keepdim=True)
    for i in range(max(map(len, visits))):
        now = [own[i] for own in visits if i < len(own)]
        for k in range(max(len(visit.entered) for visit in now)):
            nodes = np.array([visit.entered[k] for visit in now if k < len(visit.entered)])
            v, at = upload(draft.parents[nodes], device), upload(nodes, device)
            token = draft.tokens[at][:, None]
            p, q = P[v].gather(1, token).double() / mass_p[v], Q[v].gather(1, token).double() / mass_q[v]
            w[at] = torch.where((p > 0) & (q > 0), w[v] * p / q, 0.0).clamp(max=1)
        nodes = np.array([visit.node for visit in now])
        v, token = upload(draft.parents[nodes], device), draft.tokens[upload(nodes, device)][:, None]
        q = Q[v]
        left = P[v].mul_((w[v] / mass_p[v]).to(P)).sub_(q / mass_q[v]).clamp_min_(0)
        mass = left.sum(-1, keepdim=True)
        below = mass + (1 - w[v])
        # Without mass the parent's weight is 0, and it will be forgotten too; its row stands.
        w[v] = torch.where(mass > 0, mass / below, 0.0)
        P[v], mass_p[v] = torch.where(mass > 0, left, P[v]), torch.where(mass > 0, mass, mass_p[v])
        q.scatter_(1, token, 0.0)
        Q[v], mass_q[v] = q, q.sum(-1, keepdim=True)
    return P, w.squeeze(1).cpu().numpy()
