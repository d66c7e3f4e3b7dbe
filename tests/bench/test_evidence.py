"""What rows say: sums, resamples, and sentences that are judged by them."""

import numpy as np
import pytest

from outrider import InputError
from outrider.bench.claims import FOREVER, Paper, hours_left
from outrider.bench.evidence import IntervalEstimate, Row, Sums, gain


def made(method: str, prompt: str, tokens: int, steps: int, seed: int = 0) -> Row:
    return {"method": method, "prompt": prompt, "seed": seed, "tokens": tokens, "steps": steps}


def test_sums_are_plain_sums_and_resamples_are_shared_by_all_methods():
    rows = [made(m, p, tokens * scale, 10) for m, scale in (("a", 1), ("b", 2)) for p, tokens in (("x", 10), ("y", 40))]
    sums = Sums(rows)
    assert sums.get("a", "tokens")[0] == 50
    assert set(sums.get("a", "tokens")) == {20, 50, 80}
    assert gain(sums.ratio("b", "tokens", "steps"), sums.ratio("a", "tokens", "steps")) == IntervalEstimate(
        value=100.0, low=100.0, high=100.0
    )


def test_seeds_are_resampled_within_prompts():
    rows = [made("a", "x", tokens, 1, seed) for seed, tokens in enumerate((0, 3))]
    assert set(Sums(rows).get("a", "tokens")) == {0, 3, 6}


def test_the_interval_of_a_mean_is_the_one_that_theory_gives():
    values = np.random.default_rng(0).normal(5, 2, 200)
    rows = [made("a", str(i), value, 1) for i, value in enumerate(values)]
    found = IntervalEstimate.of(Sums(rows).ratio("a", "tokens", "steps"))
    half = 1.96 * values.std() / np.sqrt(200)
    assert found.value == pytest.approx(values.mean())
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)


def test_rows_that_are_not_complete_are_refused():
    with pytest.raises(InputError, match="not complete"):
        Sums([made("a", "x", 1, 1), made("b", "y", 1, 1)])


@pytest.mark.parametrize(("low", "high", "holds"), [(0.1, 2, True), (-2, -0.1, False), (-1, 1, None)])
def test_a_claim_holds_only_with_its_whole_interval_and_enough_prompts(low, high, holds):
    paper, ours = Paper(name="", url=""), IntervalEstimate(value=0, low=low, high=high)
    for prompts in (8, 7):
        sums = Sums([made("a", str(i), 1, 1) for i in range(prompts)])
        found = paper.claim("", ours, num_prompts=sums.num_prompts, published=1, unit="", least=0)
        assert found.holds is (holds if prompts == 8 else None)


def test_the_best_of_several_methods_is_chosen_on_the_other_half_of_the_prompts():
    rows = [made(m, p, tokens, 1) for m, p, tokens in (("a", "x", 1), ("a", "y", 4), ("b", "x", 3), ("b", "y", 3))]
    best = Sums(rows).best("tokens", "steps", ["a", "b"])
    assert best[0] == 2
    better = [made(m, str(p), tokens, 1) for m, tokens in (("a", 1), ("b", 2)) for p in range(20)]
    assert (Sums(better).best("tokens", "steps", ["a", "b"]) == 2).all()


def test_resamples_within_categories_vary_as_much_as_fresh_prompts():
    dice = np.random.default_rng(0)
    values = {(c, i): dice.normal(10 * c, 1) for c in range(4) for i in range(3)}
    rows = [made("a", f"{c}/{i}", value, 1) | {"category": str(c)} for (c, i), value in values.items()]
    found = Sums(rows, resamples=20000).ratio("a", "tokens", "steps")
    within = [np.var([values[c, i] for i in range(3)], ddof=1) / 3 for c in range(4)]
    assert found[1:].std() == pytest.approx(np.sqrt(np.mean(within) / 4), rel=0.03)
    # Without categories the differences between them count too.
    plain = Sums([{**row, "category": ""} for row in rows]).ratio("a", "tokens", "steps")
    assert plain[1:].std() > 2 * found[1:].std()


def test_prompts_that_are_alone_in_their_category_are_resampled_together():
    rows = [made("a", p, tokens, 1) | {"category": p} for p, tokens in (("x", 1), ("y", 3))]
    assert set(Sums(rows).get("a", "tokens")) == {2, 4, 6}


def test_halves_add_up_to_the_whole():
    rows = [made("a", str(i), i, 1) for i in range(9)]
    sums = Sums(rows)
    both = sums.half(True).get("a", "tokens") + sums.half(False).get("a", "tokens")
    assert both == pytest.approx(sums.get("a", "tokens"))


def judged(value: float, low: float, high: float, **more: object):
    ours = IntervalEstimate(value=value, low=low, high=high)
    return Paper(name="", url="").claim("", ours, num_prompts=9, published=None, unit="", **more)


def test_an_undecided_claim_says_how_much_longer_and_a_decided_one_whether_it_is_clear():
    assert judged(1, -1, 3, least=0.0, seconds=3600).hours == pytest.approx(3)
    assert judged(-1, -3, 1, least=0.0, seconds=3600).hours == pytest.approx(3)
    assert judged(1, 0.5, 2, least=0.0, seconds=3600).hours is None
    assert (judged(1, 0.4, 2, least=0.0).holds, judged(1, 0.4, 2, least=0.0).clear) == (True, False)
    assert judged(1, 0.6, 2, least=0.0).clear
    assert judged(4, 3, 4.4, most=5.0).clear
    assert hours_left(IntervalEstimate(value=0.0, low=-1, high=1), 0.0, 1.0) == FOREVER


def test_crossed_seeds_are_drawn_once_for_all_prompts():
    rows = [made("a", p, 10**seed, 1, seed) for p in ("x", "y") for seed in (0, 1)]
    # One prompt less and one seed less than there are, scaled up: every resample is four times one run.
    assert set(Sums(rows, crossed=True).get("a", "tokens")) == {22, 4, 40}


def test_seeds_that_differ_widen_the_interval_as_fresh_seeds_would():
    dice = np.random.default_rng(1)
    effects, noise = dice.normal(0, 1, 40), dice.normal(0, 1, (40, 60))
    rows = [made("a", str(p), effects[s] + noise[s, p] + 9, 1, s) for p in range(60) for s in range(40)]
    found = Sums(rows, crossed=True).ratio("a", "tokens", "steps")
    expected = np.sqrt(effects.var(ddof=1) / 40 + 1 / (40 * 60))
    assert found[1:].std() == pytest.approx(expected, rel=0.2)
