"""Where no draft pays, an engine that could draft does what plain decoding does; where drafts pay it drafts again."""

from dataclasses import replace

import pytest

import outrider
from outrider.core.types import InputError, Request, Sampling
from outrider.decoding.protocol import Parts
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from outrider.lm.slots.slotted import SlottedLM
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from tests.engine.test_batches import engine, requests, run

pytestmark = pytest.mark.usefixtures("float64_stays_float64")
SETTLED = {"length": "goodput", "forward": "eager", "pad_to": 1}
"""Options with which nothing is measured at loading."""

GREEDY = Sampling(temperature=0.0, seed=0)


def priced(draft: float) -> Experience:
    """Experience by which a draft of n tokens costs 1 + n `draft`."""
    return Experience(CostTable.of_formula(lambda requests, length: 1 + length * draft))


def with_experience(experience: Experience, max_slots: int = 8) -> Engine:
    """A draft model, and drafts as long as this experience says."""
    found = engine("model", BlockVerifier(), GoodputLength(), max_slots=max_slots)
    found.parts = replace(found.parts, experience=experience)
    return found


def forwards(parts: Parts) -> tuple[int, int]:
    """Forwards of the target and of the draft model."""
    target, drafter = parts.target, parts.drafter
    assert isinstance(target, SlottedLM)
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(drafter.lm, SlottedLM)
    return target.num_forwards, drafter.lm.num_forwards


@pytest.mark.parametrize(("slots", "late"), [(8, 0), (3, 2)])
def test_where_no_draft_pays_the_target_runs_as_in_plain_decoding_and_the_draft_model_not_at_all(slots, late):
    resting, plain = with_experience(priced(9.0), slots), engine("none", MatchVerifier(), GoodputLength(), slots)
    greedy = [replace(each, sampling=GREEDY) for each in requests()]
    assert run(resting, greedy, late) == run(plain, greedy, late)
    assert forwards(resting.parts) == (plain.parts.target.num_forwards, 0)
    assert resting.parts.target.bytes_moved == plain.parts.target.bytes_moved


def test_a_drafter_that_rested_reads_all_it_missed_in_one_forward_of_its_own():
    waking = with_experience(priced(9.0))
    target, draft = waking.parts.target, waking.parts.drafter.lm
    for i in range(3):
        waking.add([5 + i] * (20 + i), max_new_tokens=60, sampling=GREEDY, id=str(i))
    for _ in range(21):
        waking.step()
    assert draft.num_forwards == 0
    waking.parts = replace(waking.parts, experience=priced(0.01))
    before, steps = target.num_forwards, []
    waking.step(sink=steps.append)
    drafted = max(step.num_draft_tokens for step in steps)
    assert drafted > 1
    assert (target.num_forwards - before, draft.num_forwards) == (1, drafted + 1)
    for _ in range(2):
        before, steps = forwards(waking.parts), []
        waking.step(sink=steps.append)
        drafted = max(step.num_draft_tokens for step in steps)
        assert (target.num_forwards - before[0], draft.num_forwards - before[1]) == (1, drafted)


def greedy_lengths(engine_: Engine, these: list[Request], late: int) -> tuple[list[list[int]], set[int]]:
    """Outputs, and the deepest draft of each step."""
    seen: set[int] = set()

    def watch(cycle) -> None:
        seen.add(max(cycle.draft.num_draft_tokens(i) for i in range(cycle.draft.num_requests)))

    engine_.watch = watch
    return run(engine_, these, late), seen


@pytest.mark.parametrize(("slots", "late"), [(8, 0), (3, 2), (2, 1)])
def test_requests_that_come_and_go_get_greedy_outputs_whatever_lengths_are_chosen(slots, late):
    greedy = [replace(each, sampling=replace(each.sampling, temperature=0.0)) for each in requests()]
    expected = [run(engine("none", MatchVerifier(), GoodputLength()), [request])[0] for request in greedy]
    found, lengths = greedy_lengths(with_experience(priced(0.5), slots), greedy, late)
    assert found == expected
    assert 0 in lengths
    assert max(lengths) > 0


def test_a_batch_repeats_itself():
    outputs = [run(with_experience(priced(0.35), 3), requests(), 2) for _ in range(2)]
    assert outputs[0] == outputs[1]


def test_engines_with_one_policy_learn_apart():
    policy = GoodputLength()
    one, other = (engine("model", BlockVerifier(), policy) for _ in range(2))
    one.generate([[3, 4, 5]], max_new_tokens=12, sampling=GREEDY)
    assert one.parts.experience.num_steps > 0
    assert other.parts.experience.num_steps == 0
    assert one.plain().parts.experience is one.parts.experience
    before = one.parts.experience.num_steps
    one.plain().generate([[3, 4, 5]], max_new_tokens=12, sampling=GREEDY)
    assert one.parts.experience.num_steps == before


def test_a_cancelled_request_and_a_failed_step_leave_the_others_as_they_were():
    greedy = [replace(each, sampling=GREEDY) for each in requests()]
    expected = [run(engine("none", MatchVerifier(), GoodputLength()), [request])[0] for request in greedy]
    busy, failed = with_experience(priced(0.3)), False

    def fail_once(cycle) -> None:
        nonlocal failed
        if not failed and len(cycle.states) > 3 and cycle.states[0].num_steps == 2:
            failed = True
            raise RuntimeError("once")

    busy.watch = fail_once
    for request in greedy:
        busy.add(request)
    found: dict[str, list[int]] = {}
    for round_ in range(1000):
        if round_ == 1:
            busy.cancel("3")
        for update in busy.step():
            if update.output is not None:
                found[update.id] = update.output.tokens
        if not busy.busy:
            break
    assert failed
    for request, tokens in zip(greedy, expected, strict=True):
        if request.id != "3":
            assert found[request.id] == tokens, request.id


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tree": "gumbel:branching=2x2"}, "length 'goodput' is for chains"),
        ({"decoding": "pearl"}, "not as length 'goodput' says; use length 'fixed'"),
        ({"verifier": "greedy_block"}, "verifier 'greedy_block' needs drafts of one length"),
    ],
)
def test_what_goodput_cannot_be_combined_with_is_refused(options, sentence, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(InputError, match=sentence):
        outrider.load(**SETTLED | options)
