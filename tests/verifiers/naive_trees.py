"""Naive single-sequence twins of the verification rules on trees, written straight from the papers with plain loops.

Each rule takes a tree and a source of choices and returns the accepted tokens followed by the next one. The coin of a
link (a parent and its k-th child) has as slot the number of links before it, parents in packed order; in `multipath`
it is the position along the path, from 0. The last token is picked with slot 0, except in rules that may pick once a
level (`match`, `top_plus_one`), where the slot is the depth.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from tests.verifiers.choices import Choices


@dataclass(frozen=True, kw_only=True)
class Tree:
    """One drafted tree.

    Attributes:
        tokens: Token of each node; node 0 is the root and holds the anchor. Parents stand before children.
        parents: Parent of each node, -1 for the root.
        children: Per node its children in drawing order; iid draws of one token repeat its node.
        p: The target's distribution after each node.
        q: The distribution that the children of each node were drawn from; NaN where they were chosen.
        one_drawn: Whether only the first child of a node was drawn, and all others are copies.
    """

    tokens: list[int]
    parents: list[int]
    children: list[list[int]]
    p: np.ndarray
    q: np.ndarray
    one_drawn: bool = False

    def slot(self, node: int, k: int) -> int:
        """Number of links before the k-th link of a node."""
        return sum(len(links) for links in self.children[:node]) + k

    def drawn_from(self, node: int, child: int) -> np.ndarray:
        """The law of one child of a node: the stored row, or all mass on its token where it was chosen."""
        copied = self.one_drawn and child != self.children[node][0]
        if not copied and not np.isnan(self.q[node]).any():
            return self.q[node]
        return np.eye(self.q.shape[1])[self.tokens[child]]

    def law_of(self, node: int, child: int, left: np.ndarray) -> np.ndarray:
        """The law of the next child of a node, of whose row draws without replacement have left this."""
        return self.drawn_from(node, child) if self.one_drawn or np.isnan(left).any() else left


def ratio(p: float, q: float) -> float:
    """min(1, p / q); 0 where the token cannot have been drawn."""
    return min(1.0, float(p) / float(q)) if q > 0 else 0.0


def leftover(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """(p - q)_+ normalised; p where nothing is left, which happens by rounding alone."""
    left = np.maximum(p - q, 0)
    return left / left.sum() if left.sum() > 0 else p


def without(q: np.ndarray, token: int) -> np.ndarray:
    """The law of the next draw without replacement; all zero once everything was drawn, and NaN stays NaN."""
    rest = np.where(np.arange(len(q)) == token, 0.0, q)
    return rest if rest.sum() == 0 else rest / rest.sum()


def token(tree: Tree, dice: Choices) -> list[int]:
    """Leviathan et al. 2023, algorithm 1, along the first children."""
    node, emitted = 0, list[int]()
    while tree.children[node]:
        child = tree.children[node][0]
        x, p, q = tree.tokens[child], tree.p[node], tree.drawn_from(node, child)
        if not dice.coin(ratio(p[x], q[x]), tree.slot(node, 0)):
            return [*emitted, dice.pick(leftover(p, q), 0)]
        node, emitted = child, [*emitted, x]
    return [*emitted, dice.pick(tree.p[node], 0)]


def path_to(tree: Tree, node: int) -> list[int]:
    """Tokens from below the root down to a node."""
    return [*path_to(tree, tree.parents[node]), tree.tokens[node]] if node else []


def match(tree: Tree, dice: Choices) -> list[int]:
    """Naive sampling: draw from the target, go on while the draw is a child (EAGLE; MCSD's naive mode)."""
    node, emitted = 0, list[int]()
    while True:
        y = dice.pick(tree.p[node], len(emitted))
        emitted.append(y)
        hits = [child for child in tree.children[node] if tree.tokens[child] == y]
        if not hits:
            return emitted
        node = hits[0]


def recursive_with_replacement(tree: Tree, dice: Choices) -> list[int]:
    """Recursive rejection over iid draws, repeats kept (Yang et al. 2024, MCSD, with replacement)."""
    node, emitted = 0, list[int]()
    while True:
        P = tree.p[node]
        for k, child in enumerate(tree.children[node]):
            x, Q = tree.tokens[child], tree.drawn_from(node, child)
            if dice.coin(ratio(P[x], Q[x]), tree.slot(node, k)):
                node, emitted = child, [*emitted, x]
                break
            P = leftover(P, Q)
        else:
            return [*emitted, dice.pick(P, 0)]


def recursive_without_replacement(tree: Tree, dice: Choices) -> list[int]:
    """Recursive rejection over distinct siblings in drawing order (MCSD; Jeon et al. 2024, RSD, algorithm 2)."""
    node, emitted = 0, list[int]()
    while True:
        P, Q = tree.p[node], tree.q[node]
        for k, child in enumerate(tree.children[node]):
            x = tree.tokens[child]
            row = tree.law_of(node, child, Q)
            if dice.coin(ratio(P[x], row[x]), tree.slot(node, k)):
                node, emitted = child, [*emitted, x]
                break
            P, Q = leftover(P, row), without(Q, x)
        else:
            return [*emitted, dice.pick(P, 0)]


def acceptance_of_k(p: np.ndarray, q: np.ndarray, k: int, rho: float) -> tuple[float, float]:
    """beta(rho) = sum_x min(p / rho, q), and 1 - (1 - beta)^k."""
    beta = float(np.minimum(p / rho, q).sum())
    return beta, 1 - (1 - beta) ** k


def solve_rho(p: np.ndarray, q: np.ndarray, k: int) -> float:
    """The rho in [1, k] where 1 - (1 - beta)^k = rho beta: bisection, its upper end."""
    return _bisected(tuple(p.tolist()), tuple(q.tolist()), k)


@cache
def _bisected(p: tuple[float, ...], q: tuple[float, ...], k: int) -> float:
    low, high = 1.0, float(k)
    for _ in range(100):
        middle = (low + high) / 2
        beta, accepted = acceptance_of_k(np.array(p), np.array(q), k, middle)
        if accepted > middle * beta:
            low = middle
        else:
            high = middle
    return high


def kseq(tree: Tree, dice: Choices) -> list[int]:
    """Sun et al. 2023, SpecTr, algorithm 3: k iid drafts, each judged with the same scaled ratio."""
    node, emitted = 0, list[int]()
    while tree.children[node]:
        p, links = tree.p[node], tree.children[node]
        q, k = tree.drawn_from(node, links[0]), len(tree.children[node])
        rho = solve_rho(p, q, k)
        for j, child in enumerate(links):
            x = tree.tokens[child]
            if dice.coin(ratio(p[x], rho * q[x]), tree.slot(node, j)):
                node, emitted = child, [*emitted, x]
                break
        else:
            beta, accepted = acceptance_of_k(p, q, k, rho)
            taken = np.minimum(p / rho, q) * (accepted / beta) if beta > 0 else np.zeros_like(p)
            return [*emitted, dice.pick(leftover(p, taken), 0)]
    return [*emitted, dice.pick(tree.p[node], 0)]


def top_plus_one(tree: Tree, dice: Choices) -> list[int]:
    """Hu et al. 2025, greedy multi-draft scheme: the last child was drawn outside the chosen ones before it.

    Judge the drawn child alone; a recovered token that is one of the children is accepted as well. Where the chosen
    ones leave nothing to draw from, the last child was chosen too, and the law is that of `match`.
    """
    node, emitted = 0, list[int]()
    while tree.children[node]:
        p, (*chosen, drawn) = tree.p[node], tree.children[node]
        x, outside = tree.tokens[drawn], tree.drawn_from(node, drawn)
        for child in chosen:
            outside = without(outside, tree.tokens[child])
        if dice.coin(ratio(p[x], outside[x]), tree.slot(node, len(chosen))):
            node, emitted = drawn, [*emitted, x]
            continue
        z = dice.pick(leftover(p, outside), len(emitted))
        emitted.append(z)
        hits = [child for child in tree.children[node] if tree.tokens[child] == z]
        if not hits:
            return emitted
        node = hits[0]
    return [*emitted, dice.pick(tree.p[node], len(emitted))]


def traversal(tree: Tree, dice: Choices) -> list[int]:
    """Weng et al. 2025, traversal verification: leaves first, depth first, children in drawing order."""
    left = [list(links) for links in tree.children]
    P, Q = list(tree.p), list(tree.q)
    w = [1.0] * len(tree.tokens)

    def weigh(node: int) -> None:
        """The weights of all that is below a node."""
        for child in left[node]:
            x = tree.tokens[child]
            row = tree.law_of(node, child, Q[node])
            w[child] = min(1.0, w[node] * float(P[node][x] / row[x])) if row[x] > 0 else 0.0
            weigh(child)

    weigh(0)
    while True:
        leaf = 0
        while left[leaf]:
            leaf = left[leaf][0]
        v = tree.parents[leaf]
        if leaf == 0 or dice.coin(w[leaf], tree.slot(v, tree.children[v].index(leaf))):
            return [*path_to(tree, leaf), dice.pick(P[leaf], 0)]
        row = tree.law_of(v, leaf, Q[v])
        R = np.maximum(w[v] * P[v] - row, 0)
        S = float(R.sum())
        if S > 0:
            P[v] = R / S
        if v != 0:
            w[v] = S / (S + (1 - w[v])) if S > 0 else 0.0
        Q[v] = without(Q[v], tree.tokens[leaf])
        left[v].remove(leaf)
        weigh(v)


def block(tree: Tree, dice: Choices) -> list[int]:
    """Sun et al. 2024, algorithm 2, along the first children."""
    path = [0]
    while tree.children[path[-1]]:
        path.append(tree.children[path[-1]][0])
    rows = [tree.drawn_from(node, child) for node, child in pairwise(path)]
    return block_along(tree, path, rows, dice, [tree.slot(node, 0) for node in path])


def block_along(tree: Tree, path: list[int], q: list[np.ndarray], dice: Choices, slots: list[int]) -> list[int]:
    """Block verification of one path, root included, whose i-th token was drawn from q[i].

    The coins are independent and the last that lands decides, so they are thrown from the last down.
    """
    gamma, tokens = len(path) - 1, [tree.tokens[node] for node in path[1:]]
    w = [1.0]
    for i in range(gamma):
        step = tree.p[path[i], tokens[i]] / q[i][tokens[i]] if q[i][tokens[i]] > 0 else 0.0
        w.append(min(1.0, w[i] * float(step)))
    for i in range(gamma, -1, -1):
        p = tree.p[path[i]]
        if i == gamma:
            h, following = w[gamma], p
        else:
            left = np.maximum(w[i] * p - q[i], 0)
            mass = float(left.sum())
            h = mass / (mass + (1 - w[i])) if mass + (1 - w[i]) > 0 else 1.0
            following = left if mass > 0 else p
        if i == 0 or dice.coin(h, slots[i - 1]):
            return [*tokens[:i], dice.pick(following, 0)]
    raise AssertionError("position 0 always stands")


def rank_by_ratio(p: np.ndarray, q: np.ndarray) -> list[int]:
    """Tokens from the lowest p / q to the highest, equal ratios by token id: a strict order."""
    return sorted(range(len(p)), key=lambda x: (float(p[x] / q[x]) if q[x] > 0 else float("inf"), x))


def rank_by_bits(p: np.ndarray, q: np.ndarray) -> list[int]:
    """The same in steps of a sixteenth of an octave, from 2^-8 to 2^8."""
    ratios = np.divide(p, q, out=np.full(len(p), np.inf), where=q > 0).clip(2.0**-8, 2.0**8 * (1 - 2**-5))
    octave = np.floor(np.log2(ratios))
    steps = octave * 16 + np.floor((ratios / 2.0**octave - 1) * 16)
    return sorted(range(len(p)), key=lambda t: (steps[t], t))


def multipath(
    tree: Tree, dice: Choices, rank: Callable[[np.ndarray, np.ndarray], list[int]] = rank_by_ratio
) -> list[int]:
    """Greedy multi-path block verification (arXiv 2602.16961) over K iid paths of equal length.

    Follow the highest ranked child at every node; that path's law is known, and block verification judges it.
    """
    path = [0]
    while links := tree.children[path[-1]]:
        order = rank(tree.p[path[-1]], tree.q[path[-1]])
        path.append(max(links, key=lambda child: order.index(tree.tokens[child])))
    return block_along(tree, path, skewed(tree, path, rank), dice, list(range(len(path))))


def skewed(tree: Tree, path: list[int], rank: Callable[[np.ndarray, np.ndarray], list[int]]) -> list[np.ndarray]:
    """The law of each token of the best of K iid paths, given the tokens before it.

    `x` is the probability that one path begins with the prefix, `A` that one path ranks strictly below it.
    """
    K, A, x, rows = len(tree.children[0]), 0.0, 1.0, []
    for node, child in pairwise(path):
        q, row, below = tree.q[node], np.zeros(tree.q.shape[1]), 0.0
        start = A
        for t in rank(tree.p[node], q):
            upper, lower = start + x * (below + float(q[t])), start + x * below
            row[t] = q[t] * sum(upper**i * lower ** (K - 1 - i) for i in range(K))
            if t == tree.tokens[child]:
                A = lower
            below += float(q[t])
        rows.append(row / row.sum())
        x *= float(q[tree.tokens[child]])
    return rows
