"""Drivers answer or say why not, tokens are compared before speeds, and what is left out is told by a sentence."""

import json
import sys
import zipfile
from dataclasses import replace

import pytest

from outrider import InputError
from outrider.bench.engines.agreement import agreement
from outrider.bench.engines.driver import Asked, Options
from outrider.bench.engines.engine import Engine, converted
from outrider.bench.engines.environments import CannotMake, Environment, Room
from outrider.bench.engines.llama import compiler
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.engines.vllm import requirements
from outrider.embedded import EMBEDDED_DRAFT
from outrider.lm.hf.open import open_model
from recipes import peers, peers_runs
from recipes.peers_runs import ENGINES

PROMPTS = [[0, 100, 200, 300, 400], [0, 500, 600]]


def options(mode: str) -> Options:
    place = str(EMBEDDED_DRAFT)
    return Options(
        mode=mode, target=place, draft=place, dtype="float32", threads=1, draft_tokens=3, ngram=3, batch=2, context=64
    )


def asked(prompts: list[list[int]], temperature: float = 0.0) -> Asked:
    return Asked(prompts=prompts, new_tokens=12, temperature=temperature, seed=1)


def scripted(_: Room | None) -> list[str]:
    return [sys.executable, "-m", "tests.recipes.scripted_driver"]


SCRIPTED = {
    "scripted": Engine(title="Scripted", modes=("plain", "alone", "dies", "short", "does not start"), command=scripted)
}


def test_a_driver_decodes_until_its_input_ends():
    target = open_model(str(EMBEDDED_DRAFT), dtype="float32", device="cpu")
    with Process(ENGINES["transformers"].command(None)) as driver:
        driver.start(options("draft model"))
        [output] = driver.ask(asked(PROMPTS[:1])).tokens
        assert len(output) == 12
        found = agreement(target, PROMPTS[0], output)
        assert (found.first, found.gap) == (None, 0)
        changed = [*output[:4], output[4] + 1, *output[5:]]
        found = agreement(target, PROMPTS[0], changed)
        assert found.first == 4
        assert found.gap > 0
        # transformers assists one prompt at a time; the driver says so and goes on.
        with pytest.raises(Refused, match="batch_size"):
            driver.ask(asked(PROMPTS))
        drawn = driver.ask(asked(PROMPTS[:1], temperature=1.0))
        assert [len(tokens) for tokens in drawn.tokens] == [12]
        assert drawn.seconds > 0


