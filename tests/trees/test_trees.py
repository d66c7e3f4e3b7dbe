"""Each way of growing gives the tree that its paper describes."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from outrider import catalog
from outrider.core.dice import PhiloxDice
from outrider.core.types import Draft, InputError, Request, Running, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.lengths.fixed import FixedLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import law, law_error, target_rows
from outrider.proof.statistics import chi_square
from outrider.trees.beam import BeamTree
from outrider.trees.fixed import FixedTree, best_topology
from outrider.trees.grow import grow
from outrider.trees.protocol import Children, UnprunedTree
from tests.verifiers.beam_law import beam_trees, children
from tests.world.tables import with_rows
from tests.world.verifiers import verifier

Rows = Callable[[tuple[int, ...]], np.ndarray]


def drafted(tree: object, rows: Rows, vocab: int, depth: int, count: int = 1, temperature: float = 1.0) -> Draft:
    """A batch of requests with the prompt [0] and seeds 0, 1, ..."""
    drafter = ModelDrafter(lm=TabularLM(rows, vocab))
    request = Request(id="r", prompt=(0,), max_new_tokens=99, sampling=Sampling(temperature=temperature))
    states = [
        Running(request=request, tokens=[0], slot=i, drafter=drafter, drafter_state=drafter.open(request))
        for i in range(count)
    ]
    dice = PhiloxDice(seeds=list(range(count)), steps=[0] * count)
    made = catalog.make("tree", tree) if isinstance(tree, str) else tree
    length = FixedLength(num_speculative_tokens=depth)
    return grow(drafter, made, length, states, [depth] * count, dice, torch.device("cpu"))


def paths(draft: Draft, request: int = 0) -> list[tuple[int, ...]]:
    """The tokens that lead to each node, in the order of the nodes; the root's is empty."""
    first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
    found: dict[int, tuple[int, ...]] = {}
    for node in range(first, end):
        parent = int(draft.parents[node])
        found[node] = () if parent < 0 else (*found[parent], int(draft.tokens[node]))
    return list(found.values())


def chance(rows: Rows, path: tuple[int, ...]) -> float:
    return float(np.prod([rows((0, *path[:i]))[token] for i, token in enumerate(path)]))


def test_every_tree_still_branches_when_the_request_is_greedy():
    rows = random_rows(6, seed=1)
    for name in catalog.rows("tree"):
        draft = drafted(name, rows, 6, 3, temperature=0.0)
        assert draft.branches == (name != "chain"), name
        if draft.rows is not None and name != "chain":
            assert (draft.rows > 0).all(), name


def test_siblings_are_distinct_and_counts_are_what_the_fields_say():
    rows = random_rows(6, seed=2)
    for tree, depth, sizes in (
        ("gumbel:branching=4x2x2", 3, [28]),
        ("beam:width=4", 3, [12]),
        ("top_plus_one:width=3", 2, [12]),
        ("fixed:children=3x2x0x1x1", 4, [7]),
        ("dynamic:width=3,num_nodes=10", 3, [10]),
        ("lattice:num_nodes=9", 3, [9]),
        ("opt:num_nodes=9,threshold=0", 3, [9]),
        ("iid:num_paths=3", 3, range(3, 10)),
    ):
        draft = drafted(tree, rows, 6, depth, count=5)
        for request in range(5):
            assert draft.num_draft_tokens(request) in sizes, tree
            nodes = paths(draft, request)
            assert len(set(nodes)) == len(nodes), tree
        assert draft.depths.max() <= depth


def test_iid_paths_keep_the_multiplicity_of_their_draws():
    draft = drafted("iid:num_paths=5", random_rows(2, seed=3), 2, 3, count=20)
    for request in range(20):
        root = int(draft.offsets[request])
        assert draft.first_child[root + 1] - draft.first_child[root] == 5
        for node in range(root + 1, int(draft.offsets[request + 1])):
            drawn = draft.links[draft.first_child[draft.parents[node]] : draft.first_child[draft.parents[node] + 1]]
            below = draft.first_child[node + 1] - draft.first_child[node]
            assert below == (0 if draft.depths[node] == 3 else (drawn == node).sum())


@pytest.mark.parametrize("tree", ["gumbel:branching=2", "beam:width=2", "fixed:children=2"])
def test_one_level_is_included_as_drawing_without_replacement_includes_it(tree):
    q = np.array([0.6, 0.3, 0.1])
    draft = drafted(tree, lambda _: q, 3, 1, count=4000)
    seen = Counter(tuple(draft.tokens[draft.links[2 * r : 2 * r + 2]].tolist()) for r in range(4000))
    pairs = [(a, b) for a, b in product(range(3), repeat=2) if a != b]
    expected = [4000 * q[a] * q[b] / (1 - q[a]) for a, b in pairs]
    assert chi_square([seen[pair] for pair in pairs], expected).p_value > 1e-3


