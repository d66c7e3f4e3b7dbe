"""Each batched verifier decides what its naive twin decides, request by request, on ragged batches of real drafts."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import catalog
from outrider.core.dice import Draws, PhiloxDice, Purpose
from outrider.core.types import Draft, InputError, Request, Running, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.lengths.fixed import FixedLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.refusals import kind_of
from outrider.trees.grow import grow
from outrider.verifiers.lenient import LenientVerifier
from outrider.verifiers.multipath import _select
from outrider.verifiers.traits import CHAINS
from tests.verifiers import naive_lossy, naive_trees
from tests.verifiers.choices import Choices, Numbers
from tests.verifiers.naive_greedy_block import greedy_block
from tests.verifiers.naive_trees import Tree
from tests.world.copied import CopiedBeside
from tests.world.drafts import chains
from tests.world.verifiers import LOSSLESS, LOSSY, verifier

VOCAB = 5
TREES = [
    "chain",
    "iid:num_paths=3",
    "iid:num_paths=3,dedup=true",
    "gumbel:branching=3x2x1",
    "beam:width=3",
    "fixed:children=3x2x0x1x1",
    "top_plus_one:width=3",
    "dynamic:width=2,num_nodes=6",
    "copied beside drawn",
]


def grown_by(tree: str) -> object:
    """The tree of a name."""
    return CopiedBeside() if tree == TREES[-1] else catalog.make("tree", tree)


def recursive(tree: Tree, dice: Choices, structure: str) -> list[int]:
    if structure == "iid":
        return naive_trees.recursive_with_replacement(tree, dice)
    return naive_trees.recursive_without_replacement(tree, dice)


# The verifiers that have a twin.
TWINS: dict[str, Callable[[Tree, Choices, str], list[int]]] = {
    "token": lambda tree, dice, _: naive_trees.token(tree, dice),
    "block": lambda tree, dice, _: naive_trees.block(tree, dice),
    "match": lambda tree, dice, _: naive_trees.match(tree, dice),
    "coupled": lambda tree, dice, _: naive_trees.match(tree, dice),
    "recursive": recursive,
    "kseq": lambda tree, dice, _: naive_trees.kseq(tree, dice),
    "top_plus_one": lambda tree, dice, _: naive_trees.top_plus_one(tree, dice),
    "traversal": lambda tree, dice, _: naive_trees.traversal(tree, dice),
    "multipath": lambda tree, dice, _: naive_trees.multipath(tree, dice, naive_trees.rank_by_bits),
    "greedy_block": lambda tree, dice, _: greedy_block(tree, dice, ())[0],
    "lenient": lambda tree, dice, _: naive_lossy.lenient(tree, dice, 0.5),
    "typical": lambda tree, dice, _: naive_lossy.typical(tree, dice),
}


def drafted(tree: str, rooms: list[int], seed: int) -> tuple[Draft, PhiloxDice]:
    """A ragged batch, grown as in production from random tables."""
    drafter = ModelDrafter(lm=TabularLM(random_rows(VOCAB, seed, concentration=0.5), VOCAB))
    states = []
    for i in range(len(rooms)):
        request = Request(id=str(i), prompt=(i % VOCAB, seed % VOCAB), max_new_tokens=9, sampling=Sampling())
        states.append(
            Running(
                request=request,
                tokens=list(request.prompt),
                slot=i,
                drafter=drafter,
                drafter_state=drafter.open(request),
            )
        )
    dice = PhiloxDice(seeds=list(range(len(rooms))), steps=[seed] * len(rooms))
    length = FixedLength(num_speculative_tokens=4)
    return grow(drafter, grown_by(tree), length, states, rooms, dice, torch.device("cpu")), dice


def tree_of(draft: Draft, request: int, p: np.ndarray) -> Tree:
    """One request's tree, its nodes counted from its root."""
    first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
    q = np.full((end - first, VOCAB), np.nan)
    for node in range(first, end):
        if draft.row_of[node] >= 0:
            q[node - first] = draft.rows[draft.row_of[node]].numpy()
    return Tree(
        tokens=draft.tokens[first:end].tolist(),
        parents=[max(int(parent) - first, -1) for parent in draft.parents[first:end]],
        children=[
            (draft.links[draft.first_child[node] : draft.first_child[node + 1]] - first).tolist()
            for node in range(first, end)
        ],
        p=p[first:end],
        q=q,
        one_drawn=draft.structure == "union",
    )


def pairs() -> list:
    found = []
    for tree in TREES:
        kind = kind_of("sampled", grown_by(tree).structure)
        names = [name for name, make in (LOSSLESS | LOSSY).items() if kind in make.kinds]
        found += [pytest.param(tree, name, id=f"{name}-{tree}") for name in names if name in TWINS]
    return found


@pytest.mark.parametrize("tree, name", pairs())
@given(seed=st.integers(0, 10**6), rooms=st.lists(st.integers(0, 4), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_a_batch_decides_what_the_twin_decides(tree, name, seed, rooms):
    if name == "multipath":
        rooms = [room for room in rooms if room] or [2]
    draft, dice = drafted(tree, rooms, seed)
    p = np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.5), size=len(draft.parents))
    verdict = verifier(name).verify(draft, torch.from_numpy(p), dice)
    assert len(verdict.next_tokens) == len(rooms)
    for i in range(len(rooms)):
        numbers = Numbers(
            accept=lambda slot, i=i: dice._uniform(i, slot, Purpose.ACCEPT),
            recover=lambda slot, i=i: dice._uniform(i, slot, Purpose.RECOVER),
        )
        expected = TWINS[name](tree_of(draft, i, p), numbers, draft.structure)
        count = int(verdict.num_accepted[i])
        path = verdict.paths[i, :count]
        assert [*draft.tokens[torch.from_numpy(path)].tolist(), int(verdict.next_tokens[i])] == expected
        assert draft.parents[path].tolist() == [int(draft.offsets[i]), *path[:-1].tolist()][:count]
        assert (verdict.paths[i, count:] == -1).all()