@pytest.mark.parametrize(
    ("program", "sentence"),
    [
        ("raise SystemExit('no such instruction')", "exit status 1; its last line: no such instruction"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL; its last line: none"),
        ("import time; time.sleep(60)", "no answer within 0.5 seconds"),
    ],
)
def test_a_driver_that_does_not_start_says_how_it_ended(program, sentence):
    with pytest.raises(Stopped, match=sentence):
        Process([sys.executable, "-c", program], patience=0.5 if "sleep" in program else 60).start(options("plain"))


def test_a_driver_that_does_not_exist_is_told_by_a_sentence():
    with pytest.raises(Stopped, match="cannot be started: No such file"):
        Process(["/no/such/driver"]).start(options("plain"))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A whole run of drivers that answer as they are told."""
    place = tmp_path_factory.mktemp("peers")
    plan = peers_runs.Plan(
        out=place / "out",
        engines=("scripted",),
        environments=place,
        num_prompts=2,
        max_new_tokens=6,
        rounds=2,
        batch_sizes=(1, 2),
        threads=1,
    )
    found = peers.run(plan, SCRIPTED)
    rows = [json.loads(line) for line in (plan.out / "rows.jsonl").read_text().splitlines()]
    return plan, found, rows


def test_what_an_engine_cannot_do_is_left_out_with_a_sentence_and_the_others_go_on(made):
    _, found, rows = made
    left_out = {what: why for table in found.tables if table.title == "Left out" for what, why in table.lines}
    assert (
        left_out["Scripted, does not start"]
        == "it ended with exit status 1; its last line: RuntimeError: no such instruction"
    )
    assert left_out["Scripted, alone, temperature 0, batch 2"] == "ValueError: one prompt at a time"
    assert left_out["Scripted, short, temperature 0, batch 1"] == "it wrote 5 tokens for 1 prompts, not 6 for 1"
    [dead] = [what for what in left_out if what.startswith("Scripted, dies")]
    assert dead.endswith(", and all runs after it")
    assert left_out[dead] == "it ended with SIGKILL; its last line: out of luck"
    counts = {
        name: sum(row["method"] == f"Scripted, {name}" for row in rows) for name in ("plain", "alone", "dies", "short")
    }
    # Two prompts alone and together, compared once and timed in two rounds at two temperatures.
    assert counts == {"plain": 3 + 12, "alone": 2 + 8, "dies": 3, "short": 0}


def test_an_engine_with_other_tokens_gets_no_speed(made):
    _, found, rows = made
    tokens, speeds = found.tables[:2]
    compared = [row for row in rows if row["phase"] == "compared"]
    assert all(
        first is not None and gap > 0.5 for row in compared for first, gap in zip(row["first"], row["gap"], strict=True)
    )
    assert ["Scripted, plain", 1, "0 of 2"] in [line[:3] for line in tokens.lines]
    assert {line[-1] for line in tokens.lines} == {"no"}
    assert speeds.lines == [
        ["Scripted, plain", *["other tokens"] * 4],
        ["Scripted, alone", "other tokens", "other tokens", "-", "-"],
    ]


def test_a_second_run_takes_no_turn_again(made):
    plan, _, rows = made
    peers.run(plan, SCRIPTED)
    assert [json.loads(line) for line in (plan.out / "rows.jsonl").read_text().splitlines()] == rows


def row(method: str, seconds: float, *, batch: int = 1, round: int = 0, gap: float = 0.0, temperature: float = 0.0):
    return {
        "method": method,
        "requests": batch,
        "temperature": temperature,
        "round": round,
        "prompt": "a",
        "tokens": 96,
        "seconds": seconds,
        "digest": "same",
        "first": [None if gap == 0 else 3],
        "gap": [gap],
    }


ROWS = [
    row("Ours, plain", 2.0),
    row("Ours, plain", 1.0, round=1),
    row("Theirs, plain", 0.5),
    row("Theirs, plain", 0.5, round=1),
]


def test_speeds_are_medians_over_rounds_with_their_range():
    told, methods = [row("Ours, plain", 1.0), row("Theirs, plain", 1.0, gap=0.2)], ["Ours, plain", "Theirs, plain"]
    table = peers.speeds_table(ROWS, told, 0.5, methods)
    assert table.head == ("engine", "batch 1, temperature 0")
    assert table.lines == [["Ours, plain", "64 [48, 96]"], ["Theirs, plain", "192 [192, 192]"]]


def test_the_fastest_is_named_with_ours_beside_it():
    told = [row("Ours, plain", 1.0), row("Theirs, plain", 1.0)]
    [sentence] = peers.fastest(ROWS, told, 0.5, "Ours")
    assert sentence == (
        "Batch 1, temperature 0: the fastest is Theirs, plain with 192 tokens per second; the fastest of Ours is "
        "Ours, plain with 64, 0.33 of that."
    )
    # One that says something else does not compete.
    [sentence] = peers.fastest(ROWS, [told[0], row("Theirs, plain", 1.0, gap=0.7)], 0.5, "Ours")
    assert "the fastest is Ours, plain" in sentence


def test_tokens_that_change_between_runs_are_told():
    told = [row("Ours, plain", 1.0), {**row("Theirs, plain", 1.0), "digest": "another"}]
    assert peers.others(told, ROWS) == ["Theirs, plain (2 of 2)"]


def test_a_command_that_fails_is_told_by_its_last_error(tmp_path):
    room = Room(place=tmp_path, pins=())
    program = "print('Collecting\\nERROR: No matching distribution found for vllm\\n'); raise SystemExit(1)"
    with pytest.raises(CannotMake, match=r"says: No matching distribution found for vllm$"):
        room.run(sys.executable, "-c", program)
    assert "Collecting" in (tmp_path / "log.txt").read_text()
    with pytest.raises(CannotMake, match="/no/such/compiler cannot be run: No such file"):
        room.run("/no/such/compiler")


def test_without_a_compiler_the_sentence_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CannotMake, match=r"install one \(c\+\+, g\+\+ or clang\+\+\)"):
        compiler()


def test_an_environment_is_made_once_and_again_for_other_pins(tmp_path):
    rooms = []
    first = Environment(name="one", pins=("a==1",), make=rooms.append)
    room = first.made(tmp_path)
    assert room.python.exists()
    assert first.made(tmp_path) == room
    assert len(rooms) == 1
    assert first.is_made(tmp_path)
    assert not replace(first, pins=("a==2",)).is_made(tmp_path)


def test_a_peer_whose_environment_cannot_be_made_is_left_out(tmp_path):
    (tmp_path / "file").write_text("")
    other = Environment(name="one", pins=(), make=lambda _: None)
    with pytest.raises(CannotMake, match="one cannot be written"):
        other.made(tmp_path / "file")


def test_a_wheel_is_required_without_some_packages_and_extras(tmp_path):
    about = (
        "Name: x\nRequires-Dist: torch==2\nRequires-Dist: torchaudio\nRequires-Dist: pandas; extra == 'bench'\n\nText"
    )
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        wheel.writestr("x-1.dist-info/METADATA", about)
    assert requirements(tmp_path / "x.whl", without=("torchaudio",)) == ["torch==2"]


def test_a_model_is_converted_once(tmp_path):
    (tmp_path / "one").mkdir()
    calls = []

    def convert(room, source, out, dtype):
        calls.append(dtype)
        out.write_text(dtype)

    engine = replace(ENGINES["openvino"], convert=convert)
    room = Room(place=tmp_path / "one", pins=())
    places = [converted(engine, room, EMBEDDED_DRAFT, tmp_path, dtype) for dtype in ("float32", "float32", "bfloat16")]
    assert calls == ["float32", "bfloat16"]
    assert [place.read_text() for place in places] == ["float32", "float32", "bfloat16"]


def test_what_is_not_known_is_refused(tmp_path):
    with pytest.raises(InputError, match="unknown peer 'tensorflow'; available: outrider"):
        peers.run(peers_runs.Plan(environments=tmp_path, engines=("tensorflow",)))
    with pytest.raises(InputError, match="unknown model 'small'"):
        peers_runs.Plan(environments=tmp_path, model="small")
    with pytest.raises(InputError, match=r"in 1\.\.2"):
        peers_runs.Plan(environments=tmp_path, num_prompts=2)
