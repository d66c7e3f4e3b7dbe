"""What the loop asks of a verifier, and the pieces that the rules share."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.dice import Dice, Draws, Purpose
from outrider.types import Draft, InputError, Verdict


class Verifier(Protocol):
    """Decides which nodes of a draft survive, for all requests of a batch at once. Immutable."""

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        """Walk each tree; row n of `target_rows` is the target's distribution after node n, roots included."""
        ...


def residual(target_rows: Float[Tensor, "n vocab"], draft_rows: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    r"""Weights of the token that replaces a rejected one, not normalised: $\max(0, p(x) - q(x))$.

    Where $p = q$ nothing can be rejected and the residual has no mass; $p$ is returned, so that callers need no branch.

    Example:
        >>> residual(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.75, 0.125, 0.125]]))
        tensor([[0.0000, 0.3750, 0.0000]])

    References:
        Leviathan et al. 2023, section 2.3. https://arxiv.org/abs/2211.17192
    """
    left = (target_rows - draft_rows).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target_rows)


def child_rows(draft: Draft, nodes: Int[Tensor, " n"], like: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """The law of the first child of each node: the row it was drawn from, or one-hot where it was chosen.

    Leaves get an arbitrary row.
    """
    row_of = torch.from_numpy(draft.row_of).to(like.device)[nodes]
    chosen = torch.zeros_like(like)
    if draft.rows is None or bool((draft.row_of < 0).any()):
        following = (nodes + 1).clamp_max(len(draft.tokens) - 1)
        chosen.scatter_(1, draft.tokens[following][:, None], 1.0)
    if draft.rows is None:
        return chosen
    return torch.where((row_of >= 0)[:, None], draft.rows[row_of.clamp_min(0)].to(like.dtype), chosen)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The chains of a draft side by side.

    Attributes:
        nodes: Packed index of each chain's i-th drafted node; its root where the chain is shorter.
        lengths: Drafted tokens of each chain.
        ratios: p(x) / q(x) of every node given its parent, in float64; 0 at roots, so padding is never accepted.
    """

    nodes: Int[Tensor, "requests depth"]
    lengths: Int[Tensor, " requests"]
    ratios: Float[Tensor, " nodes"]

    def roots(self, draft: Draft) -> Int[Tensor, " requests"]:
        return torch.from_numpy(draft.offsets[:-1]).to(self.nodes.device)


def chains(draft: Draft, target_rows: Float[Tensor, "nodes vocab"]) -> Chains:
    """Read a draft as chains. Raises InputError if it branches."""
    if draft.branches:
        raise InputError("a chain verifier was given a branching draft; use match(), which walks any tree")
    device = target_rows.device
    lengths = np.diff(draft.offsets) - 1
    position = np.arange(1, max(lengths, default=0) + 1)
    nodes = draft.offsets[:-1, None] + np.where(position <= lengths[:, None], position, 0)
    inner = np.flatnonzero(draft.parents >= 0)
    parents, children = (torch.from_numpy(a).to(device) for a in (draft.parents[inner], inner))
    tokens = draft.tokens[children]
    p = target_rows[parents, tokens].double()
    q = torch.ones_like(p)
    if draft.rows is not None:
        row_of = torch.from_numpy(draft.row_of).to(device)[parents]
        q = torch.where(row_of >= 0, draft.rows[row_of.clamp_min(0), tokens].double(), q)
    ratios = p.new_zeros(len(draft.tokens))
    ratios[children] = torch.where(q > 0, p / q, torch.zeros_like(p))
    return Chains(nodes=torch.from_numpy(nodes).to(device), lengths=torch.from_numpy(lengths).to(device), ratios=ratios)


def everyone(draft: Draft, slot: int, purpose: Purpose, active: Bool[Tensor, " n"] | None = None) -> Draws:
    """One draw for each request of the batch."""
    count = draft.num_requests
    return Draws(requests=np.arange(count), slots=np.full(count, slot), purpose=purpose, active=active)


def chain_verdict(
    draft: Draft, side: Chains, num_accepted: Int[Tensor, " requests"], next_tokens: Int[Tensor, " requests"]
) -> Verdict:
    """The verdict that keeps the first `num_accepted` nodes of each chain."""
    position = torch.arange(side.nodes.shape[1], device=side.nodes.device)
    paths = side.nodes.masked_fill(position >= num_accepted[:, None], -1)
    return Verdict(paths=paths, num_accepted=num_accepted, next_tokens=next_tokens)
