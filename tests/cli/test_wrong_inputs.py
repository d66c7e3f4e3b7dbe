"""A hundred wrong inputs over all commands and `outrider.load`: one sentence, status 2, nothing written."""

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest

import outrider
from outrider.core.inputs import InputError
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from tests.cli.runs import refused

DIGITS = "9" * 5000
FILES: Mapping[str, str | bytes] = {
    "text.txt": "Once upon a time there was a dog.",
    "empty.txt": "",
    "latin.txt": b"caf\xe9",
    "digits.jsonl": f'{{"prompt": {DIGITS}}}',
    "digits.json": f'{{"max_slots": {DIGITS}}}',
    "digits.toml": f"max_slots = {DIGITS}",
    "deep.jsonl": '{"prompt": ' + "[" * 100_000,
    "deep.json": "[" * 100_000,
    "list.json": "[1]",
    "unknown.toml": "drafer = 'ngram'",
    "broken.toml": "max_slots =",
    "number.jsonl": "3",
    "both.jsonl": '{"prompt": "a", "turns": ["b"]}',
    "key.jsonl": '{"question": "a"}',
    "hello.jsonl": "hello",
    "schema.json": '{"type": ',
    "packed.jsonl.gz": "not packed",
    "full/a.txt": "mine",
    "empty/.keep": "",
    "model/config.json": "{}",
    "broken/config.json": "{",
    "letters/tokenizer.json": "{",
}
LINES = """
export --to vlm --out new
export --to vllm --out full
export --to vllm --out new --num-speculative-tokens 0
export --to sglang --out new --check
export --to llama.cpp --out new --llama-cpp nosuch
generate --prompt a --seed DIGITS
generate --prompt a --seed -1
generate --prompt a --seed 99999999999999999999999
generate --prompt a -n DIGITS
generate --prompt a -n -1
generate --prompt a --max-context 1
generate --prompt a --max-context 2
generate --prompt a --max-new-tokens -3
generate --prompt a --pad-to 100000
generate --prompt a --max-slots 99999999999999999999999999
generate --prompt a --vocab-size 99999999999999999999999999
generate --prompt a --min-tokens 9 --max-new-tokens 4
generate --prompt a --length fixed:DIGITS
generate --prompt a --length fixed:99999999999999999999999
generate --prompt a --length goodput:most=0
generate --prompt a --length svip:threshold=nan
generate --prompt a --drafter ngram:DIGITS
generate --prompt a --drafter ngram:=3
generate --prompt a --drafter :
generate --prompt a --drafter model:path=
generate --prompt a --drafter ./nowhere
generate --prompt a --drafter broken
generate --prompt a --drafter eagle:path=empty
generate --prompt a --drafter suffix:corpus=digits.jsonl
generate --prompt a --drafter suffix:min_match=0
generate --prompt a --tree gumbel:branching=DIGITSxDIGITS
generate --prompt a --tree gumbel:branching=9999999x9999999
generate --prompt a --tree dynamic:num_nodes=100000
generate --prompt a --tree iid:5000
generate --prompt a --tree fixed:children=9999
generate --prompt a --verifier lenient
generate --prompt a --logit-bias '{"DIGITS": 1}'
generate --prompt a --logit-bias '[1]'
generate --prompt a --logprobs 3
generate --prompt a --device-map '{"": DIGITS}'
generate --prompt a --quantization-config '{"a": DIGITS}'
generate --prompt a --quantization-config x
generate --prompt a --weights q4k
doctor --target TARGET --weights q8
generate --prompt a --device cuda:DIGITS
generate --prompt a --attn-implementation flsh
generate --prompt a --forward fast
generate --prompt a --config digits.json
generate --prompt a --config digits.toml
generate --prompt a --config deep.json
generate --prompt a --config list.json
generate --prompt a --config unknown.toml
generate --prompt a --config broken.toml
generate --prompt a --config full
generate --prompt a --save-config text.txt/setup.toml
generate --prompt a --output full
generate --prompt a --output text.txt/out.jsonl
generate --prompt a --output hello.jsonl
generate --prompt a --json-schema schema.json
generate --prompt a --json-schema full
generate --prompt a --tokenizer letters
generate --prompt a --tokenizer full
generate --prompt a --target model
generate --prompt a --target broken
generate --prompt a --target full
generate --prompt a --target text.txt
generate --prompt a --target 'org name/with space'
generate --prompt a --target a//b
generate --prompt a --learn --drafter ngram
generate --prompt a --learn --learn-drafts 100000000
generate --prompt a --learn --learn-divergence nosuch
generate --prompt a extra
generate --prompt
generate --temperature hot
generate --json=yes
generate --prompt-file digits.jsonl
generate --prompt-file deep.jsonl
generate --prompt-file number.jsonl
generate --prompt-file both.jsonl
generate --prompt-file latin.txt
generate --prompt-file full
generate --prompt-file empty.txt
generate
chat --max-new-tokens 0
chat --temperature -1
chat --json-schema nosuch.json
chat --tokenizer full
prove --num-draws -1
prove --temperature inf
prove --max-context 2
prove --drafter nosuch
doctor --text nosuch.txt
doctor --text empty.txt
doctor --rounds -1
doctor --num-speculative-tokens 99999999999999999999
doctor --tree chain
doctor --target model
prepare --forward eager
prepare --target full
methods extra
prune experts --data text.txt --out new --experts 2
prune shape --data text.txt --out new
prune shape --data nosuch.txt --out new --layers 1
prune shape --data key.jsonl --out new --layers 1
prune shape --data digits.jsonl --out new --layers 1
prune shape --data packed.jsonl.gz --out new --layers 1
prune shape --data text.txt --out full --layers 1
prune shape --data text.txt --out new --width 99999999999999999999999
prune tokens --data text.txt --out full/a.txt
prune tokens --data text.txt --out text.txt/counts.json
prune tokens --data empty.txt --out new.json
prune tokens --data digits.jsonl --out new.json
prune tokens --data text.txt --out new.json --limit -1
prune tokens --data text.txt --out new.json --target full
prune tokens --data text.txt
prune plan --layers 1,,2
prune plan --alpha 2 --layers 1
prune plan --parameters 0 --layers 1
train nosuch
train data --data nosuch.txt --out new.jsonl
train data --data key.jsonl --out new.jsonl
train data --data text.txt --out hello.jsonl --json
train data --data text.txt --out new.jsonl --limit 0
train data --data text.txt --out new.jsonl --column x
train data --data text.txt --out new.jsonl --max-new-tokens 0
train data --data text.txt
train distill --target TARGET --drafter DRAFT --data text.txt --out new --steps 0
train distill --target TARGET --drafter DRAFT --data text.txt --out new --divergence jsd:beta=3
train distill --target TARGET --drafter DRAFT --data text.txt --out new --watch-temperature 3
train distill --target TARGET --drafter DRAFT --data text.txt --out new --device warp
train distill --target full --drafter DRAFT --data text.txt --out new
train steer --target TARGET --drafter DRAFT --data text.txt --out new --taps a
train medusa --target TARGET --data nosuch.txt --out new
train eagle --target TARGET --data digits.jsonl --out new
train eagle3 --target TARGET --data key.jsonl --out new
train dflash --target TARGET --data deep.jsonl --out new
train dflare --target TARGET --data latin.txt --out new
train dspark --target TARGET --data number.jsonl --out new
train poss --target TARGET --data packed.jsonl.gz --out new
train griffin --target TARGET --data empty.txt --out new
train jakiro --target TARGET --data full/nosuch --out new
train blockwise --target TARGET --data text.txt --out new --batch-size 0
train parallel --target TARGET --data text.txt --out new --precision int8
"""
COMMANDS = LINES.strip().splitlines()


