"""Goodput with tree `dynamic` keeps the nodes that pay, stops where a level does not, and keeps the law."""

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import outrider
from outrider import InputError, Sampling
from outrider.core.dice import PhiloxDice
from outrider.core.types import Draft, Request, Running, Step, Timing
from outrider.decoding.step import StepDecoding
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.lengths.acceptance import Counts
from outrider.lengths.costs import CostTable, StepCost
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength
from outrider.lengths.goodput import GoodputLength
from outrider.lengths.sized_tree import SizedTree
from outrider.lm.tabular import TabularLM, random_rows
from outrider.plan import probe
from outrider.proof.enumerate import joint_law
from outrider.proof.rule import law_error
from outrider.trees.dynamic import DynamicTree
from outrider.trees.grow import grow
from outrider.trees.protocol import RankedTree
from tests.lengths.test_goodput import DRAWN
from tests.trees.test_trees import chance, paths
from tests.world.models import llama
from tests.world.tables import tables
from tests.world.verifiers import each, judges_of, verifier

VOCAB, DEEP = 3, 3
BOUND = 1e-12
WHOLE = DynamicTree(width=VOCAB**DEEP, num_nodes=30)
EVERY = [path for n in range(1, DEEP + 1) for path in product(range(VOCAB), repeat=n)]


def reading(seconds: float):
    return lambda nodes, requests: np.full(DEEP + 1, seconds * nodes)


