"""Many users of one engine: each gets every update of theirs and nothing else, in one thread or in many."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from outrider.core.types import InputError, Request, Sampling
from outrider.engine.engine import Engine
from outrider.engine.output import Output, Update
from tests.world.models import engine
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

GREEDY = Sampling(temperature=0, seed=0)
DRAWN = Sampling(temperature=1.0, seed=0)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = np.random.default_rng(seed)
    return [dice.integers(3, VOCAB, size=3 + 2 * i).tolist() for i in range(count)]


def alone(these: Sequence[Sequence[int]], setting: Sampling) -> list[list[int]]:
    """What each prompt gives with an engine of its own."""
    return [
        engine("model").generate([p], max_new_tokens=14, sampling=replace(setting, seed=i))[0].tokens
        for i, p in enumerate(these)
    ]


def read(stream: Sequence[Update]) -> list[int]:
    return [token for update in stream for token in update.tokens]


@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_two_streams_that_take_turns_in_one_thread_give_what_they_give_alone(setting):
    busy, these = engine("model"), prompts(2)
    streams = [busy.stream(p, max_new_tokens=14, sampling=replace(setting, seed=i)) for i, p in enumerate(these)]
    found: list[list[Update]] = [[], []]
    waiting = [0, 1]
    while waiting:
        for i in list(waiting):
            update = next(streams[i], None)
            if update is None:
                waiting.remove(i)
            else:
                found[i].append(update)
    assert [read(own) for own in found] == alone(these, setting)
    for own in found:
        assert len({update.id for update in own}) == 1
        assert own[-1].output.tokens == read(own)


@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_two_streams_in_two_threads_give_what_they_give_alone(setting):
    busy, these = engine("model"), prompts(2)

    def follow(i: int) -> list[int]:
        return read(list(busy.stream(these[i], max_new_tokens=14, sampling=replace(setting, seed=i))))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(follow, range(2))) == alone(these, setting)


@pytest.mark.parametrize("setting", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("slots", [3, 8])
def test_eight_threads_that_call_generate_give_what_they_give_alone(setting, slots):
    busy, these = engine("model", max_slots=slots), prompts(16)
    expected = alone(these, setting)
    begun = threading.Barrier(8)

    def make(i: int) -> list[list[int]]:
        begun.wait()
        own = [replace(setting, seed=k) for k in (2 * i, 2 * i + 1)]
        return [out.tokens for out in busy.generate(these[2 * i : 2 * i + 2], max_new_tokens=14, sampling=own)]

    with ThreadPoolExecutor(8) as pool:
        made = [tokens for both in pool.map(make, range(8)) for tokens in both]
    assert made == expected
    assert not busy.busy


def test_a_request_added_by_hand_gets_its_updates_from_steps_that_others_make():
    busy, these = engine("model"), prompts(2)
    id = busy.add(these[0], max_new_tokens=6, sampling=GREEDY)
    [other] = busy.generate([these[1]], max_new_tokens=14, sampling=replace(GREEDY, seed=1))
    updates: list[Update] = []
    steps = []
    while not updates or updates[-1].output is None:
        updates += busy.step(sink=steps.append)
    assert {update.id for update in updates} == {id}
    assert read(updates) == engine("model").generate([these[0]], max_new_tokens=6, sampling=GREEDY)[0].tokens
    assert [token for step in steps for token in step.tokens] == read(updates)
    assert other.tokens == alone(these, GREEDY)[1]
    assert [token for step in other.steps for token in step.tokens] == other.tokens


def test_a_stream_whose_request_is_cancelled_elsewhere_ends():
    busy, [prompt] = engine("model"), prompts(1)
    stream = busy.stream(Request(id="mine", prompt=tuple(prompt), max_new_tokens=50, sampling=GREEDY))
    first = next(stream)
    output = busy.cancel("mine")
    rest = list(stream)
    assert rest[-1].output == output
    assert output.finish_reason == "cancelled"
    assert read([first, *rest]) == output.tokens


def test_a_stream_that_is_left_takes_its_request_with_it_and_no_other():
    busy, these = engine("model"), prompts(2)
    stream = busy.stream(these[0], max_new_tokens=50, sampling=GREEDY)
    next(stream)
    other = busy.stream(these[1], max_new_tokens=14, sampling=replace(GREEDY, seed=1))
    next(other)
    stream.close()
    assert len(busy._schedule.seats) == 1
    assert len(list(other)) > 0
    assert not busy.busy


def test_errors_are_returned_where_that_is_asked_for_and_the_others_go_on():
    busy, these = engine("model"), prompts(3)

    def nothing(ids, scores):
        return scores - np.inf

    settings = [GREEDY, replace(GREEDY, processors=(nothing,)), replace(GREEDY, seed=2)]
    first, failed, last = busy.generate(these, max_new_tokens=14, sampling=settings, errors="return")
    assert [first.tokens, last.tokens] == [alone(these, GREEDY)[i] for i in (0, 2)]
    assert (failed.finish_reason, failed.tokens) == ("error", [])
    assert "no probability to any token" in str(failed.error)
    with pytest.raises(InputError, match="no probability to any token after 0 tokens"):
        busy.generate(these, max_new_tokens=14, sampling=settings)
    assert not busy.busy
    with pytest.raises(InputError, match="errors must be 'raise' or 'return', got 'ignore'"):
        busy.generate(these, errors="ignore")


# Slots that are kept warm.


def converse(busy: Engine, chats: int, turns: int, order: Callable[[int], Sequence[tuple[int, int]]]) -> dict:
    """Outputs of every turn of every chat; a turn is the whole text so far and a few tokens more."""
    texts = {chat: list(range(3 + chat, 30 + chat)) for chat in range(chats)}
    found: dict[tuple[int, int], Output] = {}
    for chat, turn in order(turns):
        texts[chat] = [*texts[chat], 40 + chat % 8, 50 + turn]
        [found[chat, turn]] = busy.generate([texts[chat]], max_new_tokens=9, sampling=replace(GREEDY, seed=chat))
        texts[chat] += found[chat, turn].tokens
    return found


def test_sixteen_chats_of_six_turns_over_four_slots_prefill_a_prefix_once_while_they_fit():
    def four_at_a_time(turns: int) -> list[tuple[int, int]]:
        groups = [range(first, first + 4) for first in range(0, 16, 4)]
        return [(chat, turn) for group in groups for turn in range(turns) for chat in group]

    busy, fresh = engine("model", max_slots=4), engine("model", max_slots=4)
    made = converse(busy, 16, 6, four_at_a_time)
    reused = 0
    for (chat, turn), output in made.items():
        before = made[chat, turn - 1] if turn else None
        # All but the newest token of the turn before has been read.
        expected = 0 if before is None else before.prompt_tokens + len(before.tokens) - 1
        assert output.reused_tokens == expected, (chat, turn)
        reused += expected
    assert busy.num_reused_tokens == reused
    expected = {}
    for key, output in converse(fresh, 16, 6, four_at_a_time).items():
        expected[key] = output.tokens
        fresh.rest()
    assert {key: output.tokens for key, output in made.items()} == expected


def test_chats_that_do_not_fit_lose_the_slot_that_was_used_longest_ago():
    def in_turn(turns: int) -> list[tuple[int, int]]:
        return [(chat, turn) for turn in range(turns) for chat in range(5)]

    busy = engine("model", max_slots=4)
    made = converse(busy, 5, 3, in_turn)
    assert all(output.reused_tokens < 30 for output in made.values())
    again = converse(engine("model", max_slots=4), 5, 3, in_turn)
    assert {key: out.tokens for key, out in made.items()} == {key: out.tokens for key, out in again.items()}


def test_a_system_prompt_is_prefilled_once_for_requests_that_come_later_and_beside():
    busy = engine("model", max_slots=4)
    system, questions = list(range(3, 43)), [[50 + i, 9, 4 + i] for i in range(6)]
    these = [[*system, *question] for question in questions]
    made = busy.generate(these[:1], max_new_tokens=8, sampling=GREEDY)
    made += busy.generate(these[1:], max_new_tokens=8, sampling=GREEDY)
    assert [output.reused_tokens >= len(system) for output in made] == [False] + [True] * 5
    cold = engine("model", max_slots=4)
    for prompt, output in zip(these, made, strict=True):
        assert output.tokens == cold.generate([prompt], max_new_tokens=8, sampling=GREEDY)[0].tokens
        cold.rest()


def test_engines_that_keep_nothing_warm_give_slots_back_at_once():
    busy = engine("model", max_slots=4)
    plain = busy.plain()
    plain.generate(prompts(6), max_new_tokens=4, sampling=GREEDY)
    assert len(busy.parts.target._slots) == 0
    busy.generate(prompts(6), max_new_tokens=4, sampling=GREEDY)
    assert len(busy.parts.target._slots) == 4
    busy.rest()
    assert len(busy.parts.target._slots) == len(busy.parts.drafter.lm._slots) == 0


def test_a_plain_engine_takes_slots_that_its_origin_keeps_warm():
    busy = engine("model", max_slots=4)
    plain = busy.plain()
    expected = [output.tokens for output in plain.generate(prompts(6), max_new_tokens=4, sampling=GREEDY)]
    for made in (plain, plain.plain()):
        busy.generate(prompts(6), max_new_tokens=4, sampling=GREEDY)
        assert len(busy.parts.target._slots) == 4
        outputs = made.generate(prompts(6), max_new_tokens=4, sampling=GREEDY)
        assert [output.tokens for output in outputs] == expected
    # One request needs one slot, so the origin keeps the others.
    busy.generate(prompts(4), max_new_tokens=4, sampling=GREEDY)
    plain.generate(prompts(1), max_new_tokens=4, sampling=GREEDY)
    assert len(busy.parts.target._slots) == 3


# Fewest tokens, and ends.


def test_no_end_comes_before_min_tokens_greedy_or_drawn():
    for setting in (GREEDY, DRAWN, replace(DRAWN, seed=5)):
        for verifier in ("token", "match"):
            busy = engine("model", verifier)
            ends = tuple(range(3, 40))
            [out] = busy.generate([[5, 9, 4]], max_new_tokens=20, sampling=setting, stop_token_ids=ends, min_tokens=7)
            assert len(out.tokens) >= 7
            assert not set(out.tokens[:6]) & set(ends)
            assert out.finish_reason == "stop"
            assert out.tokens[-1] in ends
    with pytest.raises(InputError, match=r"min_tokens must be in 0 \.\. max_new_tokens=5, got 6"):
        engine("none").generate([[3]], max_new_tokens=5, min_tokens=6)


def test_top_logprobs_are_the_largest_of_each_place():
    busy = engine("model")
    [out] = busy.generate([[5, 9, 4]], max_new_tokens=8, sampling=GREEDY, logprobs=3)
    assert len(out.top_logprobs) == len(out.logprobs) == 8
    for token, own, top in zip(out.tokens, out.logprobs, out.top_logprobs, strict=True):
        assert len(top) == 3
        assert max(top, key=top.__getitem__) == token
        assert top[token] == pytest.approx(own, abs=1e-6)
    [none] = busy.generate([[5, 9, 4]], max_new_tokens=8, sampling=GREEDY)
    assert none.logprobs is None
    assert none.top_logprobs is None
