"""Text as it streams: whole characters, the same however tokens are grouped, ending before a stop string."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outrider.engine.text import Ending, TextStream

CORPUS = [
    "the cat sat on the mat and the dog ran to the park",
    "hello world, hello there; stop here. stop there! end of text",
    "naïve café, déjà vu, Ünïcödé",
    "日本語のテキスト、你好世界，안녕하세요",
    "👩‍👩‍👧 family 🦊🎈 fox 🇩🇪 flag",
    "def f(x):\n    return x + 1\n",
]
WORDS = [
    "the ",
    "cat",
    " sat",
    "stop",
    " here",
    "é",
    "日本",
    "語",
    "🦊",
    "👩‍👩‍👧",
    "\n\n",
    "  ",
    "�",
    "x",
    "<e",
    "hello",
]
texts = st.lists(st.sampled_from(WORDS), max_size=12).map("".join)


Maker = Callable[[], PreTrainedTokenizerFast]


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen: a character may take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@cache
def metaspace() -> PreTrainedTokenizerFast:
    """SentencePiece as in Llama 2: a leading space is dropped at the start of a text, unknown characters are bytes."""
    words = ["▁", "▁the", "▁cat", "▁sat", "▁stop", "▁here", "▁hello", *"abcdefghijklmnopqrstuvwxyz", "<", "\n"]
    vocabulary = ["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)], *words]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0) for piece in vocabulary], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


@cache
def marked() -> PreTrainedTokenizerFast:
    """The first tokenizer with two more special tokens."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(byte_level().backend_tokenizer.to_str()))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    return tokenizer


# GPT-2's alphabet: printable Latin-1 stands for itself, every other byte for the next code point from 256 on.
PLAIN = [byte for byte in range(256) if chr(byte).isprintable() and not chr(byte).isspace()]
BYTES = {byte: chr(byte) for byte in PLAIN}
BYTES |= {byte: chr(256 + i) for i, byte in enumerate(byte for byte in range(256) if byte not in BYTES)}

TOKENIZERS = [pytest.param(byte_level, id="byte_level"), pytest.param(metaspace, id="metaspace")]


def whole(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def byte_tokens(text: str) -> list[int]:
    """One token per byte of the text, as a model may choose to write it."""
    return byte_level().convert_tokens_to_ids([BYTES[byte] for byte in text.encode()])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tokens, the groups in which they come, and strings that end their text."""

    tokenizer: PreTrainedTokenizerFast
    tokens: list[int]
    stop: list[str]
    pushes: list[list[int]]
    min_tokens: int = 0

    def ending(self) -> Ending:
        return Ending(self.tokenizer, self.stop, min_tokens=self.min_tokens)


def groups(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Tokens in groups of these sizes, the rest one by one."""
    found, at = [], 0
    for size in [*sizes, *[1] * len(tokens)]:
        found.append(list(tokens[at : at + size]))
        at += size
    return [group for group in found if group]


def streamed(ending: Ending, pushes: Sequence[Sequence[int]]) -> tuple[list[str], list[int]]:
    """The pieces handed out, and the tokens kept."""
    pieces, kept = [], []
    for tokens in pushes:
        count = ending.keep(tokens)
        kept += tokens[:count]
        pieces.append(ending.take())
        if ending.stopped:
            break
    return [*pieces, ending.finish()], kept


@pytest.mark.parametrize("make", TOKENIZERS)
@given(data=st.data())
def test_pieces_add_up_to_the_decoded_text(make: Maker, data: st.DataObject) -> None:
    tokenizer = make()
    tokens = tokenizer(data.draw(texts), add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    assert "".join([stream.push(token) for token in tokens] + [stream.finish()]) == whole(tokenizer, tokens)


@given(data=st.data())
def test_pieces_add_up_for_any_tokens_at_all(data: st.DataObject) -> None:
    """Also for bytes that are no UTF-8, and special tokens in between."""
    tokenizer = byte_level()
    tokens = data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30))
    stream = TextStream(tokenizer)
    assert "".join([stream.push(token) for token in tokens] + [stream.finish()]) == whole(tokenizer, tokens)


@given(data=st.data())
def test_words_behind_broken_bytes_are_not_lost(data: st.DataObject) -> None:
    """Byte fallback turns a whole run of bytes into replacements once one is wrong, also those already handed out."""
    tokenizer = metaspace()
    first_byte = tokenizer.convert_tokens_to_ids("<0x00>")
    run = data.draw(st.lists(st.integers(first_byte, first_byte + 255), max_size=8))
    words = tokenizer("the cat sat", add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer)
    text = "".join([stream.push(token) for token in [*words, *run, *words]] + [stream.finish()])
    assert text.startswith("the cat sat")
    assert text.endswith(" the cat sat")


