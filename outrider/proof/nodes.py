"""The target's rows at the nodes of drafts in a sampled batch of mixed settings, against those of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.types import Request
from outrider.decoding.protocol import Cycle
from outrider.engine.engine import Engine
from outrider.proof.plain import MIXED, is_exact, plain_logits, transformers_rows
from outrider.proof.watched import run_watched

LOGITS = 1e-4
"""In float32 a target's logits are wrong if they differ from a plain forward by this share of their row's range."""
COARSE = 0.1
"""The same in coarser types, and in quantised models, which may round a block otherwise than a text."""
PROBABILITIES = 1e-3
"""Rows are wrong if a probability differs from transformers' by this share of it. Both read the same logits."""
SLACK = 1e-5
"""Rounding may move the bounds of top-p and min-p by less than this share of them."""
MOST_PATHS = 4
"""Of a branching draft, as many paths are looked at in each step of a request."""
_FLOOR = 1e-20


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What was compared, and the largest differences.

    Attributes:
        num_nodes: Nodes of drafts, roots included.
        num_drafted: How many of them are draft tokens.
        logits: Largest difference of a logit, as a share of its row's range.
        probabilities: Largest difference of a probability, as a share of it.
        bound: For the logits.
    """

    num_nodes: int
    num_drafted: int
    logits: float
    probabilities: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether all differences are roundings."""
        return self.logits <= self.bound and self.probabilities <= PROBABILITIES


def compare_nodes(engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> Nodes:
    """Run one request for each of `MIXED` at once, and compare the target's rows at every node of every draft.

    Logits are compared with those of a forward of transformers over the node's whole text, alone. Rows are compared
    with what transformers' processors make of the same logits under the settings that were asked for.
    """
    asked = [
        Request(
            id=f"nodes {i}",
            prompt=tuple(prompts[i % len(prompts)]),
            max_new_tokens=max_new_tokens,
            sampling=replace(sampling, seed=i),
        )
        for i, sampling in enumerate(MIXED)
    ]
    watcher = _Watcher(engine, {request.id: request for request in asked})
    run_watched(engine, asked, watcher.look)
    return Nodes(
        num_nodes=watcher.num_nodes,
        num_drafted=watcher.num_drafted,
        logits=watcher.logits,
        probabilities=watcher.probabilities,
        bound=LOGITS if is_exact(engine.parts.target) else COARSE,
    )


class _Watcher:
    """Compares the nodes of each step as it comes; changes in place."""

    def __init__(self, engine: Engine, asked: dict[str, Request]) -> None:
        self._target, self._asked = engine.parts.target, asked
        # Decoding that drafts ahead has no logits of leaves yet.
        self._leaves = not engine.parts.decoding.drafts_ahead
        self.num_nodes, self.num_drafted = 0, 0
        self.logits, self.probabilities = 0.0, 0.0

    def look(self, cycle: Cycle) -> None:
        draft = cycle.draft
        for i, state in enumerate(cycle.states):
            request = self._asked[state.request.id]
            first, end = int(draft.offsets[i]), int(draft.offsets[i + 1])
            inner = {int(parent) for parent in draft.parents[first:end]}
            committed, looked = [*request.prompt, *state.output], set[int]()
            leaves = [node for node in range(first, end) if node not in inner]
            for leaf in leaves[:: -(-len(leaves) // MOST_PATHS)]:
                path = _path(draft.parents, leaf)
                text = [*committed, *draft.tokens[torch.tensor(path[1:], dtype=torch.long)].tolist()]
                theirs = plain_logits(self._target, [text], len(path))[0]
                for depth, node in enumerate(path):
                    if node not in looked and (node in inner or self._leaves):
                        looked.add(node)
                        self.num_drafted += depth > 0
                        own = text[: len(committed) + depth]
                        self._compare(request, own, cycle.logits[node], theirs[depth], cycle.rows[node])

    def _compare(
        self,
        request: Request,
        text: Sequence[int],
        ours: Float[Tensor, " vocab"],
        theirs: Float[Tensor, " vocab"],
        row: Float[Tensor, " vocab"],
    ) -> None:
        self.num_nodes += 1
        ours, theirs = ours.double(), theirs.double()
        finite = theirs[theirs.isfinite()]
        span = float(finite.max() - finite.min()) if len(finite) else 0.0
        # Infinite logits are equal or differ by infinity.
        apart = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(np.inf)
        self.logits = max(self.logits, float(apart.max()) / max(span, 1e-300))
        found = np.inf
        for slack in (0.0, SLACK, -SLACK):
            expected = transformers_rows(ours[None], [text], len(request.prompt), request.sampling, slack)[0]
            # Tiny probabilities are as good as none.
            found = min(found, float(((row - expected).abs() / expected.clamp_min(_FLOOR)).nan_to_num(np.inf).max()))
            if found <= PROBABILITIES:
                break
        self.probabilities = max(self.probabilities, found)


def _path(parents: np.ndarray, node: int) -> list[int]:
    """The nodes from the root down to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]
