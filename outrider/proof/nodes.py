"""The target's rows at the nodes of drafts in a sampled batch of mixed settings, against those of transformers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.progress import ProgressTask, task
from outrider.core.sampling import rows_at_once, to_rows
from outrider.core.texts import Before
from outrider.core.types import Request
from outrider.decoding.protocol import Cycle
from outrider.engine.admission import LEAST_COPY
from outrider.engine.engine import Engine
from outrider.proof.plain import MIXED, SLACK, is_exact, plain_logits, transformers_rows
from outrider.proof.watched import run_watched

LOGITS = 1e-4
"""In float32 a target's logits are wrong if they differ from a plain forward by this share of their row's range."""
COARSE = 0.1
"""The same in coarser types, and in quantised models, which may round a block otherwise than a text."""
PROBABILITIES = 1e-3
"""Rows are wrong if a probability differs from transformers' by this share of it. Both read the same logits."""
MOST_PATHS = 4
"""Of a branching draft, as many paths are looked at in each step of a request."""
EARLIER = 3 * LEAST_COPY
"""Tokens of a prompt that later prompts begin like."""
SHARED = (LEAST_COPY, LEAST_COPY + 3, 2 * LEAST_COPY)
"""How many tokens they share with it: less than half of it, which is copied, and more, whose slot is taken over."""
_FLOOR = 1e-20


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """What was compared, and the largest differences.

    Attributes:
        num_nodes: Nodes of drafts, roots included.
        num_drafted: How many of them are draft tokens.
        num_reused: Prompt tokens whose keys and values were those of an earlier text.
        logits: Largest difference of a logit, as a share of its row's range.
        probabilities: Largest difference of a probability, as a share of it.
        bound: For the logits.
    """

    num_nodes: int
    num_drafted: int
    num_reused: int
    logits: float
    probabilities: float
    bound: float

    @property
    def holds(self) -> bool:
        """Whether all differences are roundings."""
        return self.logits <= self.bound and self.probabilities <= PROBABILITIES


def compare_nodes(
    engine: Engine, prompts: Sequence[Sequence[int]], max_new_tokens: int, until: Deadline = ENDLESS
) -> Nodes:
    """Run one request for each of `MIXED` at once, and compare the target's rows at every node of every draft.

    Then run requests whose prompts share a beginning with an earlier text and go on otherwise, in its slot and in
    copies of it. Settings are also compared where rows are so many that they are worked on in groups.

    Logits are compared with those of a forward of transformers over the node's whole text, alone. Rows are compared
    with what transformers' processors make of the same logits under the settings that were asked for.

    Args:
        until: Steps that are not made then are left out; a few are made at least.
    """
    requests = [
        Request(
            id=f"nodes {i}",
            prompt=tuple(prompts[i % len(prompts)]),
            max_new_tokens=max_new_tokens,
            sampling=replace(sampling, seed=i),
        )
        for i, sampling in enumerate(MIXED)
    ]
    earlier, later = _sharing(engine, prompts)
    watcher = _Watcher(engine, {request.id: request for request in (*requests, *earlier, *later)})
    with task("rows of the target at drafts", unit="nodes") as progress:
        watcher.progress = progress
        run_watched(engine, requests, watcher.look, until=until.part(0.7))
        before = engine.num_reused_tokens
        run_watched(engine, later, watcher.look, first=earlier, until=until)
    return Nodes(
        num_nodes=watcher.num_nodes,
        num_drafted=watcher.num_drafted,
        num_reused=engine.num_reused_tokens - before,
        logits=watcher.logits,
        probabilities=watcher.probabilities,
        bound=LOGITS if is_exact(engine.parts.target) else COARSE,
    )


