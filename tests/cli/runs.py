"""Runs of the command line: in this process, or in one of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cli.app import main

ROOT = Path(__file__).parent.parent.parent


def run(monkeypatch: pytest.MonkeyPatch, capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit status, standard output and standard error of `outrider ...`, in this process."""
    monkeypatch.setattr(sys, "argv", ["outrider", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def done(monkeypatch: pytest.MonkeyPatch, capsys, *arguments: str) -> str:
    """What `outrider ...` prints where all is well."""
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert status == 0, err
    return out


def refused(monkeypatch: pytest.MonkeyPatch, capsys, *arguments: str) -> str:
    """What `outrider ...` says, with one sentence at its end, where something that was typed is wrong."""
    # On a busy machine, a line would say that something is loading.
    for name in ("PATIENCE", "PERIOD"):
        monkeypatch.setattr(f"outrider.core.progress.{name}", float("inf"))
    status, out, err = run(monkeypatch, capsys, *arguments)
    assert (status, out, err.splitlines()[-1].startswith("error: "), "Traceback" in err) == (2, "", True, False), err
    return err


def run_apart(
    *arguments: str, flags: tuple[str, ...] = (), path: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python -m outrider ...` in a process of its own, where no shapes are checked.

    Args:
        flags: Flags of Python itself.
        path: Where modules are looked for first.
    """
    with start(*arguments, flags=flags, path=path, **environment) as process:
        out, err = process.communicate(timeout=300)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start(
    *arguments: str, flags: tuple[str, ...] = (), path: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """The same, while it runs."""
    paths = [str(each) for each in (path, ROOT) if each is not None]
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "outrider", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
