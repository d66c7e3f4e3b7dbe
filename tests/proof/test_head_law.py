"""The law of trained heads on tables: steps with every verifier, and whole runs."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from outrider import catalog
from outrider.core.types import Request, Sampling
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lm.tabular import TABLE_FEATURES, TabularLM, random_features, random_rows
from outrider.lm.target_info import TargetInfo
from outrider.proof.rule import law_error
from outrider.proof.runs import law_of_runs
from tests.world.heads import HEADS, LAYERS, head
from tests.world.models import target
from tests.world.tables import tables
from tests.world.verifiers import verifier

CELLS = (("chain", "block"), ("gumbel:branching=2x1", "traversal"), ("dynamic:width=2,num_nodes=3", "match"))
KINDS = (*HEADS, *LAYERS)
ROWS = random_rows(2, seed=3)


def on_tables(kind: str, vocab: int = 2) -> Drafter:
    return head(kind, TargetInfo.of(target(1), None)).on_tables(vocab, seed=1)


def small(kind: str | Drafter, tree: str, rule: str, gamma: int = 2) -> Parts:
    drafter = on_tables(kind) if isinstance(kind, str) else kind
    parts = tables(2, verifier(rule), gamma, drafter=drafter, tree=catalog.make("tree", tree))
    return replace(parts, target=TabularLM(ROWS, 2, feature=random_features(TABLE_FEATURES, seed=4)))


def request(*prompt: int, tokens: int = 4) -> Request:
    return Request(id="", prompt=prompt, max_new_tokens=tokens, sampling=Sampling(seed=0))


def rows(these: Sequence[Request]) -> list[Callable[[tuple[int, ...]], object]]:
    return [lambda output, prompt=each.prompt: ROWS((*prompt, *output)) for each in these]


@pytest.mark.parametrize(("tree", "rule"), CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_runs_keep_the_law(kind, tree, rule):
    these = [request(0, 1, 1)]
    found = law_of_runs(Engine(small(kind, tree, rule), max_slots=2, keep_warm=False), these, rows(these))
    assert found.error < 1e-12
    assert found.accepted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_two_requests_of_a_batch_keep_the_law_together(kind):
    these = [request(0, 1, tokens=3), request(1, 1, 0, tokens=2)]
    found = law_of_runs(Engine(small(kind, "chain", "block", 1), max_slots=2, keep_warm=False), these, rows(these))
    assert found.error < 1e-12
    assert found.accepted > 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_enumerates_a_head(kind):
    # Beside lengths that are chosen, it enumerates drafts of a fixed length, as deep as there is room.
    parts = tables(2, verifier("block"), drafter=on_tables(kind), length=catalog.make("length", "goodput"))
    assert law_error(parts) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_gate_catches_a_biased_rule_behind_a_head(kind):
    parts = tables(2, verifier("lenient"), drafter=on_tables(kind), length=FixedLength(num_speculative_tokens=3))
    assert law_error(parts) > 1e-3
