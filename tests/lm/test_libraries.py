"""Which compiled libraries stay on disk."""

import os
import time
from pathlib import Path

from outrider.lm.forwards.libraries import KEY, delete_unused

DAY = 86400


def library(shelf: Path, name: str, days: float) -> Path:
    """A library that was last opened so many days ago."""
    place = shelf / name
    place.mkdir(parents=True)
    (place / KEY).write_text("{}")
    for path in (place / KEY, place):
        os.utime(path, (time.time() - days * DAY,) * 2)
    return place


def test_libraries_that_nobody_opens_and_what_was_cut_off_are_deleted(tmp_path):
    old, used = library(tmp_path / "llama-1", "a", 31), library(tmp_path / "llama-1", "b", 29)
    other = library(tmp_path / "gemma-2", "c", 400)
    left, running = tmp_path / "llama-1" / ".left", tmp_path / "llama-1" / ".running"
    for place, days in ((left, 2.0), (running, 0.1)):
        place.mkdir()
        os.utime(place, (time.time() - days * DAY,) * 2)
    (tmp_path / "note").write_text("mine")
    delete_unused(tmp_path)
    assert [path.exists() for path in (old, used, other, left, running)] == [False, True, False, False, True]
    assert (tmp_path / "note").exists()
    delete_unused(tmp_path / "nowhere")