def _sharing(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[list[Request], list[Request]]:
    """A request, and others whose prompts share beginnings with its prompt; none if the context is too short."""
    tokens = [token for prompt in prompts for token in prompt]
    whole = (tokens * EARLIER)[:EARLIER]
    if len(set(tokens)) < 2 or engine.parts.target.max_context < len(whole) + len(tokens) + 2:
        return [], []
    others = [[*whole[:n], next(t for t in tokens if t != whole[n]), *tokens] for n in SHARED]
    texts = [whole, *others]
    requests = [
        Request(id=f"nodes shared {i}", prompt=tuple(text), max_new_tokens=1 if i == 0 else 2, sampling=MIXED[i])
        for i, text in enumerate(texts)
    ]
    return requests[:1], requests[1:]


class _Watcher:
    """Compares the nodes of each step as it comes; changes in place."""

    def __init__(self, engine: Engine, requests: dict[str, Request]) -> None:
        self._target, self._requests = engine.parts.target, requests
        # Decoding that drafts ahead has no logits of leaves yet.
        self._leaves = not engine.parts.decoding.drafts_ahead
        self.num_nodes, self.num_drafted = 0, 0
        self.logits, self.probabilities = 0.0, 0.0
        self._grouped = False
        self.progress: ProgressTask | None = None

    def look(self, cycle: Cycle) -> None:
        draft = cycle.draft
        if not self._grouped:
            self._grouped = True
            self._compare_groups(cycle)
        for i, state in enumerate(cycle.states):
            request = self._requests[state.request.id]
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
                        node_text = text[: len(committed) + depth]
                        self._compare(request, node_text, cycle.logits[node], theirs[depth], cycle.rows[node])

    def _compare(
        self,
        request: Request,
        text: Sequence[int],
        ours: Float[Tensor, " vocab"],
        theirs: Float[Tensor, " vocab"],
        row: Float[Tensor, " vocab"],
    ) -> None:
        self.num_nodes += 1
        if self.progress is not None:
            self.progress.advance()
        ours, theirs = ours.double(), theirs.double()
        finite = theirs[theirs.isfinite()]
        span = float(finite.max() - finite.min()) if len(finite) else 0.0
        # Infinite logits are equal or differ by infinity.
        difference = torch.where(ours == theirs, 0.0, (ours - theirs).abs()).nan_to_num(np.inf)
        self.logits = max(self.logits, float(difference.max()) / max(span, 1e-300))
        self._compare_rows(request, text, ours, row)

    def _compare_rows(
        self, request: Request, text: Sequence[int], logits: Float[Tensor, " vocab"], row: Float[Tensor, " vocab"]
    ) -> None:
        narrow, wide = (
            transformers_rows(logits[None], [text], len(request.prompt), request.sampling, slack)[0]
            for slack in (-SLACK, SLACK)
        )
        self.probabilities = max(self.probabilities, row_difference(row, narrow, wide))

    def _compare_groups(self, cycle: Cycle) -> None:
        """Compare the rows of a second group, whose settings are others than those at the same places of the first."""
        requests = [self._requests[state.request.id] for state in cycle.states]
        outputs = [state.output for state in cycle.states]
        logits = cycle.logits[torch.from_numpy(cycle.draft.offsets[:-1]).to(cycle.logits.device)]
        size, count = rows_at_once(logits), len(requests)
        places = np.arange(size + count)
        owners = (places + places // size) % count
        before = replace(
            Before.of([request.prompt for request in requests], outputs),
            owners=owners,
            paths=np.zeros((len(owners), 0), dtype=np.int64),
            lengths=np.zeros_like(owners),
        )
        samplings = [request.sampling for request in requests]
        wide = logits[torch.from_numpy(owners).to(logits.device)]
        rows = to_rows(wide, owners, samplings, lambda: before)[size:]
        for owner, row in zip(owners[size:].tolist(), rows, strict=True):
            request = requests[owner]
            self._compare_rows(request, [*request.prompt, *outputs[owner]], logits[owner].double(), row)


def row_difference(
    row: Float[Tensor, " vocab"], narrow: Float[Tensor, " vocab"], wide: Float[Tensor, " vocab"]
) -> float:
    """The largest difference of a probability, as a share of it.

    Between the two bounds lie tokens of which rounding decides whether they are kept; in a flat row of a large
    vocabulary there are thousands. The likeliest of them are kept, with the probabilities of `wide`, normalised.

    Args:
        row: The row in question.
        narrow: The row by bounds that rounding has moved inwards.
        wide: The row by bounds that rounding has moved outwards.

    Example:
        >>> wide, narrow = torch.tensor([0.5, 0.25, 0.25, 0.0]), torch.tensor([1.0, 0.0, 0.0, 0.0])
        >>> row_difference(torch.tensor([2 / 3, 1 / 3, 0.0, 0.0]), narrow, wide) < 1e-6
        True
        >>> round(row_difference(torch.tensor([0.6, 0.4, 0.0, 0.0]), narrow, wide), 3)
        0.2
    """
    row, kept = row.to(wide.dtype), (narrow > 0) | (row > 0)
    between = (wide > 0) & (narrow == 0)
    some, others = wide[between & kept], wide[between & ~kept]
    if len(some) and len(others) and float(some.min()) < float(others.max()) * (1 - PROBABILITIES):
        return float("inf")
    theirs = torch.where(kept, wide, 0.0)
    theirs = theirs / theirs.sum()
    # Tiny probabilities are as good as none.
    return float(((row - theirs).abs() / theirs.clamp_min(_FLOOR)).nan_to_num(np.inf).max())


def _path(parents: np.ndarray, node: int) -> list[int]:
    """The nodes from the root down to a node."""
    path = [node]
    while parents[path[-1]] >= 0:
        path.append(int(parents[path[-1]]))
    return path[::-1]
