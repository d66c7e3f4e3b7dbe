"""Naive twins of the rules that give up the target's law for acceptance, to be compared with their batched versions."""

from collections.abc import Callable

import numpy as np

from tests.verifiers.choices import Choices
from tests.verifiers.naive_trees import Tree, leftover, path_to, ratio


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