def grown(
    seed: int = 0,
    *,
    tree: RankedTree = WHOLE,
    node: float = 0.0,
    level: float = 0.0,
    rate: float = 1.0,
    odds: float = 1,
) -> Draft:
    """A draft over random rows, where a node costs so many tokens, and so does reading one."""
    drafter = ModelDrafter(lm=TabularLM(random_rows(VOCAB, seed), VOCAB))
    request = Request(id="r", prompt=(0,), max_new_tokens=99, sampling=DRAWN)
    state = Running(request=request, tokens=[0], slot=0, drafter=drafter, drafter_state=drafter.open(request))
    sized = SizedTree(
        tree=tree,
        odds=np.array([float(odds)]),
        rates=np.array([rate]),
        verifying=node * np.arange(31.0),
        reading=reading(level),
    )
    dice = PhiloxDice(seeds=[0], steps=[0])
    return grow(drafter, sized, FixedLength(num_speculative_tokens=DEEP), [state], [DEEP], dice, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("node", [0.02, 0.1, 0.3])
def test_the_nodes_that_are_kept_bring_the_most_for_their_cost(seed, node):
    rows = random_rows(VOCAB, seed)
    chances = sorted((chance(rows, path) for path in EVERY), reverse=True)[: WHOLE.num_nodes]
    best = max(sum(chances[:n]) - node * n for n in range(1, len(chances) + 1))
    kept = paths(grown(seed, node=node))[1:]
    assert sum(chance(rows, path) - node for path in kept) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_where_nothing_costs_anything_the_tree_is_left_as_it_is(seed):
    tree = DynamicTree(width=4, num_nodes=9)
    assert paths(grown(seed, tree=tree, rate=0.0, node=9.0, level=9.0)) == paths(grown(seed, tree=tree))
    assert len(paths(grown(seed, tree=tree))) == 10


def test_a_level_that_costs_more_than_it_seems_to_bring_is_not_grown():
    depths = [int(grown(level=level).depths.max()) for level in (0.0, 0.05, 9.0)]
    assert depths[0] == DEEP
    assert depths == sorted(depths, reverse=True)
    assert depths[-1] == 1


def test_promises_that_were_broken_leave_fewer_nodes_and_no_level_has_a_chance_above_one():
    assert len(grown(node=0.1, odds=0.1).tokens) < len(grown(node=0.1).tokens)
    # One token behind each node is the target's: what all children promise is 1.
    draft = grown(odds=20.0)
    assert draft.chances is not None
    for first, end in zip(draft.first_child[:-1], draft.first_child[1:], strict=True):
        assert draft.chances[draft.links[first:end]].sum() <= 1 + 1e-9


def test_the_first_node_is_verified_whatever_it_costs():
    assert len(grown(node=9.0).tokens) == 2


def test_children_of_a_node_are_tested_together_and_those_of_a_leaf_are_not():
    tree = Step(
        request="r", num_draft_tokens=9, num_accepted_tokens=1, tokens=(5, 7), timing=Timing(), num_requests=1, depth=3
    )
    found = Counts().after([replace(tree, promised=(0.9, 0.4))])
    assert (found.tested, found.accepted) == ((1.0, 1.0, 1.0, 0.0), (1.0, 1.0, 0.0, 0.0))
    assert found.promised == (0.0, 0.9, 0.4)
    assert (found.nodes, found.levels) == (9.0, 3.0)
    leaf = Counts().after([replace(tree, promised=(0.9,), bonus=True)])
    assert leaf.tested == (1.0, 1.0, 0.0, 0.0)


def priced(node: float, level: float) -> CostTable:
    """A node of the target's forward and one that the drafter reads cost so much, of a plain step."""
    kinds = [(b, n) for b in (1, 2, 4, 8) for n in range(17)]
    rows = [StepCost(requests=b, length=n, target=1 + node * b * n, drafter=level * b * n) for b, n in kinds]
    return CostTable(rows=tuple(rows), kept=True)


def test_trees_cost_what_chains_tell():
    table = priced(0.1, 0.3)
    same = {"sampled": False, "context": 64}
    assert table.trees(3, 1.0, **same, longest=8) == pytest.approx(table.steps(3, **same, longest=8))
    assert table.trees(2, 3.0, **same, longest=4)[2, 2] == pytest.approx(table.tree(2, (3, 3), **same))
    assert table.trees(2, 3.0, **same, longest=4)[0] == pytest.approx(np.full(5, 1.0))


def llama_engine(table: CostTable, drafter: str, tree: str = "dynamic:width=4,num_nodes=12") -> Engine:
    engine = outrider.load(llama(), drafter=drafter, tree=tree, length="goodput", probe=False)
    engine.parts = replace(engine.parts, experience=Experience(table))
    return engine


def stepped(engine: Engine, temperature: float = 0.0) -> tuple[list[int], list[Step]]:
    """The tokens of one request, and its steps."""
    steps: list[Step] = []
    engine.add([5, 6, 7, 8] * 6, max_new_tokens=48, sampling=Sampling(temperature=temperature), ignore_eos=True)
    while engine.busy:
        engine.step(steps.append)
    return [token for made in steps for token in made.tokens], steps


@pytest.mark.parametrize("drafter", ["model", "suffix:min_match=1", "ngram:prompt_lookup_min=1"])
def test_an_engine_sizes_its_trees_says_what_they_promised_and_writes_what_plain_decoding_writes(draft_model, drafter):
    written = draft_model if drafter == "model" else drafter
    plain, _ = stepped(llama_engine(priced(0.0, 0.0), written).plain())
    cheap, dear = llama_engine(priced(1e-4, 1e-4), written), llama_engine(priced(0.15, 0.01), written)
    (tokens, steps), (others, fewer) = stepped(cheap), stepped(dear)
    assert tokens == plain
    assert others == plain
    assert max(made.num_draft_tokens for made in steps) == 12
    assert sum(made.num_draft_tokens for made in fewer) < sum(made.num_draft_tokens for made in steps)
    for made in [*steps, *fewer]:
        tested = made.num_accepted_tokens + (not made.bonus)
        assert len(made.promised) == (tested if made.num_draft_tokens else 0)
        assert all(0 < promise <= 1 for promise in made.promised)
        assert made.num_accepted_tokens <= made.depth <= made.num_draft_tokens
    pool = cheap.parts.experience.greedy
    assert 0 < sum(pool.promised) <= sum(pool.tested[1:])
    assert pool.nodes >= pool.levels > 0


def test_trees_of_several_requests_are_those_of_each_alone_where_costs_do_not_grow(draft_model):
    # Above temperature 0 a seed repeats a text whatever is drafted beside it.
    settings = [Sampling(temperature=1.0, seed=seed) for seed in range(3)]
    prompts = [[5, 6, 7, 5, 6], [9, 8, 9], [1, 2, 3, 1]]

    def texts(engine: Engine) -> list[list[int]]:
        made = engine.generate(prompts, max_new_tokens=24, sampling=settings, ignore_eos=True)
        return [[*output.tokens, output.num_steps, output.num_draft_tokens] for output in made]

    first = texts(llama_engine(priced(0.02, 0.02), draft_model))
    used = llama_engine(priced(0.02, 0.02), draft_model)
    used.parts.experience.sampled = Counts(tested=(300.0,) * 9, accepted=(300.0, *[1.0] * 8), promised=(0, 250.0))
    assert texts(used) == first, "a request with a seed reads nothing pooled"
    assert sum(numbers[-1] for numbers in first) > 0


@dataclass(frozen=True, kw_only=True)
class Noting(GoodputLength):
    """Notes the sizes of its trees."""

    depths: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def update(self, state: object, step: Step) -> Counts:
        self.depths.append(step.depth)
        self.sizes.append(step.num_draft_tokens)
        return super().update(state, step)


def doubtful() -> Experience:
    """By which drafts are about as fast as plain steps."""
    found = Experience(CostTable(rows=priced(0.12, 0.25).rows, kept=True))
    found.sampled = Counts(tested=(6.0, 6.0), accepted=(6.0, 3.0), promised=(0.0, 3.0))
    return found


@pytest.mark.parametrize("rule", each(judges_of("chosen tree")))
@pytest.mark.parametrize("drafter", [None, NgramDrafter(prompt_lookup_min=1), SuffixDrafter(min_match=1)])
def test_sized_trees_keep_the_law_over_steps_whose_sizes_follow_acceptance(rule, drafter):
    policy, tree = Noting(most=2), DynamicTree(width=2, num_nodes=4)
    parts = replace(tables(2, rule, policy, seed=5, tree=tree, drafter=drafter), experience=doubtful())
    [found] = joint_law(parts, [[0, 1, 0, 0, 1]], num_steps=2)
    assert found.error < BOUND
    assert sum(found.emitted.values()) == pytest.approx(1, abs=1e-12)
    assert found.accepted > 0
    assert len(set(policy.sizes)) > 1, "sizes differ"


@pytest.mark.parametrize("rule", judges_of("chosen tree"))
def test_two_requests_whose_trees_are_sized_together_keep_their_laws(rule):
    policy, tree = Noting(most=1), DynamicTree(width=2, num_nodes=2)
    parts = replace(tables(2, verifier(rule), policy, seed=6, tree=tree), experience=doubtful())
    for found in joint_law(parts, [[0], [1, 1]], num_steps=2):
        assert found.error < BOUND
    assert {1, 2} <= set(policy.sizes)


def test_the_law_of_an_engines_own_parts_is_proven():
    assert law_error(tables(3, verifier("match"), GoodputLength(), tree=DynamicTree(width=2, num_nodes=4))) < BOUND


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "opt"}, "length 'goodput' is for chains and tree 'dynamic'; use length 'fixed' with another tree"),
        ({"tree": "gumbel:branching=2x2"}, "length 'goodput' is for chains and tree 'dynamic'"),
        ({"tree": "dynamic", "verifier": "recursive"}, "does not keep the target's law on a chosen tree"),
        ({"tree": "dynamic", "length": "adaedl"}, "length 'adaedl' is for chains; use length 'fixed' with a branching"),
        ({"tree": "dynamic", "drafter": "union"}, "is for chains; use length 'fixed' with drafter 'union'"),
        ({"tree": "dynamic", "drafter": "first"}, "is for chains; use length 'fixed' with a branching tree"),
    ],
)
def test_what_cannot_be_sized_is_refused_in_one_sentence(draft_model, options, sentence):
    drafter = options.get("drafter")
    written = draft_model if drafter is None else f"{drafter}:suffix,{draft_model}"
    with pytest.raises(InputError, match=sentence):
        outrider.load(llama(), **{"length": "goodput", "probe": False} | options | {"drafter": written})


def test_costs_are_measured_with_chains(draft_model, monkeypatch):
    parts = outrider.load(llama(), drafter=draft_model, tree="dynamic:num_nodes=9", length="goodput", probe=False).parts
    drafted, steps = set[int](), StepDecoding.step

    def noted(*given: Any, **named: Any) -> list[Step]:
        made = steps(*given, **named)
        drafted.update(step.num_draft_tokens for step in made)
        return made

    monkeypatch.setattr(StepDecoding, "step", noted)
    monkeypatch.setattr(probe, "LENGTHS", (0, 2))
    monkeypatch.setattr(probe, "SAMPLED", ())
    assert probe.measure(parts, max_requests=1, seconds=0.1) is not None
    assert drafted == {0, 2}