def levels_of(draft: Draft, request: int) -> tuple:
    """What the oracle calls a tree's children: per parent its tokens in drawing order."""
    found = {}
    nodes = range(int(draft.offsets[request]), int(draft.offsets[request + 1]))
    for node, path in zip(nodes, paths(draft, request), strict=True):
        below = draft.links[draft.first_child[node] : draft.first_child[node + 1]]
        if len(below):
            found[path] = tuple(draft.tokens[below].tolist())
    return tuple(sorted(found.items()))


def beam_law(rows: Rows, vocab: int, depth: int, width: int) -> dict[tuple, float]:
    law: Counter[tuple] = Counter()
    for levels, mass in beam_trees(lambda prefix: rows((0, *prefix)), vocab, depth, width).items():
        law[tuple(sorted((k, v) for k, v in children(levels).items() if v))] += mass
    return law


@pytest.mark.parametrize("depth, width", [(2, 2), (3, 2), (2, 3)])
def test_the_stochastic_beam_grows_by_its_law(depth, width):
    rows, count = random_rows(3, seed=5), 6000
    draft = drafted(BeamTree(width=width), rows, 3, depth, count=count)
    seen = Counter(levels_of(draft, request) for request in range(count))
    expected = beam_law(rows, 3, depth, width)
    assert set(seen) <= set(expected)
    likely = [tree for tree, mass in expected.items() if mass * count >= 5]
    observed = [seen[tree] for tree in likely] + [count - sum(seen[tree] for tree in likely)]
    hoped = [expected[tree] * count for tree in likely]
    rest = count - sum(hoped)
    if rest < 5:
        observed.pop()
    else:
        hoped.append(rest)
    assert chi_square(observed, hoped).p_value > 1e-3


@dataclass(frozen=True, kw_only=True)
class Planted(UnprunedTree):
    """A tree that was drawn before: per path its children's tokens."""

    lists: dict[tuple[int, ...], tuple[int, ...]]

    @property
    def structure(self):
        return "without_replacement"

    def choose(self, level, dice):
        # Nodes are numbered level by level, siblings in the order of their parents.
        order = [()]
        for path in order:
            order += [(*path, token) for token in self.lists.get(path, ())]
        order.sort(key=len)
        below = [self.lists.get(order[node], ()) for node in level.nodes.tolist()]
        parents = np.repeat(np.arange(len(below)), [len(tokens) for tokens in below])
        return Children(
            owners=level.owners[parents],
            parents=level.nodes[parents],
            tokens=torch.tensor([token for tokens in below for token in tokens], dtype=torch.long),
            expand=np.ones(len(parents), dtype=bool),
        )


@pytest.mark.parametrize("name", ["recursive", "traversal", "match"])
def test_over_all_trees_of_the_stochastic_beam_each_valid_rule_keeps_the_law(name):
    assert beam_error(name) < 1e-12


def test_top_plus_one_is_biased_on_the_stochastic_beam():
    assert beam_error("top_plus_one") > 1e-4


def beam_error(name: str) -> float:
    """Law error of a rule over the beam's trees, each with its probability."""
    rows, rule = random_rows(3, seed=6), verifier(name)
    emitted: Counter[tuple[int, ...]] = Counter()
    for lists, mass in beam_law(rows, 3, 2, 2).items():
        parts = with_rows(random_rows(3, seed=7), rows, 3, rule, tree=Planted(lists=dict(lists)))
        for output, share in law(parts, [0], 1).emitted.items():
            emitted[output] += mass * share
    request = Request(id="r", prompt=(0,), max_new_tokens=99, sampling=Sampling())
    return law_error(emitted, partial(target_rows, parts, request))


def test_a_beam_of_width_one_and_a_gumbel_tree_of_ones_are_chains():
    rows = random_rows(4, seed=8)
    for tree in (BeamTree(width=1), "gumbel:branching=1x1x1"):
        draft = drafted(tree, rows, 4, 3, count=50)
        assert not draft.branches
        assert (np.diff(draft.offsets) == 4).all()


@pytest.mark.parametrize("seed", range(4))
def test_the_lattice_keeps_the_best_prefixes_of_its_marginals(seed):
    marginals = [np.random.default_rng([seed, d]).dirichlet(np.ones(4)) for d in range(4)]
    draft = drafted("lattice:num_nodes=11", lambda prefix: marginals[len(prefix) - 1], 4, 4)
    every = [path for n in range(1, 5) for path in product(range(4), repeat=n)]
    best = sorted(every, key=lambda path: -np.prod([marginals[i][t] for i, t in enumerate(path)]))[:11]
    assert set(paths(draft)[1:]) == set(best)


