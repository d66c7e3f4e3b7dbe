"""The interface of verifiers, and functions that several of them share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.sampling import rows_at_once
from outrider.core.types import Draft, InputError, Verdict
from outrider.core.uploads import upload as upload


@runtime_checkable
class Verifier(Protocol):
    """Decides which nodes of a draft are accepted, for all requests of a batch at once.

    Immutable. Rows over the vocabulary stay on the device. On a CPU the walk along the tree runs on the host, and only
    the nodes that it reaches are judged. Elsewhere a verifier that can decides on the device, and waits for nothing:
    see `Deciding`.
    """

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        """Walk each tree; row n of `target_rows` is the target's distribution after node n, roots included."""
        ...


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What a verifier decided, on the device still.

    Attributes:
        last: Packed index of each request's last accepted node; its root if nothing was accepted.
        next_tokens: The recovered or bonus token.
    """

    last: Int[Tensor, " requests"]
    next_tokens: Int[Tensor, " requests"]

    def verdict(self, draft: Draft) -> Verdict:
        """The verdict; one copy from the device."""
        return verdict_at(draft, self.last.cpu().numpy(), self.next_tokens)


@runtime_checkable
class Deciding(Protocol):
    """A verifier that decides without waiting for the device. It judges all nodes, also those that no walk reaches, so
    it is used where rows are not on a CPU.
    """

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        """As `verify`, with the same random numbers."""
        ...


def verdict_at(draft: Draft, accepted: Int[np.ndarray, " requests"], tokens: Int[Tensor, " requests"]) -> Verdict:
    """The paths that end at the accepted nodes."""
    paths = np.full((len(accepted), int(draft.depths.max(initial=0))), -1)
    here = accepted.copy()
    for depth in range(paths.shape[1], 0, -1):
        at = np.flatnonzero(draft.depths[here] == depth)
        paths[at, depth - 1] = here[at]
        here[at] = draft.parents[here[at]]
    return Verdict(paths=paths, num_accepted=draft.depths[accepted], next_tokens=tokens)


@runtime_checkable
class Carrying(Protocol):
    """A verifier that carries a value of each request from step to step: its verdict's `carried`."""

    def verify_carrying(
        self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice, carried: Sequence[object]
    ) -> Verdict:
        """As `verify`, with the value that the last verdict carried for each request; None for a new request."""
        ...