def wrong_files(folder: Path) -> None:
    """Write the files that the commands name."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def everything(folder: Path) -> dict[str, bytes | None]:
    """All files and folders in a folder, and what is in them."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("wrong")
    wrong_files(place)
    return place


@pytest.mark.parametrize("line", COMMANDS)
def test_a_wrong_input_is_one_sentence_and_writes_nothing(monkeypatch, capsys, folder, line):
    monkeypatch.chdir(folder)
    before = everything(folder)
    places = {"DIGITS": DIGITS, "TARGET": str(EMBEDDED_TARGET), "DRAFT": str(EMBEDDED_DRAFT)}
    arguments = shlex.split(line)
    for name, value in places.items():
        arguments = [each.replace(name, value) for each in arguments]
    with open(os.devnull) as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        err = refused(monkeypatch, capsys, *arguments)
    assert (err.strip().count("\n"), len(err) < 1000) == (0, True), err[-1000:]
    assert not any(word in err for word in ("Error:", "set_int_max_str_digits"))
    assert everything(folder) == before


OPTIONS: tuple[Mapping[str, object], ...] = (
    {"target": 3},
    {"target": ""},
    {"target": "a/b/c"},
    {"target": ["a"]},
    {"drafter": 3},
    {"drafter": "ngrm"},
    {"length": "fixed:" + DIGITS},
    {"tree": "gumbel:branching=999x999x999"},
    {"max_slots": 10**5000},
    {"max_context": -(10**30)},
    {"max_context": 2},
    {"max_prefill_tokens": 0},
    {"vocab_size": 10**5000},
    {"device_map": "{" + DIGITS},
    {"quantization_config": '{"a": ' + DIGITS + "}"},
    {"dtype": "int8"},
    {"device": "cuda:" + DIGITS},
    {"tokenizer": "~/no/such/folder"},
    {"forwrd": "eager"},
    {"threads": 0},
)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: str(next(iter(options))))
def test_wrong_options_of_load_are_one_sentence(options):
    with pytest.raises(InputError) as refused:
        outrider.load(**options)
    said = str(refused.value)
    assert "\n" not in said
    assert 10 < len(said) < 1000


def test_a_hundred_wrong_inputs_are_tried():
    assert len(set(COMMANDS)) + len(OPTIONS) >= 100
    commands = {
        " ".join(words[:2]) if words[0] in ("train", "prune") else words[0] for words in map(str.split, COMMANDS)
    }
    assert len(commands) >= 24


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (("generat",), "`outrider --help` lists the commands"),
        (("train", "egale"), "`outrider train --help` lists the commands"),
        (("generate", "--lenght", "5"), "`outrider generate --help` lists the options"),
    ],
)
def test_a_wrong_word_names_the_help_that_has_the_right_one(monkeypatch, capsys, typed, says):
    assert refused(monkeypatch, capsys, *typed).rstrip().endswith(says)
