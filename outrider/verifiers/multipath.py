"""Greedy multi-path block verification: block verification of the highest-ranking path (GBV)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.sampling import fresh, rows_at_once
from outrider.core.types import Draft, Verdict
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.protocol import Decision, child_rows, drawn_with, upload
from outrider.verifiers.traits import CHAINS, StatedVerifier

LOWEST = (127 - 8) << 4
"""Exponent and four leading bits of 2^-8 as a float32."""


@dataclass(frozen=True, kw_only=True)
class MultipathVerifier(StatedVerifier):
    r"""Of K independent paths follow, at every node, the child that ranks highest in p/q; verify that path as a block.

    Ranking needs a strict order, the same here and in the path's law: p/q in steps of a sixteenth of an octave, from
    2^-8 to 2^8, and among equals the token id. The law is exact for any order; an order of 256 steps can be sorted by
    radix, which is fast. Let x be the probability that one path runs through a node, A that it ranks below the node's,
    and $c(t)$ the draft's mass of the tokens that rank no higher than t. Then the chosen path goes on with t with
    probability
    $\tilde q(t) \propto (A + x c(t))^K - (A + x (c(t) - q(t)))^K$, and that is the draft's row that the block rule must
    be given. Below t, $A \gets A + x (c(t) - q(t))$ and $x \gets x q(t)$.

    References:
        Greedy multi-path block verification, 2026. https://arxiv.org/abs/2602.16961
    """

    kinds = CHAINS | {"iid paths"}
    takes_likeliest = True

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        if draft.rows is None or not draft.branches:
            # Of one path, or of chosen ones, the path's own law is the draft's.
            return BlockVerifier().decide(draft, target_rows, dice)
        chain, nodes = _select(draft, target_rows)
        at = upload(nodes, target_rows.device)
        decision = BlockVerifier().decide(chain, target_rows.index_select(0, at), dice)
        return Decision(last=at[decision.last], next_tokens=decision.next_tokens)

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        if draft.rows is None:
            return BlockVerifier().verify(draft, target_rows, dice)
        chain, nodes = _select(draft, target_rows)
        verdict = BlockVerifier().verify(chain, target_rows.index_select(0, upload(nodes, target_rows.device)), dice)
        paths = np.where(verdict.paths >= 0, nodes[verdict.paths], -1)
        return Verdict(paths=paths, num_accepted=verdict.num_accepted, next_tokens=verdict.next_tokens)


def _select(draft: Draft, target_rows: Float[Tensor, "nodes vocab"]) -> tuple[Draft, Int[np.ndarray, " chosen"]]:
    """The highest-ranking path of each request as a chain with its own law, and the nodes that it consists of."""
    device, tokens = target_rows.device, draft.tokens.cpu().numpy()
    ranks = _ranks(draft, target_rows)
    paths = [_highest(draft, request, ranks, tokens) for request in range(draft.num_requests)]
    chosen, lengths = np.concatenate(paths), np.array([len(path) for path in paths])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    depths = np.arange(len(chosen)) - np.repeat(offsets[:-1], lengths)
    inner = np.append(depths[1:] > 0, False)
    rows = None
    if inner.any():
        root = np.repeat(draft.offsets[:-1], lengths)[inner]
        num_paths = draft.first_child[root + 1] - draft.first_child[root]
        rows = _law(draft, target_rows, chosen[inner], tokens[chosen[1:][inner[:-1]]], num_paths)
    chain = Draft(
        tokens=draft.tokens[upload(chosen, device)],
        parents=np.where(depths > 0, np.arange(len(chosen)) - 1, -1),
        depths=depths,
        numbers=draft.numbers[chosen],
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(inner)]),
        links=np.flatnonzero(depths > 0),
        rows=rows,
        row_of=np.where(inner, np.cumsum(inner) - 1, -1),
        structure="chain",
    )
    return chain, chosen


def _ranks(draft: Draft, target_rows: Float[Tensor, "nodes vocab"]) -> Int[np.ndarray, " nodes"]:
    """Rank of each node's token, given its parent."""
    ranks = np.zeros(len(draft.parents), dtype=np.int64)
    nodes = np.flatnonzero(draft.parents >= 0)
    if len(nodes) and draft.rows is not None:
        above, device = draft.parents[nodes], target_rows.device
        token = draft.tokens[upload(nodes, device)]
        q = drawn_with(draft, draft.row_of[above], token).to(target_rows)
        ranks[nodes] = _rank(target_rows[upload(above, device), token] / q).cpu().numpy()
    return ranks


