"""Greedy block verification: accept the most that one block can, and correct the law in the next steps (Sun et al.)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.types import Draft, InputError, Verdict
from outrider.verifiers.protocol import Chains, chains, child_rows, everyone, gains, recover
from outrider.verifiers.traits import CHAINS, StatedVerifier

LARGEST = 1e30
"""R beyond this is taken for this, so that a float32 row times it is finite; what it leaves of q is rounding."""


@dataclass(frozen=True, kw_only=True)
class Pull:
    r"""A change of the target's rows that is still in force: they become $(R\,p - q)_+$, normalised.

    Attributes:
        ratio: R, the quotient of the joint probabilities of the tokens emitted since the block began.
        left: Number of tokens for which it stays in force.
    """

    ratio: float
    left: int


@dataclass(frozen=True, kw_only=True)
class GreedyBlockVerifier(StatedVerifier):
    r"""Accept the longest prefix that its coin allows; coins are thrown from the longest prefix down.

    With R the unclipped quotient of the joint probabilities of $x_1 \ldots x_i$, position i is accepted with
    probability $\min(1, \sum_x (R p - q)_+ / \sum_x (q - R p)_+)$, and $\min(1, R)$ at the end of the chain. The next
    token is drawn from $(R p - q)_+$, and the law is corrected afterwards: for the rest of the block's length the
    target is $(R p - q)_+$, with R continued along the emitted tokens. One block accepts as many tokens as any rule
    can, but several blocks together emit fewer than block verification.

    If earlier changes are still in force where a block begins, its target is the changed rows, the oldest change first.
    A change needs the draft's rows at the emitted tokens. The next block provides these rows, so the drafter must be
    context-pure and the length fixed.

    References:
        Sun et al. 2024, appendix on greedy block verification. https://arxiv.org/abs/2403.10444
    """

    kinds = CHAINS
    needs_one_length = True
    needs_pure_rows = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        return self.verify_carrying(draft, target_rows, dice, [None] * draft.num_requests)

    def verify_carrying(
        self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice, carried: Sequence[object]
    ) -> Verdict:
        """As `verify`, with each request's changes: a tuple of `Pull`, the oldest first."""
        pulls = [changes if isinstance(changes, tuple) else () for changes in carried]
        if draft.branches:
            raise InputError("greedy_block was given a branching draft; use match(), which walks any tree")
        rows, histories = _pull_rows(draft, target_rows, pulls)
        side = chains(draft, rows)
        R = np.concatenate([np.ones((len(side.roots), 1)), side.ratios.cumprod(1)], 1)
        num_accepted = self._accept(draft, rows, side, R, dice)
        last, rejected = side.roots + num_accepted, num_accepted < side.lengths
        weight = R[np.arange(len(last)), num_accepted].clip(max=LARGEST)
        tokens = recover(draft, dice, rows, last, rejected, weight)
        carried = [
            () if whole else _carry(draft, target_rows, history, int(node), int(tau), int(length), float(ratio), token)
            for whole, history, node, tau, length, ratio, token in zip(
                ~rejected, histories, last, num_accepted, side.lengths, weight, tokens.tolist(), strict=True
            )
        ]
        return replace(side.verdict(num_accepted, tokens), carried=tuple(carried))

    def _accept(
        self,
        draft: Draft,
        rows: Float[Tensor, "nodes vocab"],
        side: Chains,
        ratios: Float[np.ndarray, "requests positions"],
        dice: Dice,
    ) -> Int[np.ndarray, " requests"]:
        position = np.arange(side.depth + 1)
        # Both rows sum to one: what q has more of is what R p has more of, less R - 1. From R = 1 on all is accepted.
        chances = ratios.clip(max=1)
        inner = (position > 0) & (position < side.lengths[:, None]) & (ratios < 1)
        gain = gains(draft, (side.roots[:, None] + position)[inner], ratios[inner], rows)
        chances[inner] = gain / (gain + (1 - ratios[inner]))
        num_accepted = np.zeros_like(side.lengths)
        for i in range(side.depth, 0, -1):
            undecided = (num_accepted == 0) & (i <= side.lengths)
            landed = dice.accept(chances[:, i] * undecided, everyone(draft, i - 1, Purpose.ACCEPT))
            num_accepted[undecided & landed] = i
        return num_accepted


@dataclass(frozen=True, kw_only=True)
class _History:
    """A change along the draft: what it was, and its R after each drafted token that it reaches."""

    pull: Pull
    ratios: list[float]


def _pull_rows(
    draft: Draft, target_rows: Float[Tensor, "nodes vocab"], pulls: Sequence[tuple[Pull, ...]]
) -> tuple[Float[Tensor, "nodes vocab"], list[list[_History]]]:
    """The target's rows as the changes leave them, and each change followed along the draft."""
    histories = [[_History(pull=pull, ratios=[pull.ratio]) for pull in changes] for changes in pulls]
    if not any(pulls):
        return target_rows, histories
    rows = target_rows.clone()
    tokens = draft.tokens.tolist()
    for first, end, followed in zip(draft.offsets[:-1].tolist(), draft.offsets[1:].tolist(), histories, strict=True):
        for i in range(min(max((h.pull.left for h in followed), default=0), end - first - 1)):
            q = child_rows(draft, np.array([first + i]), target_rows[:1])[0]
            stages = _stages(target_rows[first + i], q, followed, i)
            rows[first + i] = stages[-1]
            for history, base in zip(followed, stages, strict=False):
                history.ratios.append(history.ratios[-1] * _quotient(base, q, tokens[first + i + 1]))
    return rows, histories


def _stages(
    p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], histories: Sequence[_History], i: int
) -> list[Float[Tensor, " vocab"]]:
    """The target's row after i drafted tokens: before any change, after the first, after the second..."""
    stages = [p]
    for history in histories:
        stages.append(_pulled(stages[-1], q, history.ratios[i]) if history.pull.left > i else stages[-1])
    return stages


def _carry(
    draft: Draft,
    target_rows: Float[Tensor, "nodes vocab"],
    histories: Sequence[_History],
    node: int,
    tau: int,
    length: int,
    ratio: float,
    token: int,
) -> tuple[Pull, ...]:
    """The changes that reach beyond this step, which ends with a token recovered at a node, tau tokens in."""
    q = child_rows(draft, np.array([node]), target_rows[:1])[0]
    alive = [history for history in histories if history.pull.left > tau]
    bases = _stages(target_rows[node], q, alive, tau)
    changes = [*((h.ratios[tau], h.pull.left) for h in alive), (ratio, length)]
    kept = []
    for base, (weight, left) in zip(bases, changes, strict=True):
        onward = weight * _quotient(base, q, token)
        # A token that the draft could not have proposed ends the change: the quotient's limit is the plain row.
        if left > tau + 1 and np.isfinite(onward):
            kept.append(Pull(ratio=onward, left=left - tau - 1))
    return tuple(kept)


def _quotient(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], token: int) -> float:
    above, below = float(p[token]), float(q[token])
    return above / below if below > 0 else np.inf


def _pulled(p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], ratio: float) -> Float[Tensor, " vocab"]:
    """$(R p - q)_+$, normalised; p where that has no mass, which is rounding."""
    if not np.isfinite(ratio):
        return p
    left = (ratio * p - q).clamp_min(0)
    mass = left.sum()
    return left / mass if mass > 0 else p
