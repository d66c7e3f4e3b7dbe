"""Naive single-sequence twins of the verification rules on trees, written straight from the papers with plain loops.

Each rule takes a tree and a source of choices and returns the accepted tokens followed by the next one. The coin of a
link (a parent and its k-th child) has as slot the number of links before it, parents in packed order; in `multipath`
and `greedy_block` it is the position along the path, from 0. The last token is picked with slot 0, except in rules that
may pick once a level (`match`, `top_plus_one`), where the slot is the depth.
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
    """

    tokens: list[int]
    parents: list[int]
    children: list[list[int]]
    p: np.ndarray
    q: np.ndarray

    def slot(self, node: int, k: int) -> int:
        """Number of links before the k-th link of a node."""
        return sum(len(links) for links in self.children[:node]) + k

    def drawn_from(self, node: int, child: int) -> np.ndarray:
        """The law of one child of a node: the stored row, or all mass on its token where it was chosen."""
        if not np.isnan(self.q[node]).any():
            return self.q[node]
        return np.eye(self.q.shape[1])[self.tokens[child]]


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
    return _loose_token(tree, dice, lambda p: p)


def lenient(tree: Tree, dice: Choices, lenience: float) -> list[int]:
    """Leviathan et al. 2023, appendix: accept with min(1, p / (l q)). Lossy below l = 1."""
    return f_lin(tree, dice, lenience)


def f_lin(tree: Tree, dice: Choices, epsilon: float) -> list[int]:
    """Zhou et al. 2024, DistillSpec: f(p) = p / e."""
    return _loose_token(tree, dice, lambda p: p / epsilon)


def f_sq(tree: Tree, dice: Choices, epsilon: float) -> list[int]:
    """Zhou et al. 2024, DistillSpec: f(p) = p / e^2."""
    return _loose_token(tree, dice, lambda p: p / epsilon**2)


def f_exp(tree: Tree, dice: Choices, epsilon: float) -> list[int]:
    """Zhou et al. 2024, DistillSpec: f(p) = p^e."""
    return _loose_token(tree, dice, lambda p: p**epsilon)


def _loose_token(tree: Tree, dice: Choices, f: Callable[[float], float]) -> list[int]:
    node, emitted = 0, list[int]()
    while tree.children[node]:
        child = tree.children[node][0]
        x, p, q = tree.tokens[child], tree.p[node], tree.drawn_from(node, child)
        if not dice.coin(ratio(f(float(p[x])), q[x]), tree.slot(node, 0)):
            return [*emitted, dice.pick(leftover(p, q), 0)]
        node, emitted = child, [*emitted, x]
    return [*emitted, dice.pick(tree.p[node], 0)]


def typical(tree: Tree, dice: Choices, epsilon: float = 0.09, delta: float = 0.3) -> list[int]:
    """Cai et al. 2024, Medusa, section 2.3.1: keep x where p(x) > min(e, d exp(-H)). Lossy.

    The longest kept path wins, among equally long ones the likeliest, then the first in packed order.
    """
    best, kept = (0, 0.0, 0), {0: (0, 0.0)}
    for node in range(1, len(tree.tokens)):
        parent = tree.parents[node]
        p = tree.p[parent]
        entropy = -sum(float(x) * np.log(x) for x in p if x > 0)
        chance = p[tree.tokens[node]]
        if parent in kept and chance > min(epsilon, delta * np.exp(-entropy)):
            depth, score = kept[parent]
            kept[node] = (depth + 1, score + float(np.log(chance)))
            best = max(best, (*kept[node], -node))
    node = -best[2]
    path = path_to(tree, node)
    return [*path, dice.pick(tree.p[node], 0)]


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
            row = tree.drawn_from(node, child) if np.isnan(Q).any() else Q
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
            row = tree.drawn_from(node, child) if np.isnan(Q[node]).any() else Q[node]
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
        row = tree.drawn_from(v, leaf) if np.isnan(Q[v]).any() else Q[v]
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


Carried = tuple[tuple[float, int], ...]
"""Modifications of the target still in force, oldest first: the joint ratio R so far and how many positions remain."""


