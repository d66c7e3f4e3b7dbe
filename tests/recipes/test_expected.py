"""What rules are expected to accept: exact for every draft; in the mean over drafts what enumerated steps accept."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Float
from torch import Tensor

from outrider import catalog
from outrider.core.dice import Dice
from outrider.core.types import Draft, Request, Running, Sampling, Verdict
from outrider.decoding.protocol import Parts
from outrider.decoding.step import StepDecoding
from outrider.drafters.model import ModelDrafter
from outrider.lengths.fixed import FixedLength
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import EnumeratingDice, World, law
from outrider.verifiers.protocol import Verifier
from recipes.inquiry.expected import acceptance, expected_accepted, expected_tokens
from tests.verifiers.test_twins import VOCAB, drafted

PAIRS = [
    ("chain", "token"),
    ("chain", "block"),
    ("chain", "match"),
    ("iid:num_paths=3", "recursive"),
    ("iid:num_paths=3", "kseq"),
    ("iid:num_paths=3,dedup=true", "recursive"),
    ("gumbel:branching=3x2x1", "recursive"),
    ("gumbel:branching=3x2x1", "traversal"),
    ("gumbel:branching=3x2x1", "match"),
    ("beam:width=3", "recursive"),
    ("beam:width=3", "traversal"),
    ("dynamic:width=2,num_nodes=6", "match"),
]
"""Trees with the rules whose chances are known."""


def rule_of(name: str) -> Verifier:
    return catalog.rows("verifier")[name].make()


def over_coins(rule: Verifier, draft: Draft, rows: Float[Tensor, "nodes vocab"]) -> list[tuple[float, Verdict]]:
    """Every verdict on a draft of one request, with its probability."""
    found, queue = [], [{}]
    while queue:
        world = World(script=queue.pop())
        found.append((rule.verify(draft, rows, EnumeratingDice([world])), world))
        queue += world.others
    return [(world.probability, verdict) for verdict, world in found]


@pytest.mark.parametrize("tree, name", [pair for pair in PAIRS if pair[1] != "block"])
@given(seed=st.integers(0, 10**6), room=st.integers(0, 3), sharp=st.sampled_from([0.05, 0.5]))
@settings(max_examples=8, deadline=None)
def test_chances_of_nodes_are_those_of_all_coins(tree, name, seed, room, sharp):
    draft, _ = drafted(tree, [room], seed)
    rows = torch.from_numpy(np.random.default_rng(seed).dirichlet(np.full(VOCAB, sharp), size=len(draft.parents)))
    exact, tokens, ends = np.zeros(len(draft.parents)), 0.0, frozenset({1})
    for probability, verdict in over_coins(rule_of(name), draft, rows):
        path = verdict.paths[0, : verdict.num_accepted[0]]
        exact[[0, *path.tolist()]] += probability
        said = [*draft.tokens[torch.from_numpy(path)].tolist(), int(verdict.next_tokens[0])]
        tokens += probability * next((i + 1 for i, token in enumerate(said) if token in ends), len(said))
    found = acceptance(rule_of(name), draft, rows)
    assert found == pytest.approx(exact, abs=1e-12)
    assert expected_tokens(draft, found, ends) == pytest.approx([tokens], abs=1e-12)


@pytest.mark.parametrize("tree, name", PAIRS)
def test_requests_of_a_batch_are_judged_apart(tree, name):
    draft, _ = drafted(tree, [3, 1, 0, 2], 3)
    rows = torch.from_numpy(np.random.default_rng(3).dirichlet(np.full(VOCAB, 0.5), size=len(draft.parents)))
    together = acceptance(rule_of(name), draft, rows)
    assert len(expected_accepted(draft, together)) == 4
    for request, room in enumerate([3, 1, 0, 2]):
        # A request's draws are its own, whatever else is in the batch.
        own = slice(draft.offsets[request], draft.offsets[request + 1])
        rooms = [0] * request + [room]
        alone, _ = drafted(tree, rooms, 3)
        last = slice(alone.offsets[request], alone.offsets[request + 1])
        padded = torch.full((len(alone.parents), VOCAB), 1 / VOCAB, dtype=torch.float64)
        padded[last] = rows[own]
        assert acceptance(rule_of(name), alone, padded)[last] == pytest.approx(together[own], abs=1e-12)


ENDS = frozenset({1})


@dataclass(frozen=True, kw_only=True)
class Noting:
    """A rule that keeps how many tokens it is expected to accept and to emit."""

    rule: Verifier
    seen: list[tuple[float, float]] = field(default_factory=list)

    def verify(self, draft: Draft, target_rows: Float[Tensor, "nodes vocab"], dice: Dice) -> Verdict:
        chances = acceptance(self.rule, draft, target_rows)
        accepted, tokens = expected_accepted(draft, chances), expected_tokens(draft, chances, ENDS)
        self.seen.append((float(accepted[0]), float(tokens[0])))
        return self.rule.verify(draft, target_rows, dice)


@pytest.mark.parametrize("tree, name", [pair for pair in PAIRS if not pair[0].startswith("beam")])
def test_means_over_drafts_are_what_enumerated_steps_accept_and_emit(tree, name):
    # One rule judges nodes by what hangs below them.
    branching = "2x2" if name == "traversal" else "2x1"
    tree = tree.replace("num_paths=3", "num_paths=2").replace("3x2x1", branching)
    noting = Noting(rule=rule_of(name))
    parts = Parts(
        target=TabularLM(random_rows(3, 1), 3),
        drafter=ModelDrafter(lm=TabularLM(random_rows(3, 2), 3)),
        tree=catalog.make("tree", tree),
        verifier=noting,
        length=FixedLength(num_speculative_tokens=2),
        decoding=StepDecoding(),
    )
    request = Request(id="law", prompt=(0,), max_new_tokens=1 << 20, sampling=Sampling(), eos_ids=ENDS)
    expected, exact, queue = np.zeros(2), np.zeros(2), [{}]
    while queue:
        world = World(script=queue.pop())
        slot = parts.target.open()
        state = Running(
            request=request,
            tokens=[0],
            slot=slot,
            drafter=parts.drafter,
            drafter_state=parts.drafter.open(request),
        )
        [made] = parts.decoding.step(parts, [state], dice=EnumeratingDice([world]))
        parts.target.release(slot)
        expected += world.probability * np.array(noting.seen[-1])
        exact += world.probability * np.array([made.num_accepted_tokens, len(made.tokens)])
        queue += world.others
    assert expected == pytest.approx(exact, abs=1e-12)
    plain = replace(parts, verifier=noting.rule)
    assert exact[0] == pytest.approx(law(plain, [0], 1).accepted, abs=1e-12)


def test_a_rule_that_is_not_known_has_no_chances():
    draft, _ = drafted("top_plus_one:width=3", [2], 0)
    rows = torch.full((len(draft.parents), VOCAB), 1 / VOCAB)
    assert acceptance(rule_of("top_plus_one"), draft, rows) is None
