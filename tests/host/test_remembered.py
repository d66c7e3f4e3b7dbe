"""Measurements of this machine are kept between runs, and are measured again where the file is not to be trusted."""

import contextlib
import json
import multiprocessing
import os
import socket
from importlib import metadata
from pathlib import Path

import pytest
import torch

from outrider.host import remembered

KEY = {"machine": {"cpu": "a", "threads": 2}, "model": {"layers": 12, "shape": (3, 4)}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, which does not exist yet."""
    place = tmp_path / "deep" / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(place))
    return place


def test_values_come_back_as_they_were_written(cache: Path):
    assert remembered.read("costs", KEY) is None
    remembered.write("costs", KEY, {"seconds": 0.25, "table": [[1, 2], [3, 4]]})
    assert remembered.read("costs", KEY) == {"seconds": 0.25, "table": [[1, 2], [3, 4]]}
    remembered.write("costs", KEY, {"seconds": 0.5})
    assert remembered.read("costs", KEY) == {"seconds": 0.5}
    assert [file.suffix for file in cache.iterdir()] == [".json"]


def test_another_key_or_kind_finds_nothing(cache: Path):
    remembered.write("costs", KEY, {"seconds": 1})
    assert remembered.read("forward", KEY) is None
    assert remembered.read("costs", {**KEY, "machine": {"cpu": "a", "threads": 4}}) is None
    assert remembered.read("costs", {**KEY, "more": None}) is None


def test_a_record_that_carries_another_key_is_not_trusted(cache: Path):
    remembered.write("costs", KEY, {"seconds": 1})
    (file,) = cache.iterdir()
    record = json.loads(file.read_text())
    record["key"]["machine"]["threads"] = 4
    file.write_text(json.dumps(record))
    assert remembered.read("costs", KEY) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"key": 1}'])
def test_a_damaged_file_counts_as_nothing_and_is_replaced(cache: Path, content: bytes):
    remembered.write("costs", KEY, {"seconds": 1})
    (file,) = cache.iterdir()
    file.write_bytes(content)
    assert remembered.read("costs", KEY) is None
    remembered.write("costs", KEY, {"seconds": 2})
    assert remembered.read("costs", KEY) == {"seconds": 2}


def test_values_of_the_wrong_form_count_as_nothing(cache: Path):
    remembered.write("costs", KEY, {"seconds": 1})
    (file,) = cache.iterdir()
    file.write_text(json.dumps({"key": json.loads(json.dumps(KEY)), "values": [1]}))
    assert remembered.read("costs", KEY) is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("not a folder")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/dev/null"), Path("/proc/none")):
        monkeypatch.setenv("OUTRIDER_CACHE", str(place))
        remembered.write("costs", KEY, {"seconds": 1})
        assert remembered.read("costs", KEY) is None
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_record_in_the_way_of_a_folder_is_no_error(cache: Path):
    remembered.write("costs", KEY, {"seconds": 1})
    (file,) = cache.iterdir()
    file.unlink()
    file.mkdir()
    remembered.write("costs", KEY, {"seconds": 2})
    assert remembered.read("costs", KEY) is None
    assert list(cache.iterdir()) == [file]


def test_what_is_no_regular_file_is_never_opened_and_is_replaced(cache: Path):
    remembered.write("costs", KEY, {"seconds": 1})
    (file,) = cache.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert remembered.read("costs", KEY) is None
    file.unlink()
    # A relative address, because a long one is refused.
    with contextlib.chdir(cache), socket.socket(socket.AF_UNIX) as listening:
        listening.bind(file.name)
    assert remembered.read("costs", KEY) is None
    file.unlink()
    file.symlink_to("/dev/zero")
    assert remembered.read("costs", KEY) is None
    remembered.write("costs", KEY, {"seconds": 2})
    assert remembered.read("costs", KEY) == {"seconds": 2}
    assert not file.is_symlink()


def test_values_that_a_file_cannot_hold_raise_and_write_nothing(cache: Path):
    with pytest.raises(TypeError):
        remembered.write("costs", KEY, {"device": torch.device("cpu")})
    with pytest.raises(ValueError):
        remembered.write("costs", KEY, {"seconds": float("nan")})
    assert not cache.exists()


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/someone")
    for own, shared, expected in (
        ("/own", "/shared", "/own"),
        ("", "/shared", "/shared/outrider"),
        ("", "relative", "/home/someone/.cache/outrider"),
        ("", "", "/home/someone/.cache/outrider"),
    ):
        monkeypatch.setenv("OUTRIDER_CACHE", own)
        monkeypatch.setenv("XDG_CACHE_HOME", shared)
        assert str(remembered.folder()) == expected


def _write_often(number: int) -> None:
    for _ in range(50):
        remembered.write("costs", KEY, {"number": [number] * 1000})


def test_writers_at_once_leave_a_whole_record(cache: Path):
    writers = [multiprocessing.get_context("fork").Process(target=_write_often, args=(i,)) for i in range(3)]
    for writer in writers:
        writer.start()
    found = []
    while any(writer.is_alive() for writer in writers):
        found.append(remembered.read("costs", KEY))
    found.append(remembered.read("costs", KEY))
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert all(len(set(each["number"])) == 1 for each in found if each is not None)
    assert found[-1] is not None
    assert len(list(cache.iterdir())) == 1


def test_the_machine_names_what_times_depend_on(monkeypatch: pytest.MonkeyPatch):
    own = remembered.machine()
    assert own == remembered.machine(torch.device("cpu"))
    assert own["threads"] == torch.get_num_threads()
    assert own["versions"]["torch"] == metadata.version("torch")
    assert json.loads(json.dumps(own)) == own
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    assert remembered.machine() != own
