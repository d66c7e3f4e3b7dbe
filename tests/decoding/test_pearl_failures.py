"""PEARL: an error on either side ends both sides, and no output changes after it."""

import pytest

from tests.decoding.pearl_engines import CLOCKS, DRAWN, PROMPT, Broken, pearl
from tests.world.models import free_slots


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("sides", [("target",), ("draft",), ("target", "draft")])
def test_an_error_on_either_side_surfaces_and_leaves_nothing_running_or_taken(sides, clock):
    used = pearl("model", clock=clock)
    fine = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    lms = {"target": used.parts.target, "draft": used.parts.drafter.lm}
    kept = {side: lms[side]._forward for side in sides}
    for side in sides:
        calls = iter(range(100))

        def failing(inputs, taps, side=side, calls=calls):
            if next(calls) >= (6 if side == "target" else 18):
                raise Broken(side)
            return kept[side](inputs, taps)

        lms[side]._forward = failing
    with pytest.raises(Broken) as raised:
        used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    assert str(raised.value) in sides
    assert not used.busy
    for side in sides:
        lms[side]._forward = kept[side]
    assert free_slots(used) == [8, 8]
    again = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    assert [output.tokens for output in again] == [output.tokens for output in fine]


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("side", ["target", "draft"])
def test_an_error_that_passes_changes_no_output(side, clock):
    used = pearl("model", clock=clock)
    fine = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    lm = used.parts.target if side == "target" else used.parts.drafter.lm
    kept, calls = lm._forward, iter(range(1000))

    def failing(inputs, taps):
        if next(calls) == (6 if side == "target" else 18):
            raise Broken(side)
        return kept(inputs, taps)

    lm._forward = failing
    again = used.generate([PROMPT, [5]], max_new_tokens=20, sampling=DRAWN)
    assert next(calls) > 18
    assert [output.tokens for output in again] == [output.tokens for output in fine]
