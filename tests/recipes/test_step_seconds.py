"""Seconds of a step: a machine that is slow for a while and runs that are disturbed do not move them."""

import json

import numpy as np
import pytest

from outrider import InputError
from outrider.bench.evidence import IntervalEstimate, Row
from recipes.inquiry.step_seconds import StepSeconds

SECONDS = (1.0, 1.1, 1.2, 1.5, 2.0, 2.2, 2.5, 3.0)


def timed(method: str, job: int, seconds: float, drafted: float = 5.0, steps: int = 20) -> Row:
    return {
        "method": method,
        "prompt": f"p{job}",
        "seed": 0,
        "requests": 1,
        "steps": steps,
        "drafted": drafted * steps,
        "seconds": 99.0,
        "profile": {"target": seconds * steps},
    }


def test_a_slow_while_and_a_disturbed_run_cancel():
    dice = np.random.default_rng(0)
    rows = []
    for job in range(20):
        slow = dice.choice([1.0, 4.0])
        rows += [timed(m, job, slow * s * dice.normal(1, 0.01)) for m, s in zip("abcdefgh", SECONDS, strict=True)]
    rows[0]["profile"]["target"] *= 50
    times = StepSeconds(rows, {})
    found = IntervalEstimate.of(times.of("b") / times.of("a"))
    assert found.low < 1.1 < found.high
    assert found.high - found.low < 0.03
    assert times.of("h")[0] / times.of("a")[0] == pytest.approx(3, rel=0.02)


def test_steps_are_compared_at_the_same_number_of_draft_tokens():
    rows = [timed(f"fixed {n}", job, 10 + 2 * n, drafted=n) for n in (1, 2, 4, 8) for job in range(4)]
    rows += [timed("stops", job, 10 + 2 * (3 + job % 2), drafted=3 + job % 2) for job in range(4)]
    times = StepSeconds(rows, {})
    assert times.slope([f"fixed {n}" for n in (1, 2, 4, 8)]) == pytest.approx(2, rel=0.01)
    wanted = np.full(2001, 6.0)
    assert times.of("stops", wanted, 2.0) == pytest.approx(np.full(2001, 22.0), rel=0.02)


def test_the_first_step_is_left_out_where_it_is_known_and_short_runs_are_not_used():
    row = timed("a", 0, 1.0) | {"stepping": 38.0, "later_steps": 19}
    times = StepSeconds([row, timed("a", 1, 500.0, steps=3)], {})
    assert times.of("a")[0] == 2
    with pytest.raises(InputError, match="no timed run has 4 steps"):
        StepSeconds([timed("a", 0, 1.0, steps=3)], {})


def test_a_folder_without_timed_rows_is_refused(tmp_path):
    with pytest.raises(InputError, match="no rows of timed runs"):
        StepSeconds.read(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps(timed("a", 0, 1.0)) + "\n")
    with pytest.raises(InputError, match="not the folder of a run"):
        StepSeconds.read(tmp_path)
    (tmp_path / "circumstances.json").write_text('{"circumstances": {}}')
    assert StepSeconds.read(tmp_path).has("a")
    with pytest.raises(InputError, match="no rows of timed runs"):
        StepSeconds.read(tmp_path, requests=2)
