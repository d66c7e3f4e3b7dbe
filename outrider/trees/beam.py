"""The stochastic beam: sequences drawn without replacement, a fixed number per level (RSD-S)."""

from dataclasses import dataclass

import numpy as np
import torch

from outrider.core.dice import Dice
from outrider.core.option import check, option
from outrider.core.types import Structure
from outrider.trees.protocol import Children, Level, UnprunedTree, check_size


@dataclass(frozen=True, kw_only=True)
class BeamTree(UnprunedTree):
    r"""Keep the `width` sequences with the largest perturbed log-probabilities at every level.

    Each node carries its log-probability $\phi$ and the maximum $G$ of the Gumbel variables of all sequences below it.
    Its children's perturbed values are computed in descending order: the first is $G$ itself, at a token drawn from the
    row; given the k-th, the next is $-\log(e^{-G_k} + e^{-(\phi + \log m_k + g)})$ at a token drawn from the remaining
    mass $m_k$, with $g$ standard Gumbel noise. This gives the law of Gumbel noise on every token, with `width` draws
    only. Which values are kept does not depend on their tokens, so children are still drawn without replacement in
    descending order. A parent may get no children.

    References:
        Jeon et al. 2024, RSD-S. https://arxiv.org/abs/2402.14160
        Kool et al. 2019, stochastic beam search. https://arxiv.org/abs/1903.06059
        Maddison et al. 2014, A* sampling (values from above). https://arxiv.org/abs/1411.0030
    """

    width: int = option(4, least=1)

    def __post_init__(self) -> None:
        check(self)
        check_size(self.width)

    @property
    def structure(self) -> Structure:
        return "without_replacement"

    def choose(self, level: Level, dice: Dice) -> Children:
        rows = level.drawable
        draws = level.draws(level.nodes * self.width)
        picked = dice.pick_many(rows, self.width, False, draws)
        chances = rows.gather(1, picked.clamp_min(0)).double()
        table = torch.cat([picked.double(), chances], 1).cpu().numpy()
        tokens, q = table[:, : self.width].astype(np.int64), table[:, self.width :]
        phi, top = level.values.T if level.depth else np.zeros((2, len(tokens)))
        noise = dice.gumbel(self.width, level.draws(level.nodes)).numpy()
        perturbed = np.empty_like(q)
        perturbed[:, 0] = top
        with np.errstate(divide="ignore"):
            for k in range(1, self.width):
                left = np.log((1 - q[:, :k].sum(1)).clip(min=0))
                perturbed[:, k] = -np.logaddexp(-perturbed[:, k - 1], -(phi + left + noise[:, k]))
            below = phi[:, None] + np.log(q)
        perturbed[tokens < 0] = -np.inf
        kept = np.zeros_like(tokens, dtype=bool)
        for owner in np.unique(level.owners):
            members = np.flatnonzero(level.owners == owner)
            flat = perturbed[members].ravel()
            best = np.argsort(-flat, kind="stable")[: self.width]
            best = best[flat[best] > -np.inf]
            kept[members[best // self.width], best % self.width] = True
        parents, ranks = np.nonzero(kept)
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=torch.from_numpy(tokens[parents, ranks]),
            expand=np.ones(len(parents), dtype=bool),
            values=np.stack([below[parents, ranks], perturbed[parents, ranks]], 1),
        )
