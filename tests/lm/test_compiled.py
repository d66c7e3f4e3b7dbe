"""Compiled forwards say what plain ones say, for chains and trees, alone and in batches, and few graphs serve all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lm import compiled_checks


@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler")
def test_compiled_forwards_say_what_plain_ones_say_in_few_graphs():
    command = [sys.executable, "-m", "tests.lm.compiled_checks"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name in ("without taps", "with taps"):
        differences = found[f"differences {name}"]
        assert set(differences) == set(compiled_checks.CASES)
        assert max(differences.values()) < 1e-5, differences
        assert found[f"new graphs for new lengths {name}"] == 0
        assert found[f"graphs {name}"] <= 5
    assert found["graph breaks"] == 0
    assert found["forwards with taps are compiled"]
    assert found["long forwards are plain"]
    assert found["greedy output is the same"]
    assert found["error of the law"] < 1e-6
