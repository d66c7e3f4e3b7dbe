"""Every draft that a way of drafting can produce, with its probability, on tiny prefix-dependent models."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import numpy as np

from tests.verifiers.choices import Choices, outcomes
from tests.verifiers.naive_trees import Tree

Prefix = tuple[int, ...]
Model = Callable[[Prefix], np.ndarray]
"""The distribution of the next token after a prefix."""
Forest = list[tuple[Tree, float]]
"""Trees and their probabilities."""
Siblings = dict[Prefix, float]
"""Ordered lists of children of one node, repeats allowed, and their probabilities."""
Rule = Callable[[Tree, Choices], list[int]]


def fixed(row: Sequence[float]) -> Model:
    """A model that does not look at the prefix."""
    return lambda prefix: np.array(row, dtype=np.float64)


def random_model(vocab: int, seed: int, concentration: float = 0.8) -> Model:
    """A random row per prefix."""
    rows: dict[Prefix, np.ndarray] = {}

    def row(prefix: Prefix) -> np.ndarray:
        if prefix not in rows:
            random = np.random.default_rng([seed, len(prefix), *prefix])
            rows[prefix] = random.dirichlet(np.full(vocab, concentration))
        return rows[prefix]

    return row


def sparse_model(vocab: int, seed: int) -> Model:
    """A random row per prefix with one token missing, as after top-k."""
    model = random_model(vocab, seed)

    def row(prefix: Prefix) -> np.ndarray:
        missing = int(np.random.default_rng([seed, 99, len(prefix), *prefix]).integers(vocab))
        kept = np.where(np.arange(vocab) == missing, 0.0, model(prefix))
        return kept / kept.sum()

    return row


def models(vocab: int, seed: int) -> tuple[Model, Model]:
    """Prefix-dependent target and draft; from seed 100 on, rows with a token missing."""
    make = random_model if seed < 100 else sparse_model
    return make(vocab, seed), make(vocab, seed + 1000)


def tree_of(lists: dict[Prefix, Prefix], p: Model, q: Model, chosen: bool = False) -> Tree:
    """The tree whose node `prefix` has the children `lists[prefix]`, in that order; nodes lie level by level."""
    prefixes: list[Prefix] = [()]
    parents, children = [-1], list[list[int]]()
    at = 0
    while at < len(prefixes):
        ids: dict[int, int] = {}
        for token in lists.get(prefixes[at], ()):
            if token not in ids:
                ids[token] = len(prefixes)
                prefixes.append((*prefixes[at], token))
                parents.append(at)
        children.append([ids[token] for token in lists.get(prefixes[at], ())])
        at += 1
    rows = np.array([q(prefix) for prefix in prefixes])
    return Tree(
        tokens=[prefix[-1] if prefix else 0 for prefix in prefixes],
        parents=parents,
        children=children,
        p=np.array([p(prefix) for prefix in prefixes]),
        q=np.full_like(rows, np.nan) if chosen else rows,
    )


def grown(p: Model, q: Model, siblings: Callable[[np.ndarray], Siblings], depth: int, chosen: bool = False) -> Forest:
    """Every node above the given depth gets a list of children by a law that reads its own row of q alone."""
    worlds: list[tuple[dict[Prefix, Prefix], float]] = [({}, 1.0)]
    for level in range(depth):
        following = []
        for lists, probability in worlds:
            nodes = [(*prefix, x) for prefix, found in lists.items() if len(prefix) == level - 1 for x in set(found)]
            laws = [siblings(q(prefix)).items() for prefix in (nodes if level else [()])]
            for found in product(*laws):
                added = {prefix: names for prefix, (names, _) in zip(nodes if level else [()], found, strict=True)}
                following.append((lists | added, probability * float(np.prod([mass for _, mass in found]))))
        worlds = following
    return [(tree_of(lists, p, q, chosen), probability) for lists, probability in worlds if probability > 0]


def drawn(count: int) -> Callable[[np.ndarray], Siblings]:
    """`count` iid draws."""
    return lambda q: {names: float(np.prod(q[list(names)])) for names in product(range(len(q)), repeat=count)}


def without_replacement(count: int) -> Callable[[np.ndarray], Siblings]:
    """`count` draws without replacement, or as many as there are tokens."""

    def law(q: np.ndarray) -> Siblings:
        support = np.flatnonzero(q)
        found: Siblings = {}
        for names in permutations(support.tolist(), min(count, len(support))):
            left, found[names] = 1.0, 1.0
            for x in names:
                found[names] *= float(q[x]) / left if left > 0 else 1.0
                left -= float(q[x])
        return found

    return law


def top_then_one(count: int) -> Callable[[np.ndarray], Siblings]:
    """The `count` - 1 likeliest tokens, then one draw from the rest."""

    def law(q: np.ndarray) -> Siblings:
        top = tuple(np.argsort(-q, kind="stable")[: count - 1].tolist())
        rest = {x: float(q[x]) for x in range(len(q)) if x not in top and q[x] > 0}
        if not rest:
            return {top: 1.0}
        return {(*top, x): mass / sum(rest.values()) for x, mass in rest.items()}

    return law


def likeliest(count: int) -> Callable[[np.ndarray], Siblings]:
    """The `count` likeliest tokens."""
    return lambda q: {tuple(np.argsort(-q, kind="stable")[:count].tolist()): 1.0}


def rearranged(law: Callable[[np.ndarray], Siblings], by: Callable[[np.ndarray, Prefix], Prefix]) -> Callable:
    """The same draws, rearranged or thinned before the verifier sees them."""

    def after(q: np.ndarray) -> Siblings:
        found: Siblings = defaultdict(float)
        for names, mass in law(q).items():
            found[by(q, names)] += mass
        return dict(found)

    return after


def first_appearances(q: np.ndarray, names: Prefix) -> Prefix:
    """Without the repeats."""
    return tuple(dict.fromkeys(names))


def iid_paths(p: Model, q: Model, count: int, depth: int, deduplicated: bool) -> Forest:
    """`count` independent paths merged into a tree: one link per path, or one link per distinct child."""
    vocab = len(q(()))
    chances = {
        path: float(np.prod([q(path[:i])[x] for i, x in enumerate(path)]))
        for path in product(range(vocab), repeat=depth)
    }
    found: Forest = []
    for paths in product(chances, repeat=count):
        lists: dict[Prefix, Prefix] = defaultdict(tuple)
        for path in paths:
            for i, x in enumerate(path):
                lists[path[:i]] = (*lists[path[:i]], x)
        if deduplicated:
            lists = {prefix: tuple(dict.fromkeys(names)) for prefix, names in lists.items()}
        found.append((tree_of(lists, p, q), float(np.prod([chances[path] for path in paths]))))
    return [(tree, probability) for tree, probability in found if probability > 0]


@dataclass(frozen=True, kw_only=True)
class Law:
    """What one step emits over all drafts.

    Attributes:
        emitted: Probability of each emitted sequence, accepted tokens and the next one.
    """

    emitted: dict[Prefix, float]

    @property
    def accepted(self) -> float:
        """Expected number of accepted tokens."""
        return sum(mass * (len(tokens) - 1) for tokens, mass in self.emitted.items())

    def joint(self, p: Model, length: int) -> dict[Prefix, float]:
        """The law of the first `length` tokens, what was not emitted being continued by the target."""
        found: dict[Prefix, float] = defaultdict(float)
        for tokens, mass in self.emitted.items():
            assert len(tokens) <= length
            for names in product(range(len(p(()))), repeat=length - len(tokens)):
                found[(*tokens, *names)] += mass * likelihood(p, tokens, names)
        return dict(found)

    def error(self, p: Model) -> float:
        """Largest difference to the target's own joint law."""
        length = max(map(len, self.emitted))
        joint = self.joint(p, length)
        return max(
            abs(joint.get(names, 0.0) - likelihood(p, (), names)) for names in product(range(len(p(()))), repeat=length)
        )


def likelihood(p: Model, prefix: Prefix, tokens: Prefix) -> float:
    """Probability that the model continues a prefix with these tokens."""
    return float(np.prod([p((*prefix, *tokens[:i]))[x] for i, x in enumerate(tokens)]))


def law(forest: Forest, rule: Rule) -> Law:
    """The exact law of one step: every tree, every way that the rule's choices can fall."""
    emitted: dict[Prefix, float] = defaultdict(float)
    for tree, probability in forest:
        for tokens, mass in _decisions(tree, rule):
            emitted[tokens] += probability * mass
    return Law(emitted=dict(emitted))


def _decisions(tree: Tree, rule: Rule) -> Iterator[tuple[Prefix, float]]:
    yield from outcomes(lambda dice: tuple(rule(tree, dice))).items()
