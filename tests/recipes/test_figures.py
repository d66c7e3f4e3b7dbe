"""Tokens per step from counted rows: easy texts cancel, chains are exact, and real runs agree with their texts."""

import numpy as np
import pytest

from outrider.bench.evidence import IntervalEstimate, Row
from outrider.bench.folder import folder
from outrider.theory.coverage import coverage
from recipes.inquiry.figures import Figures
from recipes.inquiry.texts import log_ratios
from recipes.inquiry.trial import Bench, Method, Setting
from recipes.runs import Conditions, PromptBatch, on_engine

TREE = Method(name="tree", tree="gumbel:branching=2x1", verifier="traversal", length="fixed:2", deepest=4, control=2)
TOLD = Method(name="told", tree="gumbel:branching=2x1", verifier="recursive", length="fixed:2", deepest=4, control=2)
CHAINS = [
    Method(name=f"{rule} {n}", verifier=rule, length=f"fixed:{n}", deepest=4)
    for rule in ("token", "block")
    for n in (2, 4)
]


def row(method: Method, each: list[Row], seed: int = 0) -> Row:
    return {"method": method.name, "seed": seed, "seconds": 1.0, "each": each}


def counted(prompt: str, steps: float, chain_steps: float, tokens: float = 60.0) -> Row:
    chains = {TREE.held_against.name: [chain_steps, tokens], CHAINS[0].chain.name: [2 * chain_steps, tokens]}
    found = {"prompt": prompt, "category": "c", "free_tokens": tokens, "free_steps": steps, "free_drafted": 3 * steps}
    return {**found, "chains": chains}


def test_texts_that_are_easy_for_one_method_alone_cancel():
    other = Method(name="other", tree="gumbel:branching=2x1", verifier="traversal", deepest=4, control=2)
    dice = np.random.default_rng(0)
    rows = []
    for prompt in range(12):
        for method, share in ((TREE, 0.8), (other, 0.7)):
            ease = dice.uniform(10, 40)
            rows.append(row(method, [counted(str(prompt), share * ease, ease)]))
    figures = Figures([TREE, other, *CHAINS], rows)
    quotient = IntervalEstimate.of(figures.efficiency("other") / figures.efficiency("tree"))
    assert quotient.value == pytest.approx(0.8 / 0.7)
    assert quotient.high - quotient.low < 1e-9
    chain = figures.efficiency("token 2")
    assert figures.efficiency("tree") / chain == pytest.approx(2 / 0.8 * np.ones(len(chain)))
    assert figures.drafted("tree")[0] == pytest.approx(3)
    assert figures.drafted("token 2")[0] == 2
    assert figures.acceptance("token 2") == pytest.approx((chain - 1) / 2)


def test_the_best_of_several_is_chosen_on_the_other_half():
    ways = [Method(name=name, tree="gumbel:branching=2x1", verifier="recursive", deepest=4, control=2) for name in "ab"]
    rows = []
    for prompt in range(10):
        rows += [row(ways[0], [counted(str(prompt), 10 if prompt % 2 else 30, 20)])]
        rows += [row(ways[1], [counted(str(prompt), 15, 20)])]
    figures = Figures(ways, rows)
    # `a` is best on the odd prompts, where `b` would have been chosen: it is better on the even ones.
    assert figures.best_efficiency("ab")[0] == pytest.approx(2 * 60 / (30 + 15))
    assert figures.cost("a") == 10
    assert figures.cost("b", "a") == 20


@pytest.fixture(scope="module")
def bench():
    """The embedded pair in float32, with room for a few requests."""
    return Bench(Setting(num_prompts=4, max_new_tokens=24, seeds=2, threads=1, dtype="float32"), max_slots=4)


def test_greedy_chains_take_the_steps_that_their_texts_tell(bench):
    """At temperature 0 nothing is random: a run's own count is the expectation."""
    method = Method(name="greedy", length="fixed:3", temperature=0.0, deepest=3)
    job = PromptBatch(questions=tuple(bench.questions(4)))
    made = on_engine(bench.engine(method), job, Conditions(max_new_tokens=24, temperature=0.0))
    parts = bench.first.parts
    for question, output in zip(job.questions, made.outputs, strict=True):
        ratios = log_ratios(parts.target, parts.drafter.lm, question.tokens, output.tokens, 0.0)
        starts = np.cumsum([0, *(len(step.tokens) for step in output.steps)])
        ended = output.tokens[-1] in bench.first.eos_ids
        free = int((starts[:-1] < 21).sum())
        found = coverage(ratios, 3, "block", before=21, ended=ended)
        assert (found.steps, found.tokens) == pytest.approx((free, starts[free]))


def test_counting_runs_trees_and_reads_chains_off_their_texts(bench, tmp_path):
    with folder(tmp_path, "test", {}) as place:
        jobs = bench.batches(bench.questions(4))
        rows = bench.count(place, [TREE, *CHAINS], jobs)
    assert {made["method"] for made in rows} == {"tree"}
    assert len(rows) == 2
    names = {method.chain.name for method in CHAINS} | {method.held_against.name for method in [TREE, *CHAINS]}
    for made in rows:
        assert [each["prompt"] for each in made["each"]] == [question.id for question in jobs[0].questions]
        for each in made["each"]:
            assert set(each["chains"]) == names
            assert each["tokens"] <= 24
            assert each["steps"] + each["accepted"] >= each["tokens"]
    figures = Figures([TREE, *CHAINS], rows)
    token, block = (figures.efficiency(f"{rule} 4")[0] for rule in ("token", "block"))
    assert 1 <= token <= block
    assert figures.efficiency("token 2")[0] <= token


def test_trees_whose_steps_texts_tell_are_not_run_and_are_held_against_the_same_chains(bench, tmp_path):
    iid = Method(name="iid", tree="iid:num_paths=2", verifier="kseq", length="fixed:2", deepest=4, control=2)
    with folder(tmp_path, "test", {}) as place:
        jobs = bench.batches(bench.questions(4))
        rows = bench.count(place, [TOLD, iid, *CHAINS], jobs)
    assert {made["method"] for made in rows} == {"told", "iid"}
    for made in rows:
        for each in made["each"]:
            assert each["free_steps"] <= each["free_tokens"] <= each["tokens"] + 1e-9
            steps, tokens = each["chains"][TOLD.held_against.name]
            assert steps <= tokens <= each["tokens"] + 1e-9
    by = {(made["method"], made["seed"]): [each["chains"] for each in made["each"]] for made in rows}
    assert all(by["told", seed] == by["iid", seed] for seed in range(2))
    assert Figures([TOLD, iid, *CHAINS], rows).efficiency("told")[0] >= 1


def test_methods_that_are_chains_know_it():
    assert TREE.chain is None
    assert CHAINS[3].chain.name == "block 4, room 4"
    assert Method(name="", length="svip:8").chain is None
    assert Method(name="", verifier="match").chain is None
    assert Method(name="", temperature=0.0).repeats
    assert not Method(name="", temperature=0.0, tree="gumbel:branching=2x1").repeats
    assert Method(name="", temperature=0.0, tree="lattice:num_nodes=4").repeats
    assert not Method(name="").repeats