def _highest(
    draft: Draft, request: int, ranks: Int[np.ndarray, " nodes"], tokens: Int[np.ndarray, " nodes"]
) -> Int[np.ndarray, " path"]:
    """From the root always on to the child that ranks highest."""
    path = [int(draft.offsets[request])]
    while len(below := draft.links[draft.first_child[path[-1]] : draft.first_child[path[-1] + 1]]):
        path.append(max(below.tolist(), key=lambda node: (ranks[node], tokens[node])))
    return np.array(path)


def _law(
    draft: Draft,
    target_rows: Float[Tensor, "nodes vocab"],
    nodes: Int[np.ndarray, " n"],
    following: Int[np.ndarray, " n"],
    num_paths: Int[np.ndarray, " n"],
) -> Float[Tensor, "n vocab"]:
    r"""$\tilde q$ after each node, given the token that follows it and how many paths there are."""
    device, size = target_rows.device, rows_at_once(target_rows)
    parts = [slice(first, first + size) for first in range(0, len(nodes), size)]
    c = fresh(target_rows, rows=len(nodes))
    for part in parts:
        p = target_rows.index_select(0, upload(nodes[part], device))
        q = child_rows(draft, nodes[part], p)
        # Where q is 0 the rank does not matter.
        order = _ranked(p.div_(q))
        c[part].scatter_(1, order, q.gather(1, order).cumsum(-1, dtype=torch.float64).to(c.dtype))
    token = upload(following, device)
    chance = drawn_with(draft, draft.row_of[nodes], token)
    picked = torch.stack([c.gather(1, token[:, None])[:, 0], chance.to(c.dtype)]).double().cpu().numpy()
    # The law depends on the proportion of the two alone; their sum stays 1, so that deep paths do not vanish.
    below, through = np.zeros(len(nodes)), np.ones(len(nodes))
    for i in range(1, len(nodes)):
        if draft.parents[nodes[i]] >= 0:
            less = below[i - 1] + through[i - 1] * (picked[0, i - 1] - picked[1, i - 1])
            own_part = through[i - 1] * picked[1, i - 1]
            below[i], through[i] = less / (less + own_part), own_part / (less + own_part)
    spare = [torch.empty_like(c[:size]) for _ in range(3)]
    for part in parts:
        q = child_rows(draft, nodes[part], target_rows)
        A, x = (upload(side[part, None], device).to(c) for side in (below, through))
        K = upload(num_paths[part, None], device)
        b, total, power = (memory[: len(q)] for memory in spare)
        a = c[part].mul_(x).add_(A)
        torch.addcmul(a, q, x, value=-1, out=b)
        # (a^K - b^K) / x = q (a^(K-1) + a^(K-2) b + ... + b^(K-1)), which does not cancel.
        total.fill_(1)
        power.fill_(1)
        for k in range(1, int(num_paths.max())):
            power.mul_(b)
            if bool((num_paths[part] <= k).any()):
                total = torch.where(k < K, total * a + power, total)
            else:
                total.mul_(a).add_(power)
        torch.mul(total, q, out=a)
        a.div_(a.sum(-1, keepdim=True))
    return c


def _rank(ratios: Float[Tensor, "..."]) -> UInt8[Tensor, "..."]:
    """Exponent and four more bits of ratios as float32, counted from 2^-8; bits stand in the order of values."""
    short = torch.empty_like(ratios, dtype=torch.float32).copy_(ratios)
    return short.view(torch.int32).bitwise_right_shift_(19).sub_(LOWEST).clamp_(0, 255).to(torch.uint8)


def _ranked(ratios: Float[Tensor, "n vocab"]) -> Int[Tensor, "n vocab"]:
    """Token ids of each row from the lowest rank to the highest, equal ones by id.

    On a CPU NumPy sorts by radix, a tenth of the work of comparing; side by side on several cores it is no quicker.
    """
    keys = _rank(ratios)
    if keys.device.type != "cpu":
        return torch.sort(keys, dim=-1, stable=True).indices
    rows = [np.argsort(row, kind="stable") for row in keys.numpy()]
    return torch.from_numpy(np.stack(rows))
