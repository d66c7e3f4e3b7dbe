"""Files are hashed once, and again when they change."""

import hashlib
import os
from pathlib import Path

import pytest

from outrider.host import hashed
from outrider.host.hashed import hashes_of

DAY = 86400


@pytest.fixture
def reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that are read, in a cache folder of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    found, read = list[Path](), hashed._read
    monkeypatch.setattr(hashed, "_read", lambda file: found.append(file) or read(file))
    return found


def old(file: Path, content: bytes) -> Path:
    """A file that was written long ago."""
    file.write_bytes(content)
    os.utime(file, ns=(0, 10**18))
    return file


def test_a_file_is_read_once_and_by_no_later_process(tmp_path, reads):
    files = [old(tmp_path / name, name.encode()) for name in "ab"]
    expected = [hashlib.sha256(name.encode()).hexdigest() for name in "ab"]
    assert [hashes_of(files), hashes_of(files)] == [expected] * 2
    assert reads == files


@pytest.mark.parametrize("change", ["content", "time", "link"])
def test_a_changed_file_is_read_again(tmp_path, reads, change):
    file = old(tmp_path / "file", b"before")
    assert hashes_of([file]) == [hashlib.sha256(b"before").hexdigest()]
    if change == "link":
        file.unlink()
        file.symlink_to(old(tmp_path / "other", b"behind"))
    else:
        file.write_bytes(b"behind")
        os.utime(file, ns=(0, 10**18 + (change == "time")))
        if change == "content":
            file.write_bytes(b"longer than before")
            os.utime(file, ns=(0, 10**18))
    assert hashes_of([file]) == [hashlib.sha256(file.read_bytes()).hexdigest()]
    assert len(reads) == 2


def test_a_file_that_has_just_been_written_is_read_again(tmp_path, reads):
    file = tmp_path / "file"
    file.write_bytes(b"now")
    assert hashes_of([file]) == hashes_of([file])
    assert len(reads) == 2


def test_what_is_no_regular_file_is_not_read(tmp_path, reads):
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "none"):
        with pytest.raises(OSError, match="no regular file"):
            hashes_of([tmp_path / name])
    assert reads == []
