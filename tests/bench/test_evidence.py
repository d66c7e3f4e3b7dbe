"""What rows say: sums and resamples."""

import numpy as np
import pytest

from outrider import InputError
from outrider.bench.evidence import IntervalEstimate, Row, Sums


def made(method: str, prompt: str, tokens: int, steps: int, seed: int = 0) -> Row:
    return {"method": method, "prompt": prompt, "seed": seed, "tokens": tokens, "steps": steps}


def test_sums_are_plain_sums_and_resamples_are_shared_by_all_methods():
    rows = [made(m, p, tokens * scale, 10) for m, scale in (("a", 1), ("b", 2)) for p, tokens in (("x", 10), ("y", 40))]
    sums = Sums(rows)
    assert sums.get("a", "tokens")[0] == 50
    assert set(sums.get("a", "tokens")) == {20, 50, 80}
    ratio = sums.ratio("b", "tokens", "steps") / sums.ratio("a", "tokens", "steps")
    assert IntervalEstimate.of(ratio) == IntervalEstimate(value=2.0, low=2.0, high=2.0)


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