@pytest.mark.parametrize("family", ["linear", "squared", "exponential"])
def test_the_families_of_lenience_are_their_twins(family):
    twins = {"linear": naive_lossy.f_lin, "squared": naive_lossy.f_sq, "exponential": naive_lossy.f_exp}
    for seed in range(10):
        draft, dice = drafted("chain", [4], seed)
        p = np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.5), size=len(draft.parents))
        numbers = Numbers(
            accept=lambda slot, dice=dice: dice._uniform(0, slot, Purpose.ACCEPT),
            recover=lambda slot, dice=dice: dice._uniform(0, slot, Purpose.RECOVER),
        )
        rule = LenientVerifier(strength=0.3, family=family)
        verdict = rule.verify(draft, torch.from_numpy(p), dice)
        path = torch.from_numpy(verdict.paths[0, : verdict.num_accepted[0]])
        expected = twins[family](tree_of(draft, 0, p), numbers, 0.3)
        assert [*draft.tokens[path].tolist(), int(verdict.next_tokens[0])] == expected


@pytest.mark.parametrize("name", [name for name, make in (LOSSLESS | LOSSY).items() if make.kinds <= CHAINS])
def test_a_chain_verifier_refuses_a_branching_draft(name):
    draft, dice = drafted("gumbel:branching=2", [1], 0)
    p = torch.full((len(draft.parents), VOCAB), 1 / VOCAB)
    with pytest.raises(InputError, match="branching draft; use match"):
        verifier(name).verify(draft, p, dice)


@pytest.mark.parametrize("name", [*LOSSLESS, *LOSSY])
def test_a_zero_probability_token_is_never_accepted_even_by_a_zero_uniform(name):
    class Zeros(PhiloxDice):
        def _uniform(self, request, slot, purpose):
            return 0.0

    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.tensor([[1.0, 0.0]])
    verdict = verifier(name).verify(chains([[0]], q), p, Zeros(seeds=[0], steps=[0]))
    assert int(verdict.num_accepted[0]) == 0
    assert int(verdict.next_tokens[0]) == 1


def test_draws_of_one_request_do_not_depend_on_the_batch():
    weights = torch.rand(1, 50, dtype=torch.float64)
    for purpose in (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER):
        alone = PhiloxDice(seeds=[3], steps=[9]).pick(
            weights, Draws(requests=np.array([0]), slots=np.array([4]), purpose=purpose)
        )
        batched = PhiloxDice(seeds=[8, 3], steps=[1, 9]).pick(
            weights.expand(2, -1), Draws(requests=np.array([0, 1]), slots=np.array([40, 4]), purpose=purpose)
        )
        assert int(alone[0]) == int(batched[1])


def test_draws_without_replacement_are_what_drawing_in_turn_gives():
    random = np.random.default_rng(0)
    weights = torch.from_numpy(random.dirichlet(np.full(6, 0.3), size=200))
    weights[::3, 2] = 0
    draws = Draws(requests=np.arange(200), slots=np.zeros(200, dtype=np.int64), purpose=Purpose.DRAFT)
    dice = PhiloxDice(seeds=list(range(200)), steps=[0] * 200)
    picked = dice.pick_many(weights, 6, False, draws)
    left = weights.clone()
    for k in range(6):
        own = Draws(requests=draws.requests, slots=draws.slots + k, purpose=Purpose.DRAFT)
        there = left.sum(-1) > 0
        expected = torch.where(there, dice.pick(left, own), -1)
        assert (picked[:, k] == expected).float().mean() > 0.999
        assert ((picked[:, k] >= 0) == there).all()
        left = left.scatter(1, picked[:, k : k + 1].clamp_min(0), 0.0) * there[:, None]


def test_the_law_of_a_deep_best_path_does_not_vanish_in_float32():
    drafter = ModelDrafter(lm=TabularLM(random_rows(VOCAB, 0), VOCAB))
    request = Request(id="", prompt=(0, 1), max_new_tokens=80, sampling=Sampling())
    state = Running(request=request, tokens=[0, 1], slot=0, drafter=drafter, drafter_state=drafter.open(request))
    dice = PhiloxDice(seeds=[0], steps=[0])
    length = FixedLength(num_speculative_tokens=64)
    draft = grow(drafter, catalog.make("tree", "iid:num_paths=4"), length, [state], [64], dice, torch.device("cpu"))
    chain, nodes = _select(draft, torch.softmax(torch.randn(len(draft.parents), VOCAB), -1))
    assert len(nodes) == 65
    assert chain.rows is not None
    torch.testing.assert_close(chain.rows.sum(-1), torch.ones(64))


def test_traversal_decides_the_same_request_by_request(monkeypatch):
    rule = catalog.make("verifier", "traversal")
    for seed in range(5):
        draft, _ = drafted("gumbel:branching=3x2x1", [3, 1, 0, 4], seed)
        p = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(VOCAB, 0.5), size=len(draft.parents)))
        dice = PhiloxDice(seeds=[0, 1, 2, 3], steps=[seed] * 4)
        together = rule.verify(draft, p, dice)
        monkeypatch.setattr("outrider.verifiers.traversal.PIECES", 0)
        alone = rule.verify(draft, p, dice)
        monkeypatch.undo()
        assert (together.paths == alone.paths).all()
        assert together.next_tokens.tolist() == alone.next_tokens.tolist()