@pytest.mark.parametrize("seed", range(4))
def test_the_dynamic_tree_and_opt_keep_the_likeliest_nodes_of_what_they_expanded(seed):
    rows = random_rows(3, seed=20 + seed)
    every = [path for n in range(1, 4) for path in product(range(3), repeat=n)]
    best = sorted(every, key=lambda path: -chance(rows, path))[:7]
    # With as many expansions as there are nodes per level, nothing is missed.
    for tree in ("dynamic:width=9,num_nodes=7", "opt:num_nodes=7,threshold=0"):
        assert set(paths(drafted(tree, rows, 3, 3))[1:]) == set(best), tree


def test_opt_stops_where_a_level_gains_no_more_than_the_threshold():
    rows = random_rows(4, seed=30)
    deep, shallow = (drafted(f"opt:num_nodes=8,threshold={t}", rows, 4, 6) for t in (0.0, 0.9))
    assert deep.depths.max() > shallow.depths.max()
    assert shallow.depths.max() >= 1


def test_top_plus_one_draws_its_last_child_from_the_rest():
    q = np.array([0.1, 0.5, 0.1, 0.3])
    draft = drafted("top_plus_one:width=2", lambda _: q, 4, 1, count=3000)
    first, last = draft.tokens[draft.links].reshape(3000, 2).T
    assert (first == 1).all()
    counts = np.bincount(last.numpy(), minlength=4)
    assert counts[1] == 0
    assert chi_square(counts[[0, 2, 3]].tolist(), [600, 600, 1800]).p_value > 1e-3


def test_children_without_probability_are_not_drawn():
    q = np.array([0.7, 0.3, 0.0, 0.0])
    for tree in ("gumbel:branching=4", "beam:width=4", "top_plus_one:width=4", "fixed:children=4"):
        assert sorted(path[0] for path in paths(drafted(tree, lambda _: q, 4, 1))[1:]) == [0, 1], tree


def test_a_fixed_topology_is_kept_and_a_wrong_one_refused():
    draft = drafted(FixedTree(children=(2, 1, 0, 1)), random_rows(5, seed=3), 5, 9)
    assert draft.parents.tolist() == [-1, 0, 0, 1, 3]
    for wrong in ((0,), (1, -1), (1, 0, 1)):
        with pytest.raises(InputError, match="children"):
            FixedTree(children=wrong)


def expected_tokens(tree: tuple[int, ...], acceptance: list[float]) -> float:
    """Tokens that a topology is expected to give: the sum over nodes of the product of its ranks' acceptance."""
    worth, queue, total = {0: 1.0}, [0], 1.0
    following = 1
    for node in queue:
        count = tree[node] if node < len(tree) else 0
        for rank in range(count):
            worth[following] = worth[node] * acceptance[rank]
            total += worth[following]
            queue.append(following)
            following += 1
    return total


def topologies(nodes: int, depth: int) -> list[tuple[int, ...]]:
    """Every breadth-first list of counts with so many drafted nodes and no deeper."""

    def extend(counts: tuple[int, ...], depths: tuple[int, ...]) -> list[tuple[int, ...]]:
        if len(depths) == nodes + 1 and len(counts) == len(depths):
            return [counts]
        if len(counts) == len(depths):
            return []
        here = depths[len(counts)]
        most = nodes + 1 - len(depths) if here < depth else 0
        return [found for c in range(most + 1) for found in extend((*counts, c), (*depths, *[here + 1] * c))]

    return extend((), (0,))


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
@pytest.mark.parametrize("acceptance", [[0.6, 0.25, 0.1], [0.4, 0.35, 0.2], [0.9, 0.0, 0.0]])
def test_the_dynamic_programme_finds_the_best_topology(depth, acceptance):
    for nodes in (1, 3, 6):
        costs = [1.0 if m == nodes + 1 else 1e9 for m in range(1, nodes + 2)]
        try:
            found = best_topology(acceptance, nodes, depth, 0.0, costs)
        except InputError:
            continue
        padded = [*acceptance, *[-9.0] * nodes]
        best = max(expected_tokens(tree, padded) for tree in topologies(nodes, depth))
        if sum(found) == nodes:
            assert expected_tokens(found, padded) == pytest.approx(best, abs=1e-12)
            FixedTree(children=found)


def test_with_one_rank_the_best_topology_is_the_chain_of_the_best_length():
    a, c = 0.8, 0.1
    found = best_topology([a, 0.0], 12, 12, c, [1.0] * 13)
    rates = [((1 - a ** (n + 1)) / (1 - a)) / (1 + c * n) for n in range(1, 13)]
    assert found == (1,) * (1 + int(np.argmax(rates)))


def test_numbers_survive_pruning_so_that_a_drafter_finds_its_nodes():
    draft = drafted("dynamic:width=3,num_nodes=4", random_rows(5, seed=9), 5, 3)
    assert draft.numbers[0] == 0
    assert len(set(draft.numbers.tolist())) == len(draft.numbers)
    assert draft.numbers.max() > len(draft.numbers)
    assert replace(draft).structure == "deterministic"
