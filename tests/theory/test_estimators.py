"""The estimators from one trace: ordered in every step, and exact in expectation."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from jaxtyping import Float

from outrider import InputError
from outrider.lm.tabular import Row, random_rows
from outrider.proof.enumerate import law
from outrider.theory.estimators import ExpectedAccepted, expected_accepted
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.tables import with_rows


def along(row: Row, vocab: int, gamma: int) -> Float[np.ndarray, "chains gamma"]:
    """Probability of every token of every chain of `gamma` tokens after the prompt [0]."""
    chains = product(range(vocab), repeat=gamma)
    return np.array([[row((0, *chain[:i]))[chain[i]] for i in range(gamma)] for chain in chains])


def expectations(p: Float[np.ndarray, "chains gamma"], q: Float[np.ndarray, "chains gamma"]) -> list[float]:
    """Means over all chains that the draft rows can draw, each with its probability."""
    drawn = (q > 0).all(1)
    with np.errstate(divide="ignore"):
        found = expected_accepted(np.log(p[drawn] / q[drawn]))
    mass = q[drawn].prod(1)
    return [float(mass @ side) for side in (found.token, found.block, found.bound)]


def enumerated(target: Row, draft: Row, vocab: int, gamma: int, verifier: object) -> float:
    """Expected accepted tokens of the production verifier."""
    return law(with_rows(target, draft, vocab, verifier, gamma), [0], 1).accepted


@pytest.mark.parametrize("gamma", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_expectations_equal_the_enumerated_verifiers_and_the_overlap_of_the_joint_laws(gamma, seed):
    target, draft = random_rows(3, seed), random_rows(3, seed + 50)
    token, block, bound = expectations(along(target, 3, gamma), along(draft, 3, gamma))
    assert token == pytest.approx(enumerated(target, draft, 3, gamma, TokenVerifier()), abs=1e-12)
    assert block == pytest.approx(enumerated(target, draft, 3, gamma, BlockVerifier()), abs=1e-12)
    overlap = sum(
        np.minimum(along(target, 3, i).prod(1), along(draft, 3, i).prod(1)).sum() for i in range(1, gamma + 1)
    )
    assert bound == pytest.approx(overlap, abs=1e-12)


def test_the_toy_gives_ten_eleven_and_twelve_ninths():
    p, q = np.array([1 / 3, 2 / 3]), np.array([2 / 3, 1 / 3])
    found = expectations(along(lambda _: p, 2, 2), along(lambda _: q, 2, 2))
    assert found == pytest.approx([10 / 9, 11 / 9, 12 / 9], abs=1e-12)


def test_a_target_that_rules_tokens_out_keeps_the_expectations():
    target, draft = (lambda s: np.roll([0.0, 0.25, 0.75], len(s))), (lambda s: np.roll([0.5, 0.0, 0.5], sum(s)))
    token, block, _ = expectations(along(target, 3, 3), along(draft, 3, 3))
    assert token == pytest.approx(enumerated(target, draft, 3, 3, TokenVerifier()), abs=1e-12)
    assert block == pytest.approx(enumerated(target, draft, 3, 3, BlockVerifier()), abs=1e-12)


ratios = arrays(
    np.float64, array_shapes(min_dims=2, max_dims=2, max_side=7), elements=st.floats(-50, 50) | st.just(-np.inf)
)


@given(ratios)
def test_in_every_step_token_is_at_most_block_is_at_most_bound_is_at_most_gamma(log_ratios):
    found = expected_accepted(log_ratios)
    assert (found.token >= 0).all()
    assert (found.token <= found.block + 1e-12).all()
    assert (found.block <= found.bound + 1e-12).all()
    assert (found.bound <= log_ratios.shape[1] + 1e-12).all()


@given(ratios, st.integers(1, 4))
def test_padding_a_shorter_chain_changes_nothing(log_ratios, width):
    padded = np.concatenate([log_ratios, np.full((len(log_ratios), width), np.nan)], axis=1)
    short, long = expected_accepted(log_ratios), expected_accepted(padded)
    for name in ("token", "block", "bound"):
        np.testing.assert_allclose(getattr(long, name), getattr(short, name), rtol=1e-12)


def test_nothing_after_a_ratio_of_zero_counts():
    found = expected_accepted(np.array([[0.0, -np.inf, 5.0, 0.0], [np.nan, np.nan, np.nan, np.nan]]))
    assert (found.token.tolist(), found.block.tolist(), found.bound.tolist()) == ([1, 0], [1, 0], [1, 0])
    assert (found.token.mean(), found.block.mean(), found.bound.mean()) == (0.5, 0.5, 0.5)


def test_float32_logs_are_summed_in_float64():
    found = expected_accepted(np.full((1, 3), np.log(0.5), dtype=np.float32))
    assert isinstance(found, ExpectedAccepted)
    assert found.token.dtype == np.float64
    assert found.token.mean() == pytest.approx(0.875, abs=1e-6)


@pytest.mark.parametrize(
    "log_ratios, said",
    [
        (np.zeros((0, 4)), "at least one step"),
        (np.array([[np.nan, 0.0]]), "NaN pads the end"),
        (np.array([[0.0, np.inf]]), r"\+inf, but a drafted token has q > 0"),
    ],
)
def test_wrong_traces_are_refused(log_ratios, said):
    with pytest.raises(InputError, match=said):
        expected_accepted(log_ratios)