def residual(target_rows: Float[Tensor, "n vocab"], draft_rows: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    r"""Weights of the token that replaces a rejected one, not normalised: $\max(0, p(x) - q(x))$.

    If $p = q$, nothing can be rejected and the residual has no mass. Then $p$ is returned, so that callers need no
    branch.

    Example:
        >>> residual(torch.tensor([[0.5, 0.5, 0.0]]), torch.tensor([[0.75, 0.125, 0.125]]))
        tensor([[0.0000, 0.3750, 0.0000]])

    References:
        Leviathan et al. 2023, section 2.3. https://arxiv.org/abs/2211.17192
    """
    left = (target_rows - draft_rows).clamp_min(0)
    return torch.where(left.sum(-1, keepdim=True) > 0, left, target_rows)


def child_rows(draft: Draft, nodes: Int[np.ndarray, " n"], like: Float[Tensor, "_ vocab"]) -> Float[Tensor, "n vocab"]:
    """The law of the first child of each node, in a fresh tensor: the row that it was drawn from, or one-hot if it was
    chosen. Leaves get an arbitrary row. The result has the width, dtype and device of `like`.
    """
    row_of = draft.row_of[nodes]
    if draft.rows is not None and (row_of >= 0).all():
        return _wide(draft, draft.rows.index_select(0, upload(row_of, like.device)).to(like.dtype))
    following = first_children(draft, nodes, like.device)
    chosen = like.new_zeros(len(nodes), like.shape[1]).scatter_(1, draft.tokens[following][:, None], 1.0)
    if draft.rows is None:
        return chosen
    drawn = _wide(draft, draft.rows[upload(row_of.clip(0), like.device)].to(like.dtype))
    return torch.where(upload(row_of >= 0, like.device)[:, None], drawn, chosen)


def _wide(draft: Draft, rows: Float[Tensor, "n width"]) -> Float[Tensor, "n vocab"]:
    """Rows over the whole vocabulary."""
    return rows if draft.short_list is None else draft.short_list.widened(rows)


def drawn_with(draft: Draft, rows: Int[np.ndarray, " n"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The probability of draft tokens, each in the draft's row of that number; 1 of a chosen token, whose row is -1.

    Raises:
        ValueError: Nothing was drawn.
    """
    if draft.rows is None:
        raise ValueError("these tokens were chosen, not drawn")
    places = tokens if draft.short_list is None else draft.short_list.places[tokens]
    drawn = draft.rows[upload(rows, draft.rows.device), places]
    return drawn if (rows >= 0).all() else torch.where(upload(rows >= 0, drawn.device), drawn, 1.0)


def first_children(draft: Draft, nodes: Int[np.ndarray, " n"], device: torch.device) -> Int[Tensor, " n"]:
    """Packed index of the first child of each node; an arbitrary node for a leaf."""
    if not len(draft.links):
        return upload(np.zeros_like(nodes), device)
    return upload(draft.links[np.minimum(draft.first_child[nodes], len(draft.links) - 1)], device)


def ratio(p: Float[Tensor, "n k"], q: Float[Tensor, "n k"]) -> Float[Tensor, "n k"]:
    """Probabilities min(1, p/q); 0 where p is 0, or where rounding made q 0."""
    return (p.double() / q.double()).masked_fill_(q <= 0, 0.0).clamp_(max=1)


@dataclass(frozen=True, kw_only=True)
class Chains:
    """The chains of a draft side by side, on the host.

    Attributes:
        roots: Packed index of each chain's root.
        lengths: Drafted tokens of each chain.
        p: The target's probability of each chain's i-th token given its prefix; 0 where the chain is shorter, so that
            padding is never accepted.
        q: The draft's probability of the same token; 1 for a chosen token.
    """

    roots: Int[np.ndarray, " requests"]
    lengths: Int[np.ndarray, " requests"]
    p: Float[np.ndarray, "requests depth"]
    q: Float[np.ndarray, "requests depth"]

    @property
    def depth(self) -> int:
        return self.p.shape[1]

    @property
    def ratios(self) -> Float[np.ndarray, "requests depth"]:
        """p/q; 0 where rounding made q 0."""
        return np.divide(self.p, self.q, out=np.zeros_like(self.p), where=self.q > 0)

    def verdict(self, num_accepted: Int[np.ndarray, " requests"], next_tokens: Int[Tensor, " requests"]) -> Verdict:
        """The verdict that accepts the first `num_accepted` nodes of each chain."""
        position = np.arange(1, self.depth + 1)
        paths = np.where(position <= num_accepted[:, None], self.roots[:, None] + position, -1)
        return Verdict(paths=paths, num_accepted=num_accepted, next_tokens=next_tokens)


def check_chains(draft: Draft) -> None:
    """Raise InputError for a draft that branches."""
    if draft.branches:
        raise InputError("a chain verifier was given a branching draft; use match(), which walks any tree")


def chains(draft: Draft, target_rows: Float[Tensor, "nodes vocab"]) -> Chains:
    """A draft as chains. Raises InputError if it branches."""
    check_chains(draft)
    roots, lengths = draft.offsets[:-1], np.diff(draft.offsets) - 1
    pq = np.zeros((2, len(roots), int(lengths.max(initial=0))))
    pq[1] = 1
    if lengths.any():
        inner = np.flatnonzero(draft.parents >= 0)
        children = upload(inner, target_rows.device)
        tokens = draft.tokens[children]
        p = target_rows[children - 1, tokens].double()
        q = torch.ones_like(p)
        if draft.rows is not None:
            q = drawn_with(draft, draft.row_of[inner - 1], tokens).double()
        owners = np.repeat(np.arange(len(roots)), lengths)
        pq[:, owners, draft.depths[inner] - 1] = torch.stack([p, q]).cpu().numpy()
    return Chains(roots=roots, lengths=lengths, p=pq[0], q=pq[1])


def gains(
    draft: Draft,
    nodes: Int[np.ndarray, " n"],
    weights: Float[np.ndarray, " n"],
    target_rows: Float[Tensor, "nodes vocab"],
) -> Float[np.ndarray, " n"]:
    r"""$\sum_x (w\,p(x) - q(x))_+$ at each node, on the host. Works on a few rows at a time, to reuse memory."""
    if not len(nodes):
        return np.zeros(0)
    scale = upload(weights, target_rows.device).to(target_rows)[:, None]
    count = rows_at_once(target_rows)
    masses = []
    for first in range(0, len(nodes), count):
        some = nodes[first : first + count]
        p = target_rows.index_select(0, upload(some, target_rows.device))
        p.mul_(scale[first : first + count]).sub_(child_rows(draft, some, p))
        masses.append(p.clamp_min_(0).sum(-1))
    return torch.cat(masses).double().cpu().numpy()


def everyone(
    draft: Draft, slot: int, purpose: Purpose, active: Bool[np.ndarray, " n"] | None = None, depth: int | None = None
) -> Draws:
    """One draw for each request of the batch.

    Args:
        depth: Where the drawn tokens stand, as `Draws.depths` says.
    """
    count = draft.num_requests
    depths = None if depth is None else np.full(count, depth)
    return Draws(requests=np.arange(count), slots=np.full(count, slot), purpose=purpose, depths=depths, active=active)


def plain(draft: Draft, target_rows: Float[Tensor, "requests vocab"], dice: Dice) -> Verdict:
    """The verdict of every verifier that carries nothing where nothing was drafted: a token from each root's row."""
    count = draft.num_requests
    return Verdict(
        paths=np.zeros((count, 0), dtype=np.int64),
        num_accepted=np.zeros(count, dtype=np.int64),
        next_tokens=dice.pick(target_rows, everyone(draft, 0, Purpose.RECOVER, depth=0)),
    )


def undrafted(draft: Draft, target_rows: Float[Tensor, "requests vocab"], dice: Dice) -> Decision:
    """The decision where nothing was drafted: a token from each root's row."""
    drawn = dice.pick(target_rows, everyone(draft, 0, Purpose.RECOVER))
    return Decision(last=upload(draft.offsets[:-1], drawn.device), next_tokens=drawn)


def recover(
    draft: Draft,
    dice: Dice,
    target_rows: Float[Tensor, "nodes vocab"],
    last: Int[np.ndarray, " requests"],
    rejected: Bool[np.ndarray, " requests"],
    weight: Float[np.ndarray, " requests"] | None = None,
) -> Int[Tensor, " requests"]:
    r"""The token after the last accepted node: from $\max(0, w p - q)$ after a rejection, from $p$ after none.

    Args:
        last: Packed index of each request's last accepted node.
        weight: $w$ of each request; None means 1.
    """
    # Where nothing was drafted, the rows are those of the roots.
    p = target_rows if len(last) == len(target_rows) else target_rows[upload(last, target_rows.device)]
    weights = p
    if rejected.any():
        scaled = p if weight is None else p * upload(weight, p.device).to(p)[:, None]
        weights = residual(scaled, child_rows(draft, last, p))
        if not rejected.all():
            weights = torch.where(upload(rejected, p.device)[:, None], weights, p)
    return dice.pick(weights, everyone(draft, 0, Purpose.RECOVER))
