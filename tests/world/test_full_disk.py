"""What the tests of full disks leave behind."""

import importlib
import sys
from pathlib import Path

import pytest

from tests.world.full_disk import small_files

MODULE = "imported_on_a_full_disk"


def test_a_module_imported_on_a_full_disk_is_whole_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / f"{MODULE}.py").write_text(f"TEXT = {'long ' * 1000!r}\n")
    with small_files(1000):
        importlib.import_module(MODULE)
        with pytest.raises(OSError, match="File too large"):
            (tmp_path / "file").write_bytes(bytes(2000))
    del sys.modules[MODULE]
    assert importlib.import_module(MODULE).TEXT.startswith("long ")
    del sys.modules[MODULE]
