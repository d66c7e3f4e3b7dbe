"""The law of drafters that read features: whole runs of engines over tables, every outcome of every draw."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from outrider.core.types import Request, Running
from outrider.drafters.protocol import Drafter, Observed
from outrider.engine.engine import Engine
from outrider.lm.tabular import TabularLM, random_features
from outrider.proof.runs import law_of_runs
from tests.proof.test_head_law import ROWS, request, rows
from tests.world.feature_tables import FeatureTable
from tests.world.parts import parts_of

BOUND = 1e-12
CELLS = (
    ("chain", "token", 2),
    ("chain", "block", 2),
    ("gumbel:branching=2x1", "recursive", 2),
    ("gumbel:branching=2x1", "traversal", 2),
    ("iid:num_paths=2", "kseq", 1),
    ("dynamic:width=2,num_nodes=3", "match", 2),
)


def engine(tree: str, verifier: str, drafter: Drafter | None = None, *, gamma: int = 2, warm: bool = False) -> Engine:
    parts = parts_of(
        TabularLM(ROWS, 2, feature=random_features(3, seed=4)),
        drafter or FeatureTable(vocab_size=2),
        tree=tree,
        verifier=verifier,
        length=gamma,
    )
    return Engine(parts, max_slots=2, keep_warm=warm)


@pytest.mark.parametrize(("tree", "verifier", "gamma"), CELLS)
def test_a_drafter_that_reads_features_keeps_the_law(tree, verifier, gamma):
    busy, these = engine(tree, verifier, gamma=gamma), [request(0, 1, 1)]
    found = law_of_runs(busy, these, rows(these))
    assert found.error < BOUND
    assert found.accepted > 0


def test_two_requests_of_a_batch_keep_the_law_together():
    busy, these = engine("chain", "block", gamma=1), [request(0, 1, tokens=3), request(1, 1, 0, tokens=2)]
    found = law_of_runs(busy, these, rows(these))
    assert found.error < BOUND
    assert found.accepted > 0


def test_texts_that_are_reused_from_run_to_run_keep_the_law():
    busy = engine("chain", "block", gamma=1, warm=True)
    these = [request(0, 1, 1, 0, 1, 1, tokens=3), request(1, 1, 0, 0, 1, 0, tokens=2)]
    # Every run begins with texts that begin as the prompts do, so that all runs make the same draws.
    busy.generate([list(each.prompt) for each in these], max_new_tokens=3)
    found = law_of_runs(busy, these, rows(these))
    assert found.error < BOUND
    assert found.accepted > 0
    assert busy.num_reused_tokens == 2 * 5 * found.num_runs


@dataclass(frozen=True, kw_only=True)
class Failing(FeatureTable):
    """Raises in every run after the first step, when it has taken in what it was shown."""

    failed: set[str] = field(default_factory=set)

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        super().observe(states, observed)
        ids = {state.request.id for state in states if state.num_steps == 1}
        if len(ids) == 2 and not ids <= self.failed:
            self.failed.update(ids)
            raise RuntimeError("once in every run")


def test_steps_that_are_taken_back_keep_the_law():
    drafter = Failing(vocab_size=2)
    busy, these = engine("chain", "block", drafter, gamma=1), [request(0, 1, tokens=3), request(1, 0, tokens=2)]
    found = law_of_runs(busy, these, rows(these))
    assert found.error < BOUND
    assert found.accepted > 0
    assert len(drafter.failed) == 2 * found.num_runs


@dataclass(frozen=True, kw_only=True)
class Relieved(FeatureTable):
    """Lets another drafter draft for the next request, whenever it gets one."""

    swap: Callable[["Relieved"], None]

    def open(self, request: Request) -> object:
        self.swap(self)
        return super().open(request)

    def reuse(self, state: object, request: Request, length: int) -> object:
        self.swap(self)
        return super().reuse(state, request, length)


def test_two_drafters_that_relieve_each_other_keep_the_law_in_one_batch():
    pair: list[Relieved] = []
    swaps, mixed = [], []

    def swap(drafter: Relieved) -> None:
        busy.swap(pair[pair.index(drafter) - 1])
        swaps.append(1)

    pair += [Relieved(vocab_size=2, seed=seed, swap=swap) for seed in (1, 2)]
    busy, these = engine("chain", "token", pair[0], gamma=1), [request(0, 1, tokens=3), request(1, 1, 0, tokens=2)]
    busy.watch = lambda made: mixed.append(len({id(state.drafter) for state in made.states}))
    found = law_of_runs(busy, these, rows(these))
    assert found.error < BOUND
    assert found.accepted > 0
    assert max(mixed) == 2
    assert len(swaps) == 2 * found.num_runs


@dataclass(frozen=True, kw_only=True)
class LooksAtItsDraw(FeatureTable):
    """Hands over a row that depends on the token that was drawn from another one."""

    def expand(self, states, frontier):
        for owner in frontier.owners.tolist():
            states[owner].drafter_state.drafts += 1
        return super().expand(states, frontier)

    def commit(self, states, paths):
        # What a draft turned to is remembered where it was accepted, and forgotten where it was not: that is allowed.
        for state, path in zip(states, paths, strict=True):
            state.drafter_state.drafts += len(path)


def test_rows_that_change_with_what_was_accepted_keep_the_law():
    busy, these = engine("chain", "block", LooksAtItsDraw(vocab_size=2)), [request(0, 1, 1)]
    assert law_of_runs(busy, these, rows(these)).error < BOUND


def test_greedy_block_over_rows_that_are_not_context_pure_is_caught():
    busy, these = engine("chain", "greedy_block"), [request(0, 1, 1, tokens=5)]
    assert law_of_runs(busy, these, rows(these)).error > 1e-3
