"""Each batched verifier equals its naive twin, request by request, on ragged batches."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import catalog
from outrider.dice import Draws, PhiloxDice
from outrider.types import InputError
from tests.drafts import chains
from tests.verifiers import naive


def number(dice: PhiloxDice, request: int, slot: int, purpose: str) -> float:
    """The dice's own random number, found by where coins of rising probability begin to land."""
    return dice._uniform(request, slot, purpose)


@pytest.mark.parametrize("name", list(catalog.rows("verifier")))
@given(seed=st.integers(0, 10**6), lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5), chosen=st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_batch_decides_what_the_twin_decides(name, seed, lengths, chosen):
    random = np.random.default_rng(seed)
    vocab = 4
    drafted = [random.integers(0, vocab, size=n).tolist() for n in lengths]
    q = random.dirichlet(np.full(vocab, 0.7), size=sum(lengths)) + 1e-9
    p = random.dirichlet(np.full(vocab, 0.7), size=sum(lengths) + len(lengths))
    if chosen:
        q = np.eye(vocab)[[x for chain in drafted for x in chain]].reshape(-1, vocab)
    q /= q.sum(-1, keepdims=True)
    drafted_any = sum(lengths) > 0
    draft = chains(drafted, None if chosen or not drafted_any else torch.from_numpy(q))
    dice = PhiloxDice(seeds=list(range(len(lengths))), steps=[seed] * len(lengths))
    verdict = catalog.rows("verifier")[name].make().verify(draft, torch.from_numpy(p), dice)
    row = drawn = 0
    for i, chain in enumerate(drafted):
        uniforms = naive.Uniforms(
            accept=[number(dice, i, k, "accept") for k in range(len(chain))],
            recover=[number(dice, i, k, "recover") for k in range(len(chain) + 1)],
        )
        own_p, own_q = p[row : row + len(chain) + 1], q[drawn : drawn + len(chain)]
        expected = getattr(naive, name)(own_p, own_q, chain, uniforms)
        count = int(verdict.num_accepted[i])
        path = verdict.paths[i, :count]
        assert [*draft.tokens[path].tolist(), int(verdict.next_tokens[i])] == expected
        assert path.tolist() == list(range(row + 1, row + 1 + count))
        assert (verdict.paths[i, count:] == -1).all()
        row, drawn = row + len(chain) + 1, drawn + len(chain)


@pytest.mark.parametrize("name", ["token", "block"])
def test_a_chain_verifier_refuses_a_branching_draft(name):
    draft = chains([[1, 2]], None)
    branching = type(draft)(
        **{
            **vars(draft),
            "parents": np.array([-1, 0, 0]),
            "first_child": np.array([0, 2, 2, 2]),
            "links": np.array([1, 2]),
        }
    )
    dice = PhiloxDice(seeds=[0], steps=[0])
    with pytest.raises(InputError, match="branching draft; use match"):
        catalog.rows("verifier")[name].make().verify(branching, torch.full((3, 4), 0.25), dice)


def test_a_zero_probability_token_is_never_accepted_even_by_a_zero_uniform():
    class Zeros(PhiloxDice):
        def _uniform(self, request, slot, purpose):
            return 0.0

    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    q = torch.tensor([[1.0, 0.0]])
    for name in ("token", "block", "match"):
        verdict = catalog.rows("verifier")[name].make().verify(chains([[0]], q), p, Zeros(seeds=[0], steps=[0]))
        assert int(verdict.num_accepted[0]) == 0
        assert int(verdict.next_tokens[0]) == 1


def test_match_walks_a_tree():
    draft = chains([[1, 2]], None)
    tree = type(draft)(
        **{
            **vars(draft),
            "parents": np.array([-1, 0, 0]),
            "first_child": np.array([0, 2, 2, 2]),
            "links": np.array([1, 2]),
        }
    )
    p = torch.eye(4)[[2, 0, 3]]
    verdict = catalog.rows("verifier")["match"].make().verify(tree, p, PhiloxDice(seeds=[0], steps=[0]))
    assert verdict.paths.tolist()[0][:1] == [2]
    assert int(verdict.num_accepted[0]) == 1
    assert int(verdict.next_tokens[0]) == 3


def test_draws_of_one_request_do_not_depend_on_the_batch():
    weights = torch.rand(1, 50, dtype=torch.float64)
    for purpose in ("draft", "accept", "recover"):
        alone = PhiloxDice(seeds=[3], steps=[9]).pick(
            weights, Draws(requests=np.array([0]), slots=np.array([4]), purpose=purpose)
        )
        beside = PhiloxDice(seeds=[8, 3], steps=[1, 9]).pick(
            weights.expand(2, -1), Draws(requests=np.array([0, 1]), slots=np.array([40, 4]), purpose=purpose)
        )
        assert int(alone[0]) == int(beside[1])
