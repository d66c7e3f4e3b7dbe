"""Published sentences are judged by whole intervals, over enough prompts."""

import pytest

from outrider.bench.evidence import IntervalEstimate, Row, Sums
from recipes.inquiry.papers import FOREVER, Paper, gain, hours_left


def made(method: str, prompt: str, tokens: int, steps: int) -> Row:
    return {"method": method, "prompt": prompt, "seed": 0, "tokens": tokens, "steps": steps}


def test_a_gain_is_in_percent_and_paired():
    rows = [made(m, p, tokens * scale, 10) for m, scale in (("a", 1), ("b", 2)) for p, tokens in (("x", 10), ("y", 40))]
    sums = Sums(rows)
    assert gain(sums.ratio("b", "tokens", "steps"), sums.ratio("a", "tokens", "steps")) == IntervalEstimate(
        value=100.0, low=100.0, high=100.0
    )


@pytest.mark.parametrize(("low", "high", "holds"), [(0.1, 2, True), (-2, -0.1, False), (-1, 1, None)])
def test_a_claim_holds_only_with_its_whole_interval_and_enough_prompts(low, high, holds):
    paper, ours = Paper(name="", url=""), IntervalEstimate(value=0, low=low, high=high)
    for prompts in (8, 7):
        sums = Sums([made("a", str(i), 1, 1) for i in range(prompts)])
        found = paper.claim("", ours, num_prompts=sums.num_prompts, published=1, unit="", least=0)
        assert found.holds is (holds if prompts == 8 else None)


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
