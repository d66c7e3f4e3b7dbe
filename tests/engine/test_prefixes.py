"""What many requests share is read once, and what ended requests leave in the cache stays below its limit."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

import outrider
from outrider.core.inputs import InputError
from outrider.core.types import Sampling
from outrider.engine.admission import LEAST_WAIT
from outrider.engine.engine import Engine
from outrider.engine.output import Output
from outrider.engine.prefixes import Prefixes
from tests.world.models import engine, free_slots

GREEDY = Sampling(temperature=0, seed=0)
DRAWN = Sampling(temperature=1, seed=7)
LONG = [3 + i % 50 for i in range(3 * LEAST_WAIT)]


def counted(busy: Engine) -> list[int]:
    """The number of tokens of each of the target's forwards from now on; the list grows."""
    fed, extend = [], busy.parts.target.extend

    def counting(segments, taps=()):
        fed.append(sum(len(segment.tokens) for segment in segments))
        return extend(segments, taps)

    busy.parts.target.extend = counting
    return fed


def limited(**options: object) -> Engine:
    """An engine with further options."""
    made = engine("none", max_slots=4)
    return Engine(made.parts, max_slots=4, **options)


def run(busy: Engine) -> dict[str, Output]:
    """The outputs of all queued requests."""
    found = {}
    while busy.busy:
        found |= {update.id: update.output for update in busy.step() if update.output is not None}
    return found


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_outputs_of_one_prompt_read_it_once(drafter: str) -> None:
    busy, alone = engine(drafter), engine(drafter)
    fed = counted(busy)
    outputs = busy.generate([LONG], n=4, max_new_tokens=6, sampling=DRAWN)
    assert sum(fed) < 2 * len(LONG), fed
    assert sorted(output.reused_tokens for output in outputs) == [0] + [len(LONG) - 1] * 3
    assert max(fed) < len(LONG) + 8
    expected = alone.generate([LONG], n=4, max_new_tokens=6, sampling=DRAWN)
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    assert len({tuple(output.tokens) for output in outputs}) > 1
    assert set(free_slots(busy)) == {8}


def test_a_long_prompt_that_is_read_in_chunks_is_read_once() -> None:
    busy = engine("none")
    busy.max_prefill_tokens = 100
    fed = counted(busy)
    outputs = busy.generate([LONG, [*LONG, 9, 4], [*LONG, 4, 4]], max_new_tokens=3, sampling=GREEDY)
    assert sum(fed) <= len(LONG) + 3 * 5, fed
    assert [output.reused_tokens >= len(LONG) - 1 for output in outputs] == [False, True, True]
    cold = engine("none")
    for prompt, output in zip([LONG, [*LONG, 9, 4], [*LONG, 4, 4]], outputs, strict=True):
        assert output.tokens == cold.generate([prompt], max_new_tokens=3, sampling=GREEDY)[0].tokens
        cold.rest()


def test_short_prompts_do_not_wait_for_each_other() -> None:
    busy = engine("none")
    outputs = busy.generate([LONG[:LEAST_WAIT]], n=3, max_new_tokens=2, sampling=GREEDY)
    assert [output.reused_tokens for output in outputs] == [0, 0, 0]
    assert {output.num_steps for output in outputs} == {2}


def test_a_prompt_that_waits_for_its_beginning_keeps_its_turn() -> None:
    busy = engine("none", max_slots=2)
    busy.max_prefill_tokens = 64
    order = []
    for name, prompt in (("first", LONG), ("second", LONG), ("behind", [5, 6])):
        busy.add(prompt, id=name, max_new_tokens=40 if name == "first" else 2, sampling=GREEDY)
    while busy.busy:
        order += [update.id for update in busy.step() if update.output is not None]
    assert order == ["second", "behind", "first"]


def test_a_prompt_goes_on_alone_if_the_request_that_read_it_is_cancelled() -> None:
    busy = engine("none")
    busy.max_prefill_tokens = 64
    busy.add(LONG, id="reads", max_new_tokens=4, sampling=GREEDY)
    busy.add(LONG, id="waits", max_new_tokens=4, sampling=GREEDY)
    busy.step()
    assert (set(busy.running), busy.num_waiting) == ({"reads"}, 1)
    busy.cancel("reads")
    found = run(busy)
    alone = engine("none").generate([LONG], max_new_tokens=4, sampling=GREEDY)[0]
    assert found["waits"].tokens == alone.tokens
    assert found["waits"].reused_tokens == 64


