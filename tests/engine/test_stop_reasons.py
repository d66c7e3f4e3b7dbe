"""What ended an output, and whether its text keeps it."""

import pytest

import outrider
from outrider.core.types import Sampling
from outrider.engine.text import Ending, TextStream
from tests.world.models import engine
from tests.world.tokenizers import byte_level

GREEDY = Sampling(temperature=0, seed=0)


@pytest.mark.parametrize("include", [False, True])
def test_a_text_ends_before_its_stop_string_or_behind_it(include):
    tokenizer = byte_level(300)
    text = "The sea was calm and the man was glad."
    for stop, end in ((("man", "calm"), "calm"), (("m and the m",), "m and the m"), (("glad",), "glad")):
        for size in (1, 2, 5, 40):
            ending = Ending(tokenizer, stop, include_stop=include)
            ids, shown = tokenizer(text)["input_ids"], ""
            for first in range(0, len(ids), size):
                kept = ending.keep(ids[first : first + size])
                shown += ending.take()
                if ending.stopped:
                    break
            shown += ending.finish()
            at = text.index(end)
            assert ending.stopped_by == end
            assert shown == ending.text == text[: at + len(end) if include else at]
            assert 1 <= kept <= size


def test_an_output_says_which_string_or_token_ended_it():
    busy = outrider.load(dtype="float32")
    [free] = busy.generate(["Once upon a time"], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)
    assert (free.finish_reason, free.stop_reason) == ("length", None)
    stop = free.text[20:26]
    for include in (False, True):
        [out] = busy.generate(
            ["Once upon a time"], max_new_tokens=40, sampling=GREEDY, stop=["~~~", stop], include_stop=include
        )
        assert (out.finish_reason, out.stop_reason) == ("stop", stop)
        at = free.text.index(stop)
        assert out.text == free.text[: at + len(stop) if include else at]
    [out] = busy.generate(["Once upon a time"], max_new_tokens=40, sampling=GREEDY, stop_token_ids=[free.tokens[6]])
    assert (out.finish_reason, out.stop_reason) == ("stop", free.tokens[6])


def test_a_stop_token_gives_no_text_unless_it_is_wanted():
    busy = outrider.load(dtype="float32")
    [free] = busy.generate(["Once upon a time"], max_new_tokens=12, sampling=GREEDY, ignore_eos=True)
    at = free.tokens.index(free.tokens[6])
    options = {"max_new_tokens": 12, "sampling": GREEDY, "stop_token_ids": [free.tokens[at]]}
    [without] = busy.generate(["Once upon a time"], **options)
    [within] = busy.generate(["Once upon a time"], include_stop=True, **options)
    [stopped] = busy.generate(["Once upon a time"], stop=["~~~"], **options)
    assert without.tokens == within.tokens == free.tokens[: at + 1]
    assert without.text == stopped.text == busy.tokenizer.decode(free.tokens[:at])
    assert within.text == busy.tokenizer.decode(free.tokens[: at + 1])
    assert within.text != without.text


def test_requests_without_a_tokenizer_say_their_end_token():
    [free] = engine("model").generate([[3, 9, 4]], max_new_tokens=20, sampling=GREEDY)
    [out] = engine("model", eos_ids=frozenset({free.tokens[5]})).generate(
        [[3, 9, 4]], max_new_tokens=20, sampling=GREEDY
    )
    assert out.stop_reason == free.tokens[5]
    assert out.tokens[-1] == free.tokens[5]


def test_special_tokens_give_text_where_they_are_wanted():
    tokenizer = byte_level(300)
    ids = [*tokenizer("the sea")["input_ids"], tokenizer.eos_token_id, *tokenizer("é")["input_ids"]]
    for special, text in ((False, "the seaé"), (True, "the sea<|end|>é")):
        stream = TextStream(tokenizer, special=special)
        assert "".join([*map(stream.push, ids), stream.finish()]) == text
