"""How likely a rule accepts each node of a draft: its chances are noted where production throws coins."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Draws, Pick
from outrider.core.types import Draft
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.kseq import KseqVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import Verifier, chains, upload
from outrider.verifiers.recursive import RecursiveVerifier
from outrider.verifiers.token import TokenVerifier
from outrider.verifiers.traversal import TraversalVerifier

Rows = Float[Tensor, "nodes vocab"]
Chances = Float[np.ndarray, " nodes"]


def acceptance(verifier: Verifier, draft: Draft, target_rows: Rows) -> Chances | None:
    """Probability that each node is on the accepted path, given the draft; 1 of roots. None for rules not known here.

    Of block verification it is the probability given the tokens down to the node, whatever was drafted behind it. The
    mean over drafts is that of what the rule accepts, and no coin adds noise to it (Rao-Blackwell).

    References:
        Blackwell 1947, conditional expectation and unbiased sequential estimation.
        https://doi.org/10.1214/aoms/1177730497
    """
    known = _KNOWN.get(type(verifier))
    return None if known is None else known(verifier, draft, target_rows)


def expected_tokens(draft: Draft, chances: Chances, eos_ids: frozenset[int]) -> Float[np.ndarray, " requests"]:
    """Tokens that a step is expected to emit, per request: one, and each node's chance; none behind an ending token."""
    ends = np.isin(draft.tokens.cpu().numpy(), sorted(eos_ids))
    ends[draft.offsets[:-1]] = False
    for node in np.flatnonzero(draft.parents >= 0).tolist():
        ends[node] |= ends[draft.parents[node]]
    counted = np.where(ends, 0.0, chances)
    return np.add.reduceat(counted, draft.offsets[:-1])


def expected_accepted(draft: Draft, chances: Chances) -> Float[np.ndarray, " requests"]:
    """Draft tokens that are expected to be accepted, per request."""
    return np.add.reduceat(chances, draft.offsets[:-1]) - 1


