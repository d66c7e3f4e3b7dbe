"""C++ is built once for a machine, and a build that somebody else could have changed is not loaded."""

import ctypes
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.host import native as module
from outrider.host.native import native

pytestmark = pytest.mark.skipif(module._compiler() is None, reason="no C++ compiler")
SOURCE = 'extern "C" int answer_of_%s(int value) { return 2 * value; }'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder for one test."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    native.cache_clear()
    yield tmp_path / "cache" / "native"
    native.cache_clear()


def written(tmp_path: Path, name: str) -> Path:
    source = tmp_path / f"{name}.cpp"
    source.write_text(SOURCE % name)
    return source


def answer(library: ctypes.CDLL | None, name: str) -> int:
    assert library is not None
    return int(library[f"answer_of_{name}"](21))


def test_a_library_is_built_once_and_the_build_is_told(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "outrider.loading")
    source = written(tmp_path, "first")
    assert answer(native(source), "first") == 42
    [kept] = folder.iterdir()
    seen = kept.stat()
    native.cache_clear()
    assert answer(native(source), "first") == 42
    assert [(each, each.stat().st_mtime_ns) for each in folder.iterdir()] == [(kept, seen.st_mtime_ns)]
    assert caplog.text.count("building first.cpp for this processor with") == 1


def test_other_source_makes_another_library(tmp_path: Path, folder: Path) -> None:
    source = written(tmp_path, "second")
    assert answer(native(source), "second") == 42
    native.cache_clear()
    source.write_text(SOURCE.replace("2 *", "3 *") % "second")
    assert answer(native(source), "second") == 63
    assert len(list(folder.iterdir())) == 2


def test_a_library_that_others_can_write_is_not_loaded(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = written(tmp_path, "third")
    native(source)
    [kept] = folder.iterdir()
    # The loaded one stays as it is.
    kept.unlink()
    kept.write_bytes(b"not a library")
    kept.chmod(0o777)
    native.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert answer(native(source), "third") == 42
    assert "other users may write" in caplog.text


def test_without_a_cache_folder_it_is_built_for_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null")
    assert answer(native(written(tmp_path, "fourth")), "fourth") == 42


def test_source_that_cannot_be_built_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = written(tmp_path, "fifth")
    source.write_text("no C++")
    with caplog.at_level(logging.WARNING):
        assert native(source) is None
        assert native(source) is None
    assert caplog.text.count("fifth.cpp") == 1


def test_without_a_compiler_there_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with caplog.at_level(logging.WARNING):
        assert native(written(tmp_path, "sixth")) is None
    assert "no C++ compiler" in caplog.text
