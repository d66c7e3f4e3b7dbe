"""Fresh processes, which find this project first and ask no hub; each prints a row as the last line."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from outrider.bench.evidence import Row

ROOT = Path(__file__).parents[1]
"""Where this project lies."""


def surroundings(threads: int | None = None, **variables: str) -> dict[str, str]:
    """The variables of a process.

    Args:
        threads: Threads of torch.
        variables: Further ones.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    counted = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return os.environ | counted | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path} | variables


def row_of(arguments: Sequence[str | Path], threads: int | None = None, **variables: str) -> Row:
    """The row that a fresh Python with these arguments prints at its end.

    Raises:
        RuntimeError: It ended with another status than 0.
    """
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, env=surroundings(threads, **variables), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"a process failed: {done.stderr[-2000:]}")
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found
