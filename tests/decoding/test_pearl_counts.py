"""PEARL: the counts of steps and forwards, and the seconds of a step whose two sides run at once."""

from dataclasses import replace
from itertools import pairwise

import pytest

from outrider.decoding.pearl import PearlDecoding
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.tabular import TabularLM, random_rows
from outrider.verifiers.token import TokenVerifier
from tests.decoding.pearl_engines import CLOCKS, DRAWN, PROMPT, SIMULATED, TickingLM, pearl
from tests.world.tables import tables


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_steps_add_up_to_the_output(verifier):
    outputs = pearl("model", verifier, gamma=4).generate([PROMPT, [5], [8, 8]], max_new_tokens=33, sampling=DRAWN)
    whole = 0
    for output in outputs:
        steps = output.steps
        assert [token for step in steps for token in step.tokens] == output.tokens
        assert [len(step.tokens) for step in steps[:1]] == [1]
        for step in steps:
            assert step.num_accepted_tokens <= step.num_draft_tokens
            assert len(step.tokens) in (step.num_accepted_tokens, step.num_accepted_tokens + 1), step
        for before, step in pairwise(steps):
            if len(before.tokens) == before.num_accepted_tokens + 1:
                assert len(step.tokens) == 1, "a pre-verify follows a rejection"
            whole += len(step.tokens) == step.num_accepted_tokens > 1
    assert whole > 0


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("gamma", [2, 4])
def test_a_step_is_one_target_forward_and_one_draft_forward_per_token(gamma, clock):
    counted = pearl("model", gamma=gamma, clock=clock)
    target, draft = counted.parts.target, counted.parts.drafter.lm
    for i in range(3):
        counted.add([5 + i] * (2 + i), max_new_tokens=60, sampling=DRAWN, id=str(i))
    counted.step()
    for _ in range(8):
        before = target.num_forwards, draft.num_forwards
        counted.step()
        assert (target.num_forwards - before[0], draft.num_forwards - before[1]) == (1, gamma)


def test_the_target_reads_no_token_twice_and_none_after_the_last_one_ahead():
    same = random_rows(3, seed=2)
    parts = replace(
        tables(3, TokenVerifier(), 4, drafter=ModelDrafter(lm=TabularLM(same, 3)), decoding=SIMULATED),
        target=TabularLM(same, 3),
    )
    read, extend = [], parts.target.extend

    def counting(segments, taps=()):
        read.append(sum(len(segment.tokens) for segment in segments))
        return extend(segments, taps)

    parts.target.extend = counting
    [output] = Engine(parts).generate([[0]], max_new_tokens=12, sampling=DRAWN)
    assert read == [len(step.tokens) for step in output.steps] == [1, 3, 4, 4]


@pytest.mark.parametrize(("target", "draft", "gamma"), [(9.0, 2.0, 4), (5.0, 2.0, 4), (8.0, 2.0, 4), (1.0, 3.0, 2)])
def test_a_simulated_step_takes_the_longer_of_drafting_and_verifying_not_their_sum(target, draft, gamma):
    clock = [0.0]
    parts = tables(3, TokenVerifier(), gamma, drafter=ModelDrafter(lm=TickingLM(1, draft, clock)), decoding=SIMULATED)
    decoding = PearlDecoding(clock="simulated", _now=lambda: clock[0])
    parts = replace(parts, target=TickingLM(2, target, clock), decoding=decoding)
    [output] = Engine(parts).generate([[0, 1]], max_new_tokens=40, sampling=DRAWN)
    whole = [step.timing for step in output.steps if step.timing.drafter == draft * gamma]
    assert len(whole) > len(output.steps) // 2
    for timing in whole:
        assert (timing.target, timing.overlap) == (target, min(target, draft * gamma))
        assert timing.total == max(target, draft * gamma)


def test_an_overlapped_step_takes_no_less_than_either_side_and_no_more_than_both():
    [output] = pearl("model").generate([PROMPT], max_new_tokens=40, sampling=DRAWN)
    for timing in (step.timing for step in output.steps):
        sides = timing.drafter, timing.target + timing.rows
        others = timing.verify + timing.commit + timing.rest
        assert max(sides) - 1e-9 <= timing.total - others + timing.rest
        assert 0 <= timing.overlap <= min(sides) + 1e-9
        assert all(part >= 0 for part in vars(timing).values())
