"""Independent paths: each is drawn as a chain, and paths with equal beginnings share nodes."""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.option import check, option
from outrider.core.types import Structure
from outrider.core.uploads import upload
from outrider.trees.protocol import Children, Level, UnprunedTree, check_size


@dataclass(frozen=True, kw_only=True)
class IidTree(UnprunedTree):
    """Draw `num_paths` chains independently (SpecInfer, SpecTr).

    If m paths run through a node, m children are drawn there. Repeated draws are kept, as repeated links to one node.
    With `dedup` each node has one link to each distinct child, in the order of first appearance.

    References:
        Miao et al. 2023, SpecInfer. https://arxiv.org/abs/2305.09781
        Sun et al. 2023, SpecTr. https://arxiv.org/abs/2310.15141
    """

    num_paths: int = option(3, least=1)
    dedup: bool = False

    def __post_init__(self) -> None:
        check(self)
        check_size(self.num_paths)

    @property
    def structure(self) -> Structure:
        return "iid_dedup" if self.dedup else "iid"

    def choose(self, level: Level, dice: Dice) -> Children:
        paths = level.values[:, 0].astype(np.int64) if level.depth else np.full(len(level.nodes), self.num_paths)
        picked: list[Int[Tensor, " numbers"]] = []
        places: list[Int[np.ndarray, "n count"]] = []
        for count in np.unique(paths).tolist():
            rows = np.flatnonzero(paths == count)
            slots, depths = level.nodes[rows] * self.num_paths, np.full(len(rows), level.depth)
            draws = Draws(requests=level.owners[rows], slots=slots, purpose=Purpose.DRAFT, depths=depths)
            candidates = level.drawable[upload(rows, level.drawable.device)]
            picked.append(dice.pick_many(candidates, count, True, draws).flatten())
            places.append(rows)
        numbers = torch.cat(picked).cpu().numpy()
        drawn: list[Int[np.ndarray, " m"]] = [np.zeros(0, dtype=np.int64)] * len(paths)
        for rows in places:
            for row in rows.tolist():
                drawn[row], numbers = numbers[: paths[row]], numbers[paths[row] :]
        distinct = [list(dict.fromkeys(tokens.tolist())) for tokens in drawn]
        sizes = np.array([len(tokens) for tokens in distinct])
        first = np.concatenate([[0], np.cumsum(sizes)])
        links = [
            first[i] + kept.index(token)
            for i, (kept, tokens) in enumerate(zip(distinct, drawn, strict=True))
            for token in tokens.tolist()
        ]
        parents = np.repeat(np.arange(len(sizes)), sizes)
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=torch.tensor([token for kept in distinct for token in kept]),
            expand=np.ones(len(parents), dtype=bool),
            values=np.bincount(links, minlength=len(parents))[:, None].astype(float),
            links=None if self.dedup else np.array(links),
        )
