"""Drafters that change while an engine runs: a route chooses them, or something between steps replaces them."""

from dataclasses import replace

import pytest

from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.decoding.protocol import Cycle
from outrider.drafters.ngram import NgramDrafter
from tests.world.models import drafter_of, engine, free_slots

GREEDY = Sampling(temperature=0, seed=0)
PROMPTS = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8, 9], [12, 11, 13, 14]]


def test_a_route_chooses_the_drafter_of_each_request_once():
    busy = engine("model")
    drafters, asked, used = [busy.parts.drafter, NgramDrafter(prompt_lookup_min=1)], [], {}

    def route(request):
        asked.append(request.id)
        return drafters[request.prompt[0] % 2]

    def watch(cycle: Cycle) -> None:
        used.update({state.request.prompt[0]: state.drafter for state in cycle.states})

    busy.route, busy.watch = route, watch
    made = busy.generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)
    plain = busy.plain().generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)
    assert [out.tokens for out in made] == [out.tokens for out in plain]
    assert sorted(asked) == sorted(out.id for out in made)
    assert {first: drafters.index(drafter) for first, drafter in used.items()} == {5: 1, 9: 1, 12: 0}
    busy.route = None
    assert free_slots(busy) == [8, 8]


def test_new_requests_of_two_drafters_that_take_turns_share_two_forwards():
    busy = engine("model", max_slots=4)
    drafters = [busy.parts.drafter, NgramDrafter(prompt_lookup_min=1)]
    busy.route = lambda request: drafters[request.prompt[0] % 2]
    for first in range(5, 9):
        busy.add([first, 6, 7], max_new_tokens=2, sampling=GREEDY)
    before = busy.parts.target.num_forwards
    busy.step()
    # One for the prompts of each drafter, and the step itself.
    assert busy.parts.target.num_forwards - before == 3
    busy.rest()


def test_a_request_whose_drafter_does_not_fit_ends_with_the_reason():
    busy = engine("ngram", "match")
    busy._refuses = lambda parts: None if isinstance(parts.drafter, NgramDrafter) else "this drafter does not fit"
    other = drafter_of("model")
    busy.route = lambda request: other if request.prompt[0] == 9 else busy.parts.drafter
    made = busy.generate(PROMPTS, max_new_tokens=4, sampling=GREEDY, errors="return")
    assert [out.finish_reason for out in made] == ["length", "error", "length"]
    assert isinstance(made[1].error, InputError)
    assert str(made[1].error) == "this drafter does not fit"


def test_what_runs_between_steps_sees_the_drafter_of_each_running_request():
    busy, seen = engine("model", max_slots=2), []
    busy.between = lambda: seen.append(busy.running)
    ids = [busy.add(prompt, max_new_tokens=6, sampling=GREEDY) for prompt in PROMPTS]
    while busy.busy:
        busy.step()
    assert seen[0].keys() == set(ids[:2])
    assert all(drafter is busy.parts.drafter for running in seen for drafter in running.values())
    assert seen[-1] == {}


def test_requests_keep_the_drafter_that_they_began_with_while_it_is_replaced_at_each_step():
    busy, used = engine("model"), {}
    # Both values hold one model, so that both can draft in its slots.
    busy.between = lambda: busy.swap(replace(busy.parts.drafter))

    def watch(cycle: Cycle) -> None:
        for state in cycle.states:
            used.setdefault(state.request.id, []).append(state.drafter)

    busy.watch = watch
    # The last prompt goes on with an ended text, whose draft states belong to another drafter.
    first = busy.generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)
    again = [[*PROMPTS[2], *first[2].tokens]]
    made = [*first, *busy.generate(again, max_new_tokens=12, sampling=GREEDY)]
    plain = busy.plain().generate([*PROMPTS, *again], max_new_tokens=12, sampling=GREEDY)
    assert [out.tokens for out in made] == [out.tokens for out in plain]
    assert made[-1].reused_tokens > 0
    assert all(len(set(map(id, drafters))) == 1 for drafters in used.values())
    assert len({id(drafters[0]) for drafters in used.values()}) == 2
    assert free_slots(busy) == [8, 8]


@pytest.mark.parametrize(("other", "kept"), [("weights", True), ("method", False)])
def test_costs_that_were_learnt_stay_where_only_the_weights_are_others(other, kept):
    busy = engine("model")
    before = busy.parts.experience
    busy.swap(drafter_of("model") if other == "weights" else NgramDrafter())
    assert (busy.parts.experience is before) == kept
