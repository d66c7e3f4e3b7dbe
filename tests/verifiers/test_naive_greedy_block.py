"""The greedy block rule keeps the law over several steps, and only with what it carries from one to the next."""

from collections import defaultdict

import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.verifiers import naive_trees
from tests.verifiers.choices import Choices, outcomes
from tests.verifiers.draft_law import Model, Prefix, drawn, fixed, grown, law, likelihood, models
from tests.verifiers.naive_greedy_block import Carried, greedy_block, greedy_block_once
from tests.verifiers.naive_trees import Tree

BOUND = 1e-12
TOY_P, TOY_Q = fixed([1 / 3, 2 / 3]), fixed([2 / 3, 1 / 3])


def after_prefix(model: Model, prefix: Prefix) -> Model:
    return lambda tail: model((*prefix, *tail))


State = tuple[Prefix, Carried]


def iterate(p: Model, q: Model, gamma: int, times: int, carried: Carried = ()) -> dict[State, float]:
    """Emitted tokens and modifications carried on after some iterations of the greedy block rule."""
    states: dict[State, float] = {((), carried): 1.0}
    for _ in range(times):
        after: dict[State, float] = defaultdict(float)
        for (prefix, owed), mass in states.items():
            for tree, chance in grown(after_prefix(p, prefix), after_prefix(q, prefix), drawn(1), gamma):

                def step(dice: Choices, tree: Tree = tree, owed: Carried = owed) -> State:
                    tokens, later = greedy_block(tree, dice, owed)
                    return tuple(tokens), later

                for (tokens, later), found in outcomes(step).items():
                    after[(*prefix, *tokens), later] += mass * chance * found
        states = after
    return states


def test_the_greedy_block_rule_wins_one_iteration_and_loses_three():
    committed = [
        sum(mass * len(tokens) for (tokens, _), mass in iterate(TOY_P, TOY_Q, 2, times).items()) for times in (1, 2, 3)
    ]
    assert_allclose(committed, [7 / 3, 40 / 9, 59 / 9])
    block = 1 + law(grown(TOY_P, TOY_Q, drawn(1), 2), naive_trees.block).accepted
    assert_allclose([block, 2 * block, 3 * block], [2.2222, 4.4444, 6.6667], atol=5e-5)


@pytest.mark.parametrize("seed", [3, 103])
@pytest.mark.parametrize(("vocab", "gamma", "times"), [(3, 2, 2), (2, 3, 2), (2, 2, 3), (3, 3, 1)])
def test_the_greedy_block_rule_keeps_the_law_when_it_carries_its_debt_over(vocab, gamma, times, seed):
    """What is still owed at the end is paid by the modified target, which continues the output."""
    p, q = models(vocab, seed)
    exact: dict[Prefix, float] = defaultdict(float)
    longest = times * (gamma + 1)
    for (tokens, carried), mass in iterate(p, q, gamma, times).items():
        for longer, chance in pay(p, q, tokens, carried, longest):
            exact[longer] += mass * chance
    assert_allclose(sum(exact.values()), 1, atol=BOUND)
    assert max(abs(mass - likelihood(p, (), tokens)) for tokens, mass in exact.items()) < BOUND


@pytest.mark.parametrize("carried", [((1.5, 1),), ((1.4, 2), (1.2, 2)), ((1.3, 1), (1.6, 2), (np.inf, 2))])
def test_a_block_pays_several_debts_oldest_first(carried):
    p, q = models(3, 3)
    exact: dict[Prefix, float] = defaultdict(float)
    for (tokens, later), mass in iterate(p, q, 3, 1, carried).items():
        for longer, chance in pay(p, q, tokens, later, 4):
            exact[longer] += mass * chance
    expected = dict(pay(p, q, (), carried, 4))
    assert max(abs(mass - expected.get(tokens, 0.0)) for tokens, mass in exact.items()) < BOUND
    assert_allclose(sum(exact.values()), 1, atol=BOUND)


def pay(p: Model, q: Model, tokens: Prefix, carried: Carried, length: int) -> list[tuple[Prefix, float]]:
    """All continuations up to a length under the modified target, written apart from the rule."""
    if len(tokens) == length:
        return [(tokens, 1.0)]
    row, stages = p(tokens), []
    for weight, remaining in carried:
        stages.append(row)
        if remaining > 0 and np.isfinite(weight):
            row = np.maximum(weight * row - q(tokens), 0)
            row = row / row.sum()
    found = []
    for x in np.flatnonzero(row).tolist():
        below = float(q(tokens)[x])
        later = tuple(
            (float(weight * stage[x]) / below if below > 0 else np.inf, remaining - 1)
            for (weight, remaining), stage in zip(carried, stages, strict=True)
        )
        found += [(longer, float(row[x]) * chance) for longer, chance in pay(p, q, (*tokens, x), later, length)]
    return found


def test_the_greedy_block_rule_without_its_debt_fails_the_law():
    p, q = models(3, 3)
    chain = grown(p, q, drawn(1), 3)
    assert law(chain, greedy_block_once).error(p) > 1e-3