@pytest.mark.parametrize("make", TOKENIZERS)
@given(data=st.data())
def test_no_piece_holds_part_of_a_character(make: Maker, data: st.DataObject) -> None:
    tokenizer = make()
    text = data.draw(st.lists(st.sampled_from([w for w in WORDS if w != "�"]), max_size=12).map("".join))
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    assert "�" not in "".join(pieces)
    assert stream.finish() == ""


def test_a_character_comes_with_the_token_that_completes_it_and_not_later() -> None:
    stream = TextStream(byte_level())
    assert [stream.push(token) for token in byte_tokens("a🦊")] == ["a", "", "", "", "🦊"]


def test_an_incomplete_character_at_the_end_is_one_replacement() -> None:
    stream = TextStream(byte_level())
    assert "".join(stream.push(token) for token in byte_tokens("b🦊")[:3]) == "b"
    assert stream.finish() == "�"


@pytest.mark.parametrize("make", TOKENIZERS)
def test_special_tokens_give_no_text_and_keep_the_space_behind_them(make: Maker) -> None:
    tokenizer = make()
    hello, cat = (tokenizer(word, add_special_tokens=False)["input_ids"] for word in ("hello", "hello cat"))
    tokens = [*hello, tokenizer.eos_token_id, *cat[len(hello) :]]
    stream = TextStream(tokenizer)
    assert "".join([stream.push(token) for token in tokens] + [stream.finish()]) == "hello cat"


