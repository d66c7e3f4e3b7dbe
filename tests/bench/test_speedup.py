"""Speedups are of sums over the same prompts, each with the median of its rounds."""

import pytest

from outrider.bench.speedup import rate, speedup


def row(prompt: str, round: int, tokens: int, seconds: float) -> dict[str, object]:
    return {"prompt": prompt, "category": "", "round": round, "tokens": tokens, "seconds": seconds}


PLAIN = [row(prompt, round, 100, 4.0) for prompt in "abcd" for round in range(3)]


def test_a_disturbed_round_does_not_count():
    ours = [row(prompt, round, 100, 2.0 if round else 50.0) for prompt in "abcd" for round in range(3)]
    found = speedup(ours, PLAIN, list("abcd"))
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)
    assert rate(ours) == 50.0


def test_rounds_of_unequal_length_count_by_seconds_per_token():
    ours = [row(prompt, round, 100 * (1 + (round == 1)), 1.0 + (round == 1)) for prompt in "abcd" for round in range(3)]
    assert speedup(ours, PLAIN, list("abcd")).value == pytest.approx(4.0)


def test_without_prompts_there_is_no_speedup():
    assert speedup(PLAIN, PLAIN, []) is None
