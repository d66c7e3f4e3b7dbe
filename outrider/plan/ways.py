"""The ways of decoding that a plan compares, and how long the steps of each survive on a recorded text."""

import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from jaxtyping import Float, Int

from outrider import catalog
from outrider.core.inputs import InputError
from outrider.drafters.protocol import Drafter
from outrider.lengths.costs import CostTable
from outrider.plan.record import DraftRows, TargetText
from outrider.plan.tree_coverage import Branches, DraftedTree, Ranked, SharedPaths, TopPlusOne
from outrider.refusals import Cell, refusal
from outrider.theory.coverage import survival
from outrider.trees.fixed import best_topology

Certainty = Literal["exact", "at least"]
"""Whether a prediction of tokens per step is that of the way itself, or of a rule that accepts no more."""
CHAIN_RULES = ("token", "block", "match", "coupled")
RULES: tuple[Literal["recursive", "kseq"], ...] = ("recursive", "kseq")
"""Rules of independent paths."""
TREES = ("gumbel:2x1", "gumbel:2x1x1", "gumbel:2x2", "gumbel:2x2x1", "iid:2", "top_plus_one:2")
"""Small trees whose acceptance the record tells. The last two are grown to depths 2 and 3."""


@dataclass(frozen=True, kw_only=True)
class DraftConfiguration:
    """A way of decoding.

    Attributes:
        drafter: The drafter as it was written; `none` is plain decoding.
        tree: The tree as it is written on a command line.
        verifier: The verifier.
        length: Draft tokens on a path; 0 is plain decoding.
        widths: Nodes of a draft at depth 1, 2, ...
        certainty: What a prediction of its tokens per step is.
        kind: For trees, which of the record's chances tell about it, and the tree as the mathematics sees it.
    """

    drafter: str = "none"
    tree: str = "chain"
    verifier: str = "match"
    length: int = 0
    widths: tuple[int, ...] = ()
    certainty: Certainty = "exact"
    kind: tuple[str, DraftedTree] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.length == 0

    @property
    def name(self) -> str:
        """The way in a few words.

        Example:
            >>> chain = DraftConfiguration(drafter="suffix", verifier="block", length=4, widths=(1, 1, 1, 1))
            >>> DraftConfiguration().name, chain.name
            ('plain', 'suffix, chain of 4, block')
        """
        if self.is_plain:
            return "plain"
        grown = f"chain of {self.length}" if self.tree == "chain" else f"{self.tree}, {self.length} deep"
        return f"{self.drafter.partition(':')[0]}, {grown}, {self.verifier}"

    @property
    def effort(self) -> tuple[int, int, int]:
        """How complicated the way is. Of ways that seem equally fast, the least complicated one is taken."""
        model = not self.drafter.startswith(("none", "ngram", "suffix"))
        return (0 if self.is_plain else 1 + model + 2 * (self.tree != "chain"), sum(self.widths), self.length)

    def options(self) -> dict[str, Any]:
        """The options of a setup that decodes in this way."""
        if self.is_plain:
            return {"drafter": "none"}
        return {
            "drafter": self.drafter,
            "tree": self.tree,
            "verifier": self.verifier,
            "length": f"fixed:{self.length}",
        }

    def drafted(self, text: TargetText, rows: DraftRows) -> Int[np.ndarray, " places"]:
        """Depth of a draft that begins at each place of a text."""
        left = len(text.tokens) - np.arange(len(text.tokens)) - (0 if text.ended else 1)
        return np.minimum(np.minimum(rows.guesses, self.length), left)

    def survivals(self, text: TargetText, rows: DraftRows) -> list[Float[np.ndarray, " bounds"]]:
        """Probability that a step which begins at a place accepts at least 0, 1, ... tokens, given the text."""
        depths, survivals = self.drafted(text, rows), []
        for place, depth in enumerate(depths.tolist()):
            if depth == 0:
                survivals.append(np.ones(1))
                continue
            if self.kind is not None:
                name, tree = self.kind
                survivals.append(tree.survival(list(rows.ahead(rows.trees[name], place, depth))))
                continue
            log_q = rows.ahead(rows.log_probs, place, depth)
            match self.verifier:
                case "token" | "block":
                    ratios = text.log_probs[place : place + depth] - log_q
                    survivals.append(survival(ratios, self.verifier))
                case "match":
                    survivals.append(np.cumprod(np.append(1.0, np.exp(log_q))))
                case "coupled":
                    survivals.append(np.cumprod(np.append(1.0, rows.ahead(rows.coupled, place, depth))))
                case other:
                    raise InputError(f"a record does not tell what verifier {other!r} accepts")
        return survivals


MOST_NODES, MOST_CHILDREN, DEEPEST = 16, 4, 8
"""Bounds of the trees among which the best is sought."""


