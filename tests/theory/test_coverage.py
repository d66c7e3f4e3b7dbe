"""Steps counted on a text: their expectations are those of enumerated runs."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from outrider import InputError
from outrider.drafters.model import ModelDrafter
from outrider.lm.tabular import Row, TabularLM, random_rows
from outrider.proof.enumerate import law
from outrider.theory.coverage import coverage, survival
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.token import TokenVerifier
from tests.world.parts import parts_of

RULES = {"token": TokenVerifier(), "block": BlockVerifier()}
VOCAB = 3


def on_texts(target: Row, draft: Row, gamma: int, rule: str, before: int) -> tuple[float, float]:
    """Means of steps and tokens over all texts that the target says after the prompt [0]."""
    steps = tokens = 0.0
    for text in product(range(VOCAB), repeat=before + gamma):
        p, q = (np.array([row((0, *text[:i]))[text[i]] for i in range(len(text))]) for row in (target, draft))
        if (mass := p.prod()) > 0:
            with np.errstate(divide="ignore"):
                found = coverage(np.log(p) - np.log(q), gamma, rule, before=before)
            steps, tokens = steps + mass * found.steps, tokens + mass * found.tokens
    return steps, tokens


def enumerated(target: Row, draft: Row, gamma: int, rule: str, before: int) -> tuple[float, float]:
    """The same of runs of the production loop: outputs that have reached the bound make no further step."""
    parts = parts_of(
        TabularLM(target, VOCAB), ModelDrafter(lm=TabularLM(draft, VOCAB)), verifier=RULES[rule], length=gamma
    )
    after = [law(parts, [0], count, horizon=before).emitted for count in range(before + 1)]
    steps = sum(mass for emitted in after for output, mass in emitted.items() if len(output) < before)
    return steps, sum(mass * len(output) for output, mass in after[-1].items())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("gamma", "before"), [(1, 3), (2, 2), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(2))
def test_means_over_texts_are_those_of_enumerated_runs(rule, gamma, before, seed):
    rows = random_rows(VOCAB, seed), random_rows(VOCAB, seed + 50)
    assert on_texts(*rows, gamma, rule, before) == pytest.approx(enumerated(*rows, gamma, rule, before), abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_tokens_that_a_side_rules_out_keep_the_means(rule):
    target, draft = (lambda s: np.roll([0.0, 0.25, 0.75], len(s))), (lambda s: np.roll([0.5, 0.0, 0.5], sum(s)))
    assert on_texts(target, draft, 2, rule, 2) == pytest.approx(enumerated(target, draft, 2, rule, 2), abs=1e-12)


ratios = arrays(np.float64, st.integers(6, 12), elements=st.floats(-20, 20) | st.just(np.inf))


@given(ratios, st.integers(1, 5))
def test_block_verification_takes_no_more_steps_on_any_text(log_ratios, gamma):
    token, block = (survival(log_ratios[:gamma], rule) for rule in ("token", "block"))
    assert (block >= token * (1 - 1e-12)).all()
    found = [coverage(log_ratios, gamma, rule, ended=True) for rule in ("token", "block")]
    assert found[1].steps <= found[0].steps + 1e-9
    assert [each.tokens for each in found] == pytest.approx([len(log_ratios)] * 2)


def test_a_drafter_that_is_the_target_takes_full_steps_and_one_that_is_never_right_single_ones():
    assert coverage(np.zeros(12), 3, "block", before=8).steps == 2
    assert coverage(np.full(12, np.inf), 3, "token", before=8).steps == 8


def test_texts_that_do_not_show_what_a_step_emits_are_refused():
    with pytest.raises(InputError, match="begin before 3, got before=4"):
        coverage(np.zeros(5), 2, "token", before=4)
    with pytest.raises(InputError, match="gamma must be >= 1"):
        coverage(np.zeros(5), 0, "token")
