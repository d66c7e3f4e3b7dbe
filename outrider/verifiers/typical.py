"""Typical acceptance: keep what the target finds likely enough, given how sure it is (Medusa). Lossy."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.option import CheckedOptions, option
from outrider.core.sampling import rows_at_once
from outrider.core.types import Draft, Verdict
from outrider.verifiers.protocol import everyone, upload, verdict_at
from outrider.verifiers.traits import EVERY, StatedVerifier


@dataclass(frozen=True, kw_only=True)
class TypicalVerifier(CheckedOptions, StatedVerifier):
    r"""Accept a token x if $p(x) > \min(\epsilon, \delta e^{-H})$, with H the entropy of the target's row in nats.

    Of the nodes whose whole path is accepted, the deepest wins; of equally deep ones, the one with the likeliest path.
    The next token is drawn from the target's row there. Acceptance is not random, and unlikely draft tokens are never
    accepted, so the output's law is not the target's. At temperature 0 it is greedy decoding.

    Attributes:
        posterior_threshold: $\epsilon$; the names are Medusa's.
        posterior_alpha: $\delta$, about the square root of $\epsilon$.

    References:
        Cai et al. 2024, Medusa, section 3.3. https://arxiv.org/abs/2401.10774
    """

    kinds = EVERY
    lossy = True

    posterior_threshold: float = option(0.09, above=0, below=1)
    posterior_alpha: float = option(0.3, above=0, finite=False)

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        nodes = np.flatnonzero(draft.parents >= 0)
        best = draft.offsets[:-1].copy()
        if len(nodes):
            parts = target_rows.split(rows_at_once(target_rows))
            entropy = torch.cat([torch.special.entr(part).sum(-1) for part in parts])
            threshold = (self.posterior_alpha * (-entropy).exp()).clamp(max=self.posterior_threshold)
            above = upload(draft.parents[nodes], target_rows.device)
            p = target_rows[above, draft.tokens[upload(nodes, above.device)]]
            chances, enough = torch.stack([p, (p > threshold[above]).to(p)]).double().cpu().numpy()
            accepted, logs = np.ones(len(draft.parents), dtype=bool), np.zeros(len(draft.parents))
            owners = np.repeat(np.arange(draft.num_requests), np.diff(draft.offsets))[nodes]
            for node, owner, chance, fine in zip(nodes.tolist(), owners.tolist(), chances, enough, strict=True):
                parent = draft.parents[node]
                accepted[node] = accepted[parent] and fine > 0
                logs[node] = logs[parent] + (np.log(chance) if fine > 0 else -np.inf)
                held = best[owner]
                if accepted[node] and (draft.depths[node], logs[node]) > (draft.depths[held], logs[held]):
                    best[owner] = node
        rows = target_rows[upload(best, target_rows.device)]
        return verdict_at(draft, best, dice.pick(rows, everyone(draft, 0, Purpose.RECOVER)))