def ways_of(
    name: str, drafter: Drafter, *, lengths: Sequence[int], reproducible: bool = False
) -> Iterator[DraftConfiguration]:
    """The lossless ways in which a drafter can be used, as far as a record tells their acceptance.

    Args:
        name: The drafter as it was written.
        lengths: Lengths of chains.
        reproducible: Whether outputs must depend on their seeds and the target alone.

    Raises:
        InputError: A record does not tell what copies beside the drafter's own tokens are worth.
    """
    if drafter.unites:
        raise InputError("a plan does not know what copies beside drafts are worth; name the drafters of union apart")
    deepest = drafter.max_depth
    for rule in ("coupled",) if reproducible else CHAIN_RULES[:3]:
        verifier = catalog.make("verifier", rule)
        if refusal(_cell(drafter, "chain", verifier)) is None:
            for length in lengths:
                if length >= 1 and (deepest is None or length <= deepest):
                    yield DraftConfiguration(drafter=name, verifier=rule, length=length, widths=(1,) * length)
        if drafter.rows == "point":
            # All verifiers judge a given token alike.
            break
    if reproducible or drafter.rows == "point" or drafter.chains_only is not None:
        return
    for written in TREES:
        for way in _tree_ways(name, written):
            verifier = catalog.make("verifier", way.verifier)
            tree = cast(Any, catalog.make("tree", written))
            if (deepest is None or way.length <= deepest) and refusal(_cell(drafter, tree.structure, verifier)) is None:
                yield way


def best_tree(
    name: str,
    drafter: Drafter,
    rows: Sequence[DraftRows],
    costs: CostTable,
    *,
    requests: int,
    sampled: bool,
    context: int,
    dearer: float = 1.0,
) -> DraftConfiguration | None:
    """The tree of the drafter's likeliest tokens that brings most by Sequoia's programme; None if it cannot be used.

    The programme gets how often each rank is the text's token, and what steps of this table cost by their nodes.

    Args:
        name: The drafter as it was written.
        rows: Its rows along the texts.
        costs: The costs of steps with it.
        requests: Requests at once.
        sampled: Whether tokens are drawn.
        context: Tokens of a request.
        dearer: How many times as long steps of trees take as chains tell.
    """
    verifier = catalog.make("verifier", "match")
    if drafter.rows == "point" or drafter.chains_only or refusal(_cell(drafter, "deterministic", verifier)):
        return None
    ranks = np.concatenate([each.trees["ranks"][:, 0, 0] for each in rows])
    accepted = [float((ranks == rank).mean()) for rank in range(MOST_CHILDREN)]

    def seconds(*widths: int) -> float:
        return dearer * costs.tree(requests, widths, sampled=sampled, context=context)

    level = max(0.0, seconds(1, 1) - seconds(2))
    plain = costs.steps(requests, sampled=sampled, context=context, longest=1)[0][0]
    forwards = [plain, *(max(plain, seconds(nodes) - level) for nodes in range(1, MOST_NODES + 1))]
    depth = min(DEEPEST, drafter.max_depth or DEEPEST)
    children = best_topology(accepted, MOST_NODES, depth, level, forwards)
    tree = Ranked(children=children)
    if max(tree.widths) == 1:
        # A chain of the likeliest tokens accepts no more than a drawn one.
        return None
    written = f"fixed:{'x'.join(map(str, children))},chosen=true"
    return DraftConfiguration(
        drafter=name, tree=written, verifier="match", length=tree.depth, widths=tree.widths, kind=("ranks", tree)
    )


def _tree_ways(name: str, written: str) -> Iterator[DraftConfiguration]:
    family, _, shape = written.partition(":")
    if family == "gumbel":
        counts = tuple(int(count) for count in shape.split("x"))
        widths = tuple(itertools.accumulate(counts, operator.mul))
        kind: tuple[str, DraftedTree] = ("branches", Branches(counts=counts))
        yield DraftConfiguration(
            drafter=name, tree=written, verifier="recursive", length=len(counts), widths=widths, kind=kind
        )
        yield DraftConfiguration(
            drafter=name,
            tree=written,
            verifier="traversal",
            length=len(counts),
            widths=widths,
            kind=kind,
            certainty="at least",
        )
        return
    count = int(shape)
    for depth in (2, 3):
        if family == "iid":
            for rule in RULES:
                paths = SharedPaths(count=count, depth=depth, rule=rule)
                widths = (count,) * depth
                yield DraftConfiguration(
                    drafter=name, tree=written, verifier=rule, length=depth, widths=widths, kind=(rule, paths)
                )
        else:
            top = TopPlusOne(width=count, depth=depth)
            widths = tuple(count ** (d + 1) for d in range(depth))
            yield DraftConfiguration(
                drafter=name, tree=written, verifier=family, length=depth, widths=widths, kind=(family, top)
            )


def _cell(drafter: Drafter, structure: Any, verifier: Any) -> Cell:
    return Cell(
        rows=drafter.rows,
        context_pure=drafter.context_pure,
        taps=bool(drafter.taps),
        estimates=drafter.estimates,
        structure=structure,
        verifier=verifier,
    )