def test_a_window_stays_short() -> None:
    """Decoding costs the newest tokens, not the text so far."""
    tokenizer = byte_level()
    longest = 0

    class Measuring(PreTrainedTokenizerFast):
        def decode(self, token_ids, *args, **named):  # type: ignore[no-untyped-def]
            nonlocal longest
            longest = max(longest, len(token_ids))
            return super().decode(token_ids, *args, **named)

    stream = TextStream(Measuring(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<eos>"))
    for token in tokenizer(" ".join(CORPUS) * 3)["input_ids"]:
        stream.push(token)
    assert longest <= 12


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A text in large or small tokens, and stop strings of which most occur in it, overlap, or nearly occur."""
    text = draw(texts)
    make = draw(st.sampled_from([byte_level, metaspace, None]))
    tokens = byte_tokens(text) if make is None else make()(text, add_special_tokens=False)["input_ids"]
    stops = st.sampled_from(["xx", "stop there", "🦊"])
    if text:
        cuts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 6))
        stops |= cuts.map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    stop = draw(st.lists(stops, max_size=3))
    sizes = draw(st.lists(st.integers(1, 6), max_size=20))
    least = draw(st.integers(0, 6))
    pushes = groups(tokens, sizes)
    return Case(tokenizer=(make or byte_level)(), tokens=tokens, stop=stop, pushes=pushes, min_tokens=least)


@given(case=cases())
def test_text_and_tokens_are_the_same_however_many_each_step_brings(case: Case) -> None:
    single, grouped = case.ending(), case.ending()
    one_by_one, kept = streamed(single, [[token] for token in case.tokens])
    in_groups, also_kept = streamed(grouped, case.pushes)
    assert "".join(in_groups) == "".join(one_by_one) == single.text == grouped.text
    assert also_kept == kept
    assert single.stopped == grouped.stopped


def first_stop(text: str, least: int, stop: Sequence[str]) -> tuple[int, int] | None:
    """Where the stop string begins and ends that ends first behind `least` characters; of several the longest."""
    found = [(at, at + len(each)) for each in stop for at in range(len(text)) if text.startswith(each, at) and each]
    return min((each for each in found if each[1] > least), key=lambda each: (each[1], each[0]), default=None)


@given(case=cases())
def test_the_text_ends_before_the_stop_string_that_ends_first_behind_min_tokens(case: Case) -> None:
    """However the text is split into tokens: the oracle sees the whole text."""
    pieces, kept = streamed(case.ending(), case.pushes)
    stream, lengths = TextStream(case.tokenizer), [0]
    text = ""
    for token in case.tokens:
        text += stream.push(token)
        lengths.append(len(text))
    if len(case.tokens) > case.min_tokens:
        text += stream.finish()
    found = first_stop(text, lengths[min(case.min_tokens, len(case.tokens))], case.stop)
    if len(case.tokens) <= case.min_tokens:
        text += stream.finish()
    assert "".join(pieces) == text[: len(text) if found is None else found[0]]
    completes = [i for i, length in enumerate(lengths) if found is not None and length >= found[1]]
    assert len(kept) == (completes[0] if completes else len(case.tokens))


@given(data=st.data())
def test_special_tokens_stand_where_they_were_and_stop_strings_are_looked_for_without_them(data: st.DataObject) -> None:
    tokenizer = marked()
    marks = dict(zip(tokenizer.convert_tokens_to_ids(["<a>", "<b>"]), ["<a>", ""], strict=True))
    words = st.sampled_from(["the ", "cat", "stop", "x", "\n\n"])
    tokens: list[int] = []
    for part in data.draw(st.lists(words | st.sampled_from(sorted(marks)), max_size=12)):
        tokens += [part] if isinstance(part, int) else tokenizer(part, add_special_tokens=False)["input_ids"]
    pieces = ["" if token in marks else tokenizer.decode([token]) for token in tokens]
    stop = data.draw(st.lists(st.sampled_from(["\n", "stop", "top", "tx", "cats", "he c", "xx"]), max_size=3))
    least = data.draw(st.integers(0, 4))
    includes = data.draw(st.booleans())
    ending = Ending(tokenizer, stop, include_stop=includes, min_tokens=least, hidden=[i for i in marks if not marks[i]])
    found = first_stop("".join(pieces), len("".join(pieces[:least])), stop)
    end = len("".join(pieces)) if found is None else found[1] if includes else found[0]
    wanted, place = "", 0
    for token, piece in zip(tokens, pieces, strict=True):
        if token in marks and (found is None or place < end + (not includes)):
            wanted += marks[token]
        wanted += piece[: max(0, end - place)]
        place += len(piece)
    handed_out, _ = streamed(ending, groups(tokens, data.draw(st.lists(st.integers(1, 6), max_size=20))))
    assert "".join(handed_out) == wanted


def test_a_stop_string_that_begins_within_min_tokens_and_ends_behind_them_counts() -> None:
    tokenizer = byte_level()
    tokens = byte_tokens("abcabc")
    assert streamed(Ending(tokenizer, ["bc"], min_tokens=2), [tokens]) == (["a", ""], tokens[:3])
    assert streamed(Ending(tokenizer, ["bc"], min_tokens=3), [tokens]) == (["abca", ""], tokens)


@given(case=cases())
def test_nothing_handed_out_is_taken_back_and_only_possible_stops_are_held(case: Case) -> None:
    ending, stream = case.ending(), TextStream(case.tokenizer)
    out = so_far = ""
    for token in case.tokens:
        ending.keep([token])
        so_far += stream.push(token)
        out += ending.take()
        assert ending.text.startswith(out)
        if ending.stopped:
            break
        held = so_far[len(out) :]
        assert so_far.startswith(out)
        assert held == "" or any(stop.startswith(held) for stop in case.stop)


def test_a_stop_string_that_begins_and_does_not_end_is_text_after_all() -> None:
    tokenizer = byte_level()
    ending = Ending(tokenizer, ["stop here"])
    tokens = tokenizer("the stop there", add_special_tokens=False)["input_ids"]
    assert "".join(streamed(ending, [[token] for token in tokens])[0]) == "the stop there"
    ending = Ending(tokenizer, ["stop here"])
    tokens = tokenizer("the stop", add_special_tokens=False)["input_ids"]
    assert ending.keep(tokens) == len(tokens)
    assert ending.take() == "the "
    assert ending.finish() == "stop"
    assert ending.text == "the stop"


def test_tokens_behind_the_stop_in_the_same_step_are_not_kept() -> None:
    tokenizer = byte_level()
    tokens = tokenizer("the cat sat", add_special_tokens=False)["input_ids"]
    behind = tokenizer(" on the mat", add_special_tokens=False)["input_ids"]
    ending = Ending(tokenizer, [" sat"])
    assert ending.keep([*tokens, *behind]) == len(tokens)
    assert (ending.text, ending.stopped) == ("the cat", True)


def test_finishing_twice_gives_nothing_more() -> None:
    ending = Ending(byte_level(), ())
    ending.keep(byte_level()("hello", add_special_tokens=False)["input_ids"])
    assert (ending.take(), ending.finish(), ending.finish()) == ("hello", "", "")
