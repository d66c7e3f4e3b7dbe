"""The test of samples sees what is wrong, passes what is right, and says so where it could have seen little."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.cli.commands import DRAWS
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import LM
from outrider.proof import statistics
from outrider.proof.pair import prove
from outrider.proof.partition import LEAST_EXPECTED, MOST_CLASSES, Class, Partition, partition
from outrider.proof.plain import plain_logits
from outrider.proof.statistics import P_BOUND, Samples, chi_square, sampled_law
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.lenient import LenientVerifier
from outrider.verifiers.protocol import Verifier
from tests.world.biased import RecoversFromTheTarget
from tests.world.models import engine, llama

PROMPTS = [[1, 2, 1, 2], [1], [2, 3], [3, 1, 2]]
SEEDS = range(0, 3000, 1000)


@pytest.fixture(scope="module")
def pair() -> Engine:
    """A real tiny target with a draft model."""
    return engine("model", "token", max_slots=64)


def judged(pair: Engine, verifier: Verifier, seed: int) -> Samples:
    """What the test finds at the command line's number of draws."""
    used = Engine(replace(pair.parts, verifier=verifier), max_slots=pair.max_slots)
    found = sampled_law(used, PROMPTS, DRAWS, seed=seed)
    print(found.test, found.temperatures)
    return found


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "verifier", [RecoversFromTheTarget(), LenientVerifier()], ids=["recovers from the target", "lenient"]
)
def test_a_biased_verifier_on_a_real_model_fails_at_the_usual_number_of_draws(pair, verifier, seed):
    found = judged(pair, verifier, seed)
    assert found.verdict == "differs"
    assert found.p_value < P_BOUND / 10
    assert found.test.p_value < P_BOUND / 10


def test_a_right_verifier_on_a_real_model_fits_and_is_looked_at_closely(pair):
    found = [judged(pair, BlockVerifier(), seed) for seed in SEEDS]
    assert {each.verdict for each in found} == {"fits"}
    assert all(each.doubt is None and each.test.degrees > 40 for each in found)
    assert all(0 < each.num_accepted_tokens < each.num_draft_tokens for each in found)


def test_a_temperature_that_is_named_is_taken_and_one_at_which_little_can_be_seen_is_inconclusive(pair):
    found = sampled_law(pair, PROMPTS, 400, temperature=0.01)
    assert found.temperatures == (0.01,) * len(PROMPTS)
    assert found.verdict == "inconclusive"
    assert f"{found.test.degrees} degrees of freedom" in found.doubt


def test_without_a_draft_it_is_inconclusive():
    found = sampled_law(engine("none", "match", max_slots=64), PROMPTS, 400)
    assert found.verdict == "inconclusive"
    assert found.doubt.startswith("nothing was drafted; give a drafter")


def test_few_draws_are_made_after_few_prompts(pair):
    assert len(sampled_law(pair, PROMPTS, 199).temperatures) == 1
    assert len(sampled_law(pair, PROMPTS, 200).temperatures) == 2


def test_the_target_reads_each_beginning_once_whichever_temperatures_are_tried(pair, monkeypatch):
    read = list[tuple[int, ...]]()

    def reading(target: LM, texts: Sequence[Sequence[int]], last: int) -> Tensor:
        if last == 1:
            read.extend(map(tuple, texts))
        return plain_logits(target, texts, last)

    monkeypatch.setattr(statistics, "plain_logits", reading)
    # So few draws tell few outputs apart, so that all temperatures are tried; then the draws are judged.
    sampled_law(pair, PROMPTS, 50)
    assert len(read) == len(set(read)) > 1


def test_p_values_are_spread_evenly_where_the_law_holds():
    random = np.random.default_rng(0)
    expected = [5.0, 5.0, 10.0, 30.0, 50.0]
    draws = random.multinomial(100, np.array(expected) / 100, size=2000)
    p = np.array([chi_square(each, expected).p_value for each in draws.tolist()])
    assert np.abs(np.quantile(p, [0.1, 0.5, 0.9]) - [0.1, 0.5, 0.9]).max() < 0.04


def test_outputs_of_a_target_in_bfloat16_are_drawn_in_float32_where_rounding_moves_no_token_across_a_bound():
    """A token that the target's own rounding keeps among the top k, and that of another forward does not, failed."""

    class Counted(LanguageModel):
        calls = 0

        def extend(self, segments, taps=()):
            Counted.calls += 1
            return super().extend(segments, taps)

    calls = []
    for num_draws in (0, 100):
        parts = replace(engine().parts, target=Counted(llama().bfloat16(), max_slots=8))
        found = prove(Engine(parts, max_slots=8), num_draws)
        assert (found.samples is None) == (num_draws == 0)
        calls.append(Counted.calls)
        Counted.calls = 0
    # Eight at once, 100 outputs of two steps take 26 forwards. The other checks may share one more or less.
    assert abs(calls[1] - calls[0]) < 5 < calls[0]


# Which outputs are told apart.


def table(vocab: int, concentration: float, seed: int):
    """Random rows, one for each beginning."""

    def rows(begun):
        return np.stack([np.random.default_rng([seed, *own]).dirichlet(np.full(vocab, concentration)) for own in begun])

    return rows


def masses(classes: Partition, rows, length: int) -> dict[Class, float]:
    """The probability of every class, by adding up all outputs."""
    found: dict[Class, float] = {}
    level = {(): 1.0}
    for _ in range(length):
        level = {(*o, t): mass * p for o, mass in level.items() for t, p in enumerate(rows([o])[0].tolist())}
    for output, mass in level.items():
        found[classes.of(output)] = found.get(classes.of(output), 0.0) + mass
    return found


@given(
    vocab=st.integers(2, 6),
    concentration=st.sampled_from([0.02, 0.3, 1.0, 50.0]),
    num_draws=st.integers(20, 2000),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_classes_are_expected_as_often_as_their_outputs_and_often_enough(vocab, concentration, num_draws, seed):
    rows, length = table(vocab, concentration, seed), 4
    classes = partition(rows, num_draws, length)
    found = masses(classes, rows, length)
    assert set(found) - {None} == set(classes.expected_counts)
    for each, expected in classes.expected_counts.items():
        assert expected == pytest.approx(num_draws * found[each], rel=1e-9)
    assert sum(classes.expected_counts.values()) == pytest.approx(num_draws)
    assert min(classes.expected_counts.values()) >= LEAST_EXPECTED - 1e-9


@pytest.mark.parametrize("concentration", [0.01, 1.0, 100.0], ids=["peaked", "uneven", "flat"])
def test_a_law_over_many_tokens_is_told_apart_however_peaked_it_is(concentration):
    classes = partition(table(5000, concentration, 0), 250, 6)
    assert 8 <= len(classes.expected_counts) <= 2 * MOST_CLASSES
    assert min(classes.expected_counts.values()) >= LEAST_EXPECTED


def test_an_output_that_cannot_come_is_of_no_class():
    classes = partition(lambda begun: np.tile([0.5, 0.5, 0.0], (len(begun), 1)), 100, 2)
    assert classes.of((0, 2)) is None
    assert classes.of((0, 1)) == Class(begun=(0, 1))
