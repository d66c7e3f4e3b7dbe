"""Servers of the llama.cpp family: built once, asked by ids, timed by themselves, and told by a sentence where not."""

import json
import os
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench.engines import ik_llama, llama
from outrider.bench.engines.driver import AnswerTiming, DriverRequest, Options
from outrider.bench.engines.engine import DRAFT_MODEL, converted
from outrider.bench.engines.environments import CannotMake, EnvironmentFolder
from outrider.bench.engines.process import Process, Refused, Stopped
from outrider.bench.engines.server import ServerDriver, compiler
from tests.bench.engines.recorded_server import wrapper

ENGINES = {"llama": llama.ENGINE, "ik_llama": ik_llama.ENGINE}
PROMPTS = [[1, 2, 3], [4, 5]]
ANSWERS = {json.dumps(PROMPTS[0]): [7, 8, 9, 10, 11], json.dumps(PROMPTS[1]): [12, 13, 14, 15, 16]}


@pytest.fixture
def room(tmp_path):
    """An environment whose server somebody built."""
    (tmp_path / "model.json").write_text(json.dumps(ANSWERS))
    return EnvironmentFolder(place=tmp_path, pins=(), other_server=wrapper(tmp_path))


def options(place: Path, mode: str) -> Options:
    file = str(place / "model.gguf")
    return Options(
        mode=mode, target=file, draft=file, dtype="bfloat16", threads=1, draft_tokens=4, ngram=3, batch=2, context=64
    )


def asked(prompts: list[list[int]], **settings: bool) -> DriverRequest:
    return DriverRequest(prompts=prompts, new_tokens=4, temperature=0.0, seed=1, **settings)


def runs(process: int) -> bool:
    """Whether a process still runs; one that has ended may wait for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("ids", [True, False])
def test_a_server_answers_prompts_together_and_tells_its_own_times(room, name, ids):
    with Process(ENGINES[name].command(room)) as driver:
        driver.start(options(room.place, "plain"))
        output = driver.ask(asked(PROMPTS, ids=ids))
    assert output.tokens == [[7, 8, 9, 10], [12, 13, 14, 15]]
    assert output.timings == [AnswerTiming(num_tokens=4, prompt_seconds=0.05, decode_seconds=0.1)] * 2
    assert output.counts == {}
    assert output.seconds > 0
    assert driver.seconds > 0
    # That of the server, not of what asks it: this many bytes are more than a small program in C, and less than torch.
    assert output.memory is None or 2**22 < output.memory < 2**28


def test_a_server_writes_nothing_where_the_user_is(room, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with Process(ik_llama.ENGINE.command(room)) as driver:
        driver.start(replace(options(room.place, "plain"), target=os.path.relpath(options(room.place, "plain").target)))
        assert driver.ask(asked(PROMPTS)).tokens == [[7, 8, 9, 10], [12, 13, 14, 15]]
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("kind", [(ServerDriver, llama.FLAGS), (ik_llama.IkLlamaDriver, ik_llama.FLAGS)])
def test_a_server_tells_the_likeliest_tokens_behind_a_prompt(room, kind):
    make, flags = kind
    driver = make(room.other_server, flags)
    driver.start(options(room.place, "plain"))
    try:
        assert driver.likeliest(PROMPTS[1], 3) == {12: -1.0, 13: -2.0, 14: -3.0}
    finally:
        driver.stop()


@pytest.mark.parametrize("name", ENGINES)
def test_drafts_are_counted_and_do_not_reach_beyond_what_was_asked(room, name):
    with Process(ENGINES[name].command(room)) as driver:
        driver.start(options(room.place, DRAFT_MODEL))
        driver.ask(asked(PROMPTS[:1]))
        output = driver.ask(asked(PROMPTS[:1]))
    [timing] = output.timings
    assert (timing.num_tokens, timing.draft_tokens, timing.accepted_tokens) == (4, 8, 2)
    # Each time one forward with a draft: four tokens are the prompt's, two accepted ones and one more.
    assert output.counts == {"drafts": 2, "draft_tokens": 16, "accepted_tokens": 4}


@pytest.mark.parametrize("name", ENGINES)
def test_a_server_that_refuses_is_told_in_its_words_and_goes_on(room, name):
    with Process(ENGINES[name].command(room)) as driver:
        driver.start(options(room.place, "ngram-simple"))
        with pytest.raises(Refused, match="the prompt is too long"):
            driver.ask(asked([[9, 9]]))
        assert driver.ask(asked(PROMPTS[1:])).tokens == [[12, 13, 14, 15]]


def test_a_server_ends_with_its_driver_however_that_ends(room):
    with Process(llama.ENGINE.command(room)) as driver:
        driver.start(options(room.place, "plain"))
        server = int((room.place / "model.pid").read_text())
        assert runs(server)
        driver._process.kill()
    deadline = time.monotonic() + 60
    while runs(server) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(server)


def test_a_server_that_lacks_a_drafter_says_so(room):
    driver = Process(ik_llama.ENGINE.command(room))
    with pytest.raises(Stopped, match=r"exit status 1: unknown speculative decoding type$"):
        driver.start(options(room.place, "suffix -rtr"))


def test_every_mode_names_its_models_and_its_tokens(room):
    flags = [flag for each in (llama.FLAGS, ik_llama.FLAGS) for mode in each.values() for flag in mode]
    named = [flag.format(draft="DRAFT", draft_tokens=4) for flag in flags if "{" in flag]
    assert set(named) == {"DRAFT", "4", "draft:n_max=4"}
    assert [name for name, mode in ik_llama.FLAGS.items() if "-rtr" in mode] == [
        name for name in ik_llama.FLAGS if name.endswith(" -rtr")
    ]


def test_a_folder_is_refused_by_an_engine_that_reads_files_alone(room):
    with pytest.raises(CannotMake, match=r"reads \.gguf files alone; give target and draft model as such files"):
        converted(ik_llama.ENGINE, room, room.place, room.place, "bfloat16")


def test_an_environment_is_built_from_the_sources_of_the_binding(tmp_path, monkeypatch):
    # What stands for pip copies an archive, what stands for cmake builds an empty server.
    inside = tmp_path / "ik_llama_cpp_python-0.1.5" / "vendor" / "ik_llama.cpp" / "common"
    inside.mkdir(parents=True)
    with tarfile.open(tmp_path / "ik.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "ik_llama_cpp_python-0.1.5", "ik_llama_cpp_python-0.1.5")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, script in {
        "python": f'while [ "$1" != --dest ]; do shift; done; mkdir -p "$2"; cp {tmp_path}/ik.tar.gz "$2"',
        "cmake": 'if [ "$1" = --build ]; then mkdir -p "$2/bin"; touch "$2/bin/llama-server"; fi',
        "c++": "true",
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "room").mkdir()
    room = EnvironmentFolder(
        place=tmp_path / "room", pins=ik_llama.ENGINE.environment.pins, other_python=programs / "python"
    )
    ik_llama.make(room)
    log = (room.place / "log.txt").read_text()
    assert log.count("$ ") == 3
    script = room.place / "llama" / "vendor" / "ik_llama.cpp" / "common" / "cmake" / "build-info-gen-cpp.cmake"
    assert "build-info.cpp.in" in script.read_text()
    # What is there is not built again.
    assert ik_llama.server_of(room) == room.place / "server" / "bin" / "llama-server"
    assert (room.place / "log.txt").read_text() == log
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ik_llama.ENGINE.command(room)[-1] == str(room.place / "server" / "bin" / "llama-server")
    with pytest.raises(CannotMake, match=r"install one \(c\+\+, g\+\+ or clang\+\+\)"):
        compiler()