class NotingDice:
    """Dice whose coins do not land unless they must; notes every chance, in order."""

    def __init__(self) -> None:
        self.requests: list[Int[np.ndarray, " n"]] = []
        self.slots: list[Int[np.ndarray, " n"]] = []
        self.chances: list[Float[np.ndarray, " n"]] = []

    def accept(self, probability: Float[np.ndarray, " n"], draws: Draws) -> Bool[np.ndarray, " n"]:
        """Note the chances."""
        self.requests.append(draws.requests)
        self.slots.append(draws.slots)
        self.chances.append(probability)
        landed: Bool[np.ndarray, " n"] = probability >= 1
        return landed

    def toss(self, probability: Float[Tensor, "..."], draws: Draws) -> Bool[Tensor, "..."]:
        """Rules that toss have thrown coins that do not matter, so their chances say nothing."""
        raise NotImplementedError("chances are read from rules that throw their coins in turn, on a CPU")

    def pick(self, weights: Float[Tensor, "n vocab"], draws: Draws) -> Int[Tensor, " n"]:
        """The token that follows does not matter here."""
        return torch.zeros(len(weights), dtype=torch.long, device=weights.device)

    def picks(self, draws: Draws, counts: Sequence[int], device: torch.device) -> list[Pick]:
        """No rule draws before it has weights."""
        raise NotImplementedError("a rule draws from weights that it has")

    def pick_many(
        self, weights: Float[Tensor, "n vocab"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        """No rule draws several tokens."""
        raise NotImplementedError("a rule draws one token at a time")

    def gumbel(self, size: int, draws: Draws) -> Float[Tensor, "n size"]:
        """No rule draws noise."""
        raise NotImplementedError("a rule draws no noise")


def _noted(verifier: Verifier, draft: Draft, target_rows: Rows) -> Chances:
    """Chance of each node that the first coin to land is one of its own. A coin's slot is the place of its link."""
    dice = NotingDice()
    verifier.verify(draft, target_rows, dice)
    found = np.zeros(len(draft.parents))
    missed = np.ones(draft.num_requests)
    for requests, slots, chances in zip(dice.requests, dice.slots, dice.chances, strict=True):
        links = draft.first_child[draft.offsets[requests]] + slots
        np.add.at(found, draft.links[links], missed[requests] * chances)
        missed[requests] *= 1 - chances
    return found


def _by_parent(draft: Draft, chances: Chances) -> Chances:
    """Chances of nodes, from those given that their parent is accepted."""
    found = chances.copy()
    found[draft.offsets[:-1]] = 1.0
    for node in np.flatnonzero(draft.parents >= 0).tolist():
        found[node] *= found[draft.parents[node]]
    return found


def _on_chains(verifier: Verifier, draft: Draft, target_rows: Rows) -> Chances:
    r"""Token verification: $\prod \min(1, p/q)$; block verification: $w_i = \min(1, w_{i-1} p/q)$."""
    ratios = chains(draft, target_rows).ratios
    steps = np.minimum(ratios, 1) if isinstance(verifier, TokenVerifier) else ratios
    reached = np.ones((len(ratios), ratios.shape[1] + 1))
    for i in range(ratios.shape[1]):
        reached[:, i + 1] = np.minimum(1, reached[:, i] * steps[:, i])
    owners = np.repeat(np.arange(draft.num_requests), np.diff(draft.offsets))
    return reached[owners, draft.depths]


def _drawn_by_target(verifier: Verifier, draft: Draft, target_rows: Rows) -> Chances:
    """Match goes to a child where the target draws it."""
    inner = np.flatnonzero(draft.parents >= 0)
    at = upload(inner, target_rows.device)
    found = np.ones(len(draft.parents))
    found[inner] = target_rows[upload(draft.parents[inner], at.device), draft.tokens[at]].double().cpu().numpy()
    return _by_parent(draft, found)


def _downwards(verifier: Verifier, draft: Draft, target_rows: Rows) -> Chances:
    """Rules that judge a node's children by that node alone: every node with its children is a tree of its own."""
    inner = np.flatnonzero(np.diff(draft.first_child))
    if not len(inner):
        return _by_parent(draft, np.ones(len(draft.parents)))
    stars, nodes = _stars(draft, inner)
    noted = _noted(verifier, stars, target_rows.index_select(0, upload(nodes, target_rows.device)))
    found = np.zeros(len(draft.parents))
    below = stars.parents >= 0
    found[nodes[below]] = noted[below]
    return _by_parent(draft, found)


def _stars(draft: Draft, inner: Int[np.ndarray, " stars"]) -> tuple[Draft, Int[np.ndarray, " nodes"]]:
    """Each of some nodes with its children, as a request; and the node of the draft that each node stands for."""
    firsts, ends = draft.first_child[inner], draft.first_child[inner + 1]
    nodes, parents, links, counts = list[int](), list[int](), list[int](), list[int]()
    for node, first, end in zip(inner.tolist(), firsts.tolist(), ends.tolist(), strict=True):
        root, drawn = len(nodes), draft.links[first:end]
        children = np.unique(drawn)
        nodes += [node, *children.tolist()]
        parents += [-1, *[root] * len(children)]
        links += (root + 1 + np.searchsorted(children, drawn)).tolist()
        counts += [end - first, *[0] * len(children)]
    packed, above = np.array(nodes), np.array(parents)
    roots = np.flatnonzero(above < 0)
    stars = Draft(
        tokens=draft.tokens[upload(packed, draft.tokens.device)],
        parents=above,
        depths=(above >= 0).astype(np.int64),
        numbers=np.arange(len(packed)) - np.repeat(roots, np.diff(np.append(roots, len(packed)))),
        offsets=np.append(roots, len(packed)),
        first_child=np.concatenate([[0], np.cumsum(counts)]),
        links=np.array(links),
        rows=draft.rows,
        row_of=np.where(above < 0, draft.row_of[packed], -1),
        structure=draft.structure,
    )
    return stars, packed


def _upwards(verifier: Verifier, draft: Draft, target_rows: Rows) -> Chances:
    """Rules that visit nodes until a coin lands, and accept that node with the path above it."""
    found = _noted(verifier, draft, target_rows)
    for node in np.flatnonzero(draft.parents >= 0)[::-1].tolist():
        found[draft.parents[node]] += found[node]
    found[draft.offsets[:-1]] = 1.0
    return found


_KNOWN: dict[type, Callable[[Verifier, Draft, Rows], Chances]] = {
    TokenVerifier: _on_chains,
    BlockVerifier: _on_chains,
    MatchVerifier: _drawn_by_target,
    RecursiveVerifier: _downwards,
    KseqVerifier: _downwards,
    TraversalVerifier: _upwards,
}
