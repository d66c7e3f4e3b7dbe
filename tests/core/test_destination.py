"""Nothing foreign is replaced, and one process writes at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.core.destination import locked, locked_file
from outrider.core.inputs import InputError

fcntl = pytest.importorskip("fcntl")
HOLDS = """
import sys
from pathlib import Path
from outrider.core.destination import locked_file
with locked_file(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def held_by_another(path: Path) -> subprocess.Popen[str]:
    """A process that holds a file until its input ends."""
    command = [sys.executable, "-c", HOLDS, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_told_who_holds_a_file_and_a_killed_one_holds_nothing(tmp_path):
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "out.jsonl")
    with held_by_another(tmp_path / "out.jsonl") as process:
        for name in ("out.jsonl", "link.jsonl"):
            place = tmp_path / name
            with pytest.raises(InputError) as raised, locked_file(place):
                pass
            said = f"{place} is being written by process {process.pid} on {os.uname().nodename} since 20"
            assert str(raised.value).startswith(said), raised.value
            assert str(raised.value).endswith("; wait until that has ended, or give another place")
        process.kill()
    with locked_file(tmp_path / "out.jsonl"):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["link.jsonl"]


def test_a_process_may_hold_a_place_twice_until_the_first_ends(tmp_path):
    lock = tmp_path / "new" / "folder" / "lock"
    with locked(lock, tmp_path):
        with locked(lock, tmp_path):
            pass
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert list(tmp_path.iterdir()) == []


def test_folders_that_hold_something_else_by_then_stay(tmp_path):
    with locked(tmp_path / "new" / "lock", tmp_path):
        (tmp_path / "new" / "note").write_text("")
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["note"]


def test_a_lock_that_is_deleted_while_another_waits_for_it_is_made_anew(tmp_path):
    lock = tmp_path / "lock"
    with locked(lock, tmp_path):
        lock.unlink()
        with open(lock, "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
    with locked(lock, tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()


def test_a_place_without_a_lock_is_a_sentence_and_a_device_needs_none(tmp_path):
    (tmp_path / "file").write_text("")
    said = r"cannot be written, because its lock .* cannot be made: "
    with pytest.raises(InputError, match=said), locked_file(tmp_path / "file" / "out.jsonl"):
        pass
    with locked_file(Path("/dev/null")):
        pass
