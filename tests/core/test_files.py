"""A file or folder is replaced as a whole: whatever stops the process, the old one or the new one is there."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.core import files
from outrider.core.inputs import InputError

KILLED = """
import os, sys
from pathlib import Path
from outrider.core import files
with files.replaced(Path(sys.argv[1])) as fresh:
    if sys.argv[2] == "folder":
        fresh.mkdir()
        fresh = fresh / "inside"
    fresh.write_text("half of the n")
    os._exit(1)
"""


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_process_that_is_killed_in_the_middle_leaves_the_old_one(tmp_path: Path, kind: str):
    path = tmp_path / "kept"
    if kind == "folder":
        path.mkdir()
    old = path / "inside" if kind == "folder" else path
    old.write_text("the old one")
    subprocess.run([sys.executable, "-c", KILLED, str(path), kind], check=False, timeout=60)
    assert old.read_text() == "the old one"
    left = {each.name for each in tmp_path.iterdir()} - {"kept"}
    assert len(left) == 1
    files.delete_unfinished(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]


def test_a_body_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    files.replace(tmp_path / "kept", b"the old one")

    def stop() -> None:
        with files.replaced(tmp_path / "kept") as fresh:
            fresh.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop()
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"kept": b"the old one"}


def test_each_writer_has_a_name_of_its_own(tmp_path: Path):
    path = tmp_path / "kept"
    with files.replaced(path) as first:
        first.write_text("first")
        with files.replaced(path) as second:
            assert first != second
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes that reach the disk, in order."""
    found: list[int] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        sync(descriptor)
        found.append(os.fstat(descriptor).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    return found


def test_a_file_reaches_the_disk_before_it_gets_its_name_and_its_name_after(tmp_path: Path, synced: list[int]):
    path = tmp_path / "kept"
    files.replace(path, b"new")
    assert synced == [path.stat().st_ino, tmp_path.stat().st_ino]


def test_all_of_a_folder_reaches_the_disk_and_the_old_one_goes(tmp_path: Path, synced: list[int]):
    path = tmp_path / "kept"
    for name in ("old", "new"):
        synced.clear()
        with files.replaced(path) as fresh:
            (fresh / "below").mkdir(parents=True)
            (fresh / "below" / name).write_text(name)
            (fresh / "link").symlink_to("nowhere")
    assert sorted(each.name for each in path.rglob("*")) == ["below", "link", "new"]
    assert list(tmp_path.iterdir()) == [path]
    inside = {each.stat().st_ino for each in (path, path / "below", path / "below" / "new")}
    assert set(synced[:-1]) == inside
    assert synced[-1] == tmp_path.stat().st_ino


def test_a_folder_that_cannot_take_the_name_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, rename = tmp_path / "kept", Path.rename
    path.mkdir()
    (path / "old").touch()
    new = tmp_path / "new"
    new.mkdir()

    def refuse(self: Path, target: Path) -> Path:
        if self == new:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        files.put(new, path)
    assert sorted(str(each.relative_to(tmp_path)) for each in tmp_path.rglob("*")) == ["kept", "kept/old", "new"]


def test_file_systems_that_cannot_sync_folders_are_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sync = os.fsync

    def refuse(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    files.replace(tmp_path / "kept", b"new")
    assert (tmp_path / "kept").read_bytes() == b"new"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_the_umask_decides_who_may_read(tmp_path: Path):
    before = os.umask(0o027)
    try:
        files.replace(tmp_path / "shared", b"")
        files.replace(tmp_path / "own", b"", mode=0o600)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("shared", "own")] == [0o640, 0o600]


def test_a_file_that_cannot_be_written_gets_a_sentence(tmp_path: Path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "kept"
    with pytest.raises(InputError, match=rf"^{path} cannot be written: Not a directory$"), files.written(path):
        files.replace(path, b"")
