"""Times steps of trees beside plain steps. What chains take does not tell it: a tree grows level by level."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from outrider import catalog
from outrider.decoding.protocol import Parts
from outrider.plan.probe import CONTEXT, DraftWay, StepProbe, StepShape, repeated
from outrider.plan.ways import DraftConfiguration

SECONDS, REPEATS = 15.0, 16
"""Seconds for all trees of a drafter, about, and the most repeats of each."""


@dataclass(frozen=True, kw_only=True)
class TreeTimes:
    """What steps of trees take.

    Attributes:
        over_plain: For each way and number of requests, a step over a plain step of as many requests.
        doubt: Relative standard error of these quotients.
    """

    over_plain: Mapping[DraftConfiguration, Mapping[int, float]] = field(default_factory=dict)
    doubt: float = 0.0

    def joined(self, other: "TreeTimes") -> "TreeTimes":
        """Both. The larger doubt is that of all."""
        return TreeTimes(over_plain={**self.over_plain, **other.over_plain}, doubt=max(self.doubt, other.doubt))


def time_trees(
    parts: Parts,
    ways: Sequence[DraftConfiguration],
    requests: Sequence[int],
    *,
    sampled: bool,
    seconds: float = SECONDS,
) -> TreeTimes:
    """Time those of the ways that are trees, in turns with plain steps. All slots of the target must be free.

    Args:
        parts: What makes the steps, with the drafter of these ways.
        ways: Ways of that drafter. Chains are left out.
        requests: Numbers of requests at once; those for which there are no slots are left out.
        sampled: Whether tokens are drawn.
        seconds: About how long it may take. Where that is short, the last ways have no times.
    """
    trees = [way for way in ways if way.tree != "chain"]
    batches = [b for b in requests if b <= parts.target.max_slots]
    context = min(CONTEXT, parts.target.max_context // 4)
    if not trees or not batches or context < 1:
        return TreeTimes()
    plain = [StepShape(requests=b, length=0, sampled=sampled) for b in batches]
    kinds = {
        StepShape(requests=b, length=way.length, sampled=sampled, way=_draft_way(way)): (way, b)
        for way in trees
        for b in batches
    }
    bench = StepProbe(parts, context)
    try:
        rounds = repeated(bench, [*plain, *kinds], seconds, REPEATS)
    finally:
        bench.close()
    costs = rounds.costs()
    over_plain: dict[DraftConfiguration, dict[int, float]] = {}
    for kind, (way, b) in kinds.items():
        beside = StepShape(requests=b, length=0, sampled=sampled)
        if kind in costs and beside in costs:
            over_plain.setdefault(way, {})[b] = costs[kind].seconds / costs[beside].seconds
    return TreeTimes(over_plain=over_plain, doubt=rounds.doubt())


def _draft_way(way: DraftConfiguration) -> DraftWay:
    tree, verifier = catalog.make("tree", way.tree), catalog.make("verifier", way.verifier)
    return DraftWay(tree=cast(Any, tree), verifier=cast(Any, verifier))