def test_the_least_recently_used_slots_leave_where_warm_tokens_are_limited() -> None:
    busy = limited(max_warm_tokens=60)
    # Each text has 25 + 1 tokens, of which the newest is in no cache.
    texts = [[10 * i + k % 9 + 3 for k in range(25)] for i in range(4)]
    for text in texts[:2]:
        busy.generate([text], max_new_tokens=1, sampling=GREEDY)
    assert busy.num_cached_tokens == 50
    busy.generate([texts[2]], max_new_tokens=1, sampling=GREEDY)
    assert busy.num_cached_tokens == 50
    again = [busy.generate([text], max_new_tokens=1, sampling=GREEDY)[0].reused_tokens for text in (texts[1], texts[0])]
    assert again == [24, 0]
    busy.generate([list(range(3, 64))], max_new_tokens=1, sampling=GREEDY)
    assert busy.num_cached_tokens == 0
    assert free_slots(busy) == [4]


@pytest.mark.parametrize("drafter", ["none", "model"])
def test_more_texts_than_slots_stay_in_slots_of_their_own(drafter: str) -> None:
    texts = [[10 * i + k % 9 + 3 for k in range(25)] for i in range(5)]
    parts = engine(drafter, max_slots=8).parts
    expected = [engine("none").generate([text], max_new_tokens=4, sampling=GREEDY)[0].tokens for text in texts]
    for warm, reused in ((6, [24] * 5), (0, [0] * 5)):
        busy = Engine(parts, max_slots=2, max_warm_slots=warm)
        for again in (False, True):
            for text in texts:
                busy.add(text, max_new_tokens=4, sampling=GREEDY)
            most, found = 0, {}
            while busy.busy:
                found |= {update.id: update.output for update in busy.step() if update.output is not None}
                most = max(most, len(busy.running))
            assert most == 2
            assert sorted(output.tokens for output in found.values()) == sorted(expected)
            assert sorted(output.reused_tokens for output in found.values()) == (reused if again else [0] * 5)
        assert busy.num_cached_tokens == (28 * 5 if warm else 28 * 2)
        busy.rest()
        assert set(free_slots(busy)) == {8}


def test_the_longest_beginning_is_what_comparing_all_texts_finds() -> None:
    dice = random.Random(0)
    for _ in range(300):
        texts = [[dice.randrange(2) for _ in range(dice.randrange(1, 9))] for _ in range(6)]
        read = [dice.randrange(len(text) + 1) for text in texts]
        states = [SimpleNamespace(slot=i, tokens=text) for i, text in enumerate(texts)]
        prefixes = Prefixes(SimpleNamespace(target=SimpleNamespace(length=read.__getitem__)), most=6)
        prefixes._warm, running = states[:4], states[4:]
        prompt = [dice.randrange(2) for _ in range(dice.randrange(1, 9))]
        most = [
            max(n for n in range(min(read[i], len(prompt) - 1) + 1) if texts[i][:n] == prompt[:n])
            for i in (3, 2, 1, 0, 4, 5)
        ]
        found = prefixes.longest(prompt, running)
        if max(most) == 0:
            assert found is None
        else:
            assert (found.state.slot, found.shared) == ((3, 2, 1, 0, 4, 5)[most.index(max(most))], max(most))
            assert found.warm == (found.state.slot < 4)


def test_plain_decoding_takes_the_slots_of_ended_requests_last() -> None:
    busy = Engine(engine("none", max_slots=4).parts, max_slots=2, max_warm_slots=2)
    plain = busy.plain()
    for text in ([3, 9, 4], [5, 6, 7]):
        busy.generate([text], max_new_tokens=2, sampling=GREEDY)
    plain.generate([[8, 8], [9, 9]], max_new_tokens=2, sampling=GREEDY)
    assert busy.num_cached_tokens == 2 * 4
    assert plain.num_cached_tokens == 0


def test_slots_of_ended_requests_are_an_option_of_loading() -> None:
    made = outrider.load(dtype="float32", probe=False, max_slots=2, max_warm_slots=3)
    assert (made.max_slots, made.max_warm_slots, made.parts.target.max_slots) == (2, 3, 5)
    assert replace(outrider.Setup(), max_warm_slots=0, max_warm_tokens=0).options() == {
        "max_warm_slots": 0,
        "max_warm_tokens": 0,
    }
    for refused in (lambda: limited(max_warm_slots=-1), lambda: outrider.load(probe=False, max_warm_slots=-1)):
        with pytest.raises(InputError, match="max_warm_slots must be >= 0, got -1"):
            refused()


def test_no_warm_tokens_keep_no_slot() -> None:
    busy = limited(max_warm_tokens=0)
    busy.generate([[3, 9, 4]], max_new_tokens=2, sampling=GREEDY)
    assert busy.num_cached_tokens == 0
    with pytest.raises(InputError, match="max_warm_tokens must be >= 0, got -1"):
        limited(max_warm_tokens=-1)


def test_the_limit_is_an_option_of_loading() -> None:
    assert outrider.load(dtype="float32", probe=False, max_warm_tokens=7).max_warm_tokens == 7
    assert replace(outrider.Setup(), max_warm_tokens=9).options() == {"max_warm_tokens": 9}
