"""Match: draw from the target and go on while the draw is in the draft (naive sampling; EAGLE, Medusa, DDTree)."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import Decision, everyone, upload
from outrider.verifiers.traits import EVERY, StatedVerifier
from outrider.verifiers.walk import child_with, followed, inner_nodes, owners


@dataclass(frozen=True, kw_only=True)
class MatchVerifier(StatedVerifier):
    r"""Draw $y \sim p$ at a node; if a child holds $y$ go there, else stop and emit $y$.

    It does not read how the draft was made, so it is lossless for every structure. For chosen children it is optimal:
    the expected number of accepted tokens is the sum over nodes of the target's probability of their path.

    References:
        Li et al. 2024, EAGLE, section 3.3. https://arxiv.org/abs/2401.15077
        Yang et al. 2024, MCSD (naive mode). https://arxiv.org/abs/2401.06706
    """

    kinds = EVERY
    takes_likeliest = True

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        if target_rows.device.type != "cpu":
            return self.decide(draft, target_rows, dice).verdict(draft)
        tokens = draft.tokens.numpy()
        here = draft.offsets[:-1].copy()
        depth = int(draft.depths.max(initial=0))
        paths = np.full((len(here), depth), -1)
        num_accepted = np.zeros_like(here)
        next_tokens = np.zeros_like(here)
        walking = np.ones(len(here), dtype=bool)
        while walking.any():
            level = int(num_accepted.max())
            rows = target_rows[upload(here, target_rows.device)]
            drawn = dice.pick(rows, everyone(draft, level, Purpose.RECOVER, walking, depth=level)).numpy()
            next_tokens[walking] = drawn[walking]
            for r in np.flatnonzero(walking).tolist():
                children = draft.links[draft.first_child[here[r]] : draft.first_child[here[r] + 1]]
                hits = children[tokens[children] == drawn[r]]
                walking[r] = len(hits) > 0
                if walking[r]:
                    here[r] = paths[r, num_accepted[r]] = hits[0]
                    num_accepted[r] += 1
        return Verdict(paths=paths, num_accepted=num_accepted, next_tokens=torch.from_numpy(next_tokens))

    def decide(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Decision:
        nodes = inner_nodes(draft)
        draws = Draws(requests=owners(draft), slots=draft.depths, purpose=Purpose.RECOVER, depths=draft.depths)
        drawn = dice.pick(target_rows, draws)
        last = followed(draft, nodes, child_with(draft, nodes, drawn[upload(nodes, drawn.device)]))
        return Decision(last=last, next_tokens=drawn[last])
