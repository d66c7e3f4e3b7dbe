"""Greedy block verification with carry-over: the most tokens a block can give, paid back in the next (Sun et al.)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.dice import Dice
from outrider.types import Draft, InputError, Verdict
from outrider.verifiers.protocol import child_rows, everyone


@dataclass(frozen=True, kw_only=True)
class Pull:
    r"""A change of the target that is still in force: rows become $(R\,p - q)_+$, normalised.

    Attributes:
        ratio: R, the quotient of the joint probabilities of what was emitted since the block began.
        left: For how many more tokens.
    """

    ratio: float
    left: int


@dataclass(frozen=True, kw_only=True)
class GreedyBlock:
    r"""Accept the longest prefix that may be accepted, throwing coins from the longest down.

    With R the unclipped quotient of the joint probabilities of $x_1 \ldots x_i$, position i is accepted with
    probability $\min(1, \sum_x (R p - q)_+ / \sum_x (q - R p)_+)$, and $\min(1, R)$ at the end of the chain. The next
    token is drawn from $(R p - q)_+$, and what was gained is paid back: for the rest of the block's length the target
    is $(R p - q)_+$, with R continued along the tokens that are emitted. One block accepts as much as is possible at
    all, but several give less than block verification does.

    A block that begins within the reach of earlier ones takes their changed rows for its target, the oldest change
    first. It needs the draft's rows at the tokens that were emitted, which are those of the next block, so the drafter
    must be context-pure and the length fixed.

    References:
        Sun et al. 2024, appendix on greedy block verification. https://arxiv.org/abs/2403.10444
    """

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        return self.verify_carrying(draft, target_rows, dice, [None] * draft.num_requests)

    def verify_carrying(
        self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice, carried: Sequence[object]
    ) -> Verdict:
        """As `verify`, given each request's changes: a tuple of `Pull`, the oldest first."""
        if draft.branches:
            raise InputError("greedy_block was given a branching draft; use match(), which walks any tree")
        blocks = [
            _Block(draft, target_rows, request, own if isinstance(own, tuple) else ())
            for request, own in enumerate(carried)
        ]
        lengths = np.array([block.length for block in blocks])
        chances = np.zeros((len(blocks), int(lengths.max(initial=0)) + 1))
        for own, block in zip(chances, blocks, strict=True):
            own[: block.length + 1] = block.chances()
        num_accepted = np.zeros_like(lengths)
        for i in range(chances.shape[1] - 1, 0, -1):
            undecided = (num_accepted == 0) & (i <= lengths)
            landed = dice.accept(chances[:, i] * undecided, everyone(draft, i - 1, "accept"))
            num_accepted[undecided & landed] = i
        weights = torch.stack([block.weights(tau) for block, tau in zip(blocks, num_accepted.tolist(), strict=True)])
        tokens = dice.pick(weights, everyone(draft, 0, "recover"))
        position = np.arange(1, chances.shape[1])
        return Verdict(
            paths=np.where(position <= num_accepted[:, None], draft.offsets[:-1, None] + position, -1),
            num_accepted=num_accepted,
            next_tokens=tokens,
            carried=tuple(
                block.carry(tau, token)
                for block, tau, token in zip(blocks, num_accepted.tolist(), tokens.tolist(), strict=True)
            ),
        )


class _Block:
    """One request's chain, with the target's rows as earlier changes leave them."""

    def __init__(
        self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], request: int, pulls: tuple[Pull, ...]
    ) -> None:
        first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
        self.length = end - first - 1
        self._pulls = pulls
        self._plain = target_rows[first:end]
        self._q = child_rows(draft, np.arange(first, end - 1), self._plain[:-1])
        self._tokens = draft.tokens[first + 1 : end].tolist()
        # ratios[k][i]: what R of the k-th change is after i tokens of this chain.
        self._ratios = [[pull.ratio] for pull in pulls]
        rows = []
        for i in range(self.length + 1):
            stages = self._stages(i)
            rows.append(stages[-1])
            if i < self.length:
                for ratios, base in zip(self._ratios, stages, strict=False):
                    ratios.append(ratios[-1] * _quotient(base, self._q[i], self._tokens[i]))
        self._rows = torch.stack(rows)
        own = [_quotient(row, q, token) for row, q, token in zip(rows, self._q, self._tokens, strict=False)]
        self._R = np.concatenate([[1.0], np.cumprod(own)])

    def _stages(self, i: int) -> list[Float[Tensor, " vocab"]]:
        """The target's row after i tokens: before any change, after the first, after the second..."""
        stages = [self._plain[i]]
        for pull, ratios in zip(self._pulls, self._ratios, strict=True):
            reaches = pull.left > i and i < self.length
            stages.append(_pulled(stages[-1], self._q[i], ratios[i]) if reaches else stages[-1])
        return stages

    def chances(self) -> Float[np.ndarray, " positions"]:
        R = torch.from_numpy(self._R[:-1, None]).to(self._q)
        gap = R * self._rows[:-1] - self._q
        gain = torch.stack([gap.clamp_min(0).sum(-1), gap.clamp_max(0).sum(-1).neg()]).double().cpu().numpy()
        found = np.divide(gain[0], gain[1], out=np.ones(self.length), where=gain[1] > 0)
        return np.minimum(1, np.append(found, self._R[-1]))

    def weights(self, tau: int) -> Float[Tensor, " vocab"]:
        return self._rows[tau] if tau == self.length else _pulled(self._rows[tau], self._q[tau], float(self._R[tau]))

    def carry(self, tau: int, token: int) -> tuple[Pull, ...]:
        """The changes that reach beyond the tokens of this step."""
        if tau == self.length:
            return ()
        bases = self._stages(tau)
        ratios = [*(ratios[tau] for ratios in self._ratios), float(self._R[tau])]
        lefts = [*(pull.left for pull in self._pulls), self.length]
        kept = []
        for base, ratio, left in zip(bases, ratios, lefts, strict=True):
            onward = ratio * _quotient(base, self._q[tau], token)
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