def greedy_block(tree: Tree, dice: Choices, carried: Carried) -> tuple[list[int], Carried]:
    """Sun et al. 2024, appendix: the block rule that is best for one block and borrows from the next ones.

    A chain only. Each modification turns the row after a prefix z into (R(z) p - q)_+, R(z) being the joint ratio of
    all that was emitted since its block began; the newer ones build on the older ones' rows.
    """
    path = [0]
    while tree.children[path[-1]]:
        path += tree.children[path[-1]]
    gamma, tokens = len(path) - 1, [tree.tokens[node] for node in path[1:]]
    q = [tree.drawn_from(node, child) for node, child in pairwise(path)]
    ratios = [[R for R, _ in carried]]
    before: list[list[np.ndarray]] = []
    P: list[np.ndarray] = []
    R = [1.0]
    for i in range(gamma + 1):
        row, stages = tree.p[path[i]], list[np.ndarray]()
        for (_, remaining), weight in zip(carried, ratios[i], strict=True):
            stages.append(row)
            if i < remaining:
                if i == gamma:
                    raise ValueError("a modification reaches beyond the drafted rows")
                row = _modified(row, q[i], weight)
        before.append(stages)
        P.append(row)
        if i < gamma:
            x = tokens[i]
            ratios.append([_times(weight, p[x], q[i][x]) for weight, p in zip(ratios[i], stages, strict=True)])
            R.append(_times(R[i], row[x], q[i][x]))
    tau = gamma
    while tau > 0:
        if tau == gamma:
            h = min(1.0, R[gamma])
        else:
            remaining_mass = float(np.maximum(R[tau] * P[tau] - q[tau], 0).sum())
            rejected_mass = float(np.maximum(q[tau] - R[tau] * P[tau], 0).sum())
            h = min(1.0, remaining_mass / rejected_mass) if rejected_mass > 0 else 1.0
        if dice.coin(h, tau - 1):
            break
        tau -= 1
    if tau == gamma:
        return [*tokens, dice.pick(P[gamma], 0)], ()
    y = dice.pick(_modified(P[tau], q[tau], R[tau]), 0)
    after = [
        (_times(weight, p[y], q[tau][y]), remaining - tau - 1)
        for weight, p, (_, remaining) in zip(ratios[tau], before[tau], carried, strict=True)
    ]
    after.append((_times(R[tau], P[tau][y], q[tau][y]), gamma - tau - 1))
    return [*tokens[:tau], y], tuple((weight, remaining) for weight, remaining in after if remaining > 0)


def _times(weight: float, p: float, q: float) -> float:
    """weight * p / q; infinite, and from then on, where the draft could not have drawn the token."""
    return float(weight * p / q) if q > 0 and np.isfinite(weight) else float("inf")


def _modified(p: np.ndarray, q: np.ndarray, weight: float) -> np.ndarray:
    """(weight p - q)_+ normalised; p itself for an infinite weight, and where nothing is left."""
    if np.isinf(weight):
        return p
    left = np.maximum(weight * p - q, 0)
    return left / left.sum() if left.sum() > 0 else p


def rank_by_ratio(p: np.ndarray, q: np.ndarray) -> list[int]:
    """Tokens from the lowest p / q to the highest, equal ratios by token id: a strict order."""
    return sorted(range(len(p)), key=lambda x: (float(p[x] / q[x]) if q[x] > 0 else float("inf"), x))


def multipath(tree: Tree, dice: Choices) -> list[int]:
    """Greedy multi-path block verification (arXiv 2602.16961) over K iid paths of equal length.

    Follow the highest ranked child at every node; that path's law is known, and block verification judges it.
    """
    path = [0]
    while links := tree.children[path[-1]]:
        order = rank_by_ratio(tree.p[path[-1]], tree.q[path[-1]])
        path.append(max(links, key=lambda child: order.index(tree.tokens[child])))
    return block_along(tree, path, skewed(tree, path, rank_by_ratio), dice, list(range(len(path))))


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
