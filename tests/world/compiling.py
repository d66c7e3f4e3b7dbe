"""What tests that compile need: a C++ compiler, and for whole forwards a torch that can compile all of them."""

import shutil
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from outrider.host import remembered
from outrider.lm.model import COMPILES

needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None, reason="no C++ compiler"
)
needs_compiled_forwards = pytest.mark.skipif(
    Version(torch.__version__) < COMPILES, reason=f"forwards are compiled with torch {COMPILES} or later"
)


def with_kernels(place: Path) -> str:
    """A new cache that holds the kernels of the usual one alone: they take half a minute to be built."""
    if (usual := remembered.folder() / "native").is_dir():
        shutil.copytree(usual, place / "native")
    return str(place)
