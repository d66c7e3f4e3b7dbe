"""Functions in C++, built for this machine with the compiler that is here, and kept in Outrider's cache folder."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from outrider.core import files
from outrider.host import remembered

COMPILERS = ("g++", "clang++", "c++")
FLAGS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off")
"""How a file is built. Products are added by fused operations only where the source says so, so that every build of a
function for a machine returns the same bits."""

log = logging.getLogger("outrider")
loading = logging.getLogger("outrider.loading")


@functools.cache
def native(source: Path, *flags: str) -> ctypes.CDLL | None:
    """The functions of a C++ file, built if they are not in the cache folder. None if they cannot be built here.

    Loops with OpenMP share the threads of torch, because the library takes the OpenMP library that torch has loaded.
    Its names are visible to libraries that are loaded later.

    Args:
        source: One file that includes nothing but the compiler's own headers.
        flags: What the compiler is told besides, for example a library that the file needs.
    """
    if (compiler := _compiler()) is None:
        log.warning("no C++ compiler is here, so packed weights are multiplied slowly; install g++ or set CXX")
        return None
    try:
        return _kept(source, compiler, flags) or _built_anew(source, compiler, flags)
    except (OSError, subprocess.CalledProcessError) as error:
        log.warning("%s cannot build %s, so packed weights are multiplied slowly", compiler, source.name)
        log.debug("%s", getattr(error, "stderr", error))
        return None


def _kept(source: Path, compiler: str, flags: Sequence[str]) -> ctypes.CDLL | None:
    """The library in the cache folder, which is built first if it is not there. None if the folder is of no use."""
    library = (
        Path(os.path.realpath(remembered.folder() / "native")) / f"{source.stem}-{_key(source, compiler, flags)}.so"
    )
    try:
        if not library.exists():
            files.make_folder(library.parent)
            with files.replaced(library) as fresh:
                _build(source, compiler, flags, fresh)
        reason = files.distrusted(library)
    except OSError as error:
        reason = files.reason(error)
    if reason is None:
        return _open(library)
    log.warning("%s is built anew in each process: %s", source.name, reason)
    return None


def _built_anew(source: Path, compiler: str, flags: Sequence[str]) -> ctypes.CDLL:
    """The library, built in a folder that is deleted when it is loaded."""
    with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
        library = Path(folder) / f"{source.stem}.so"
        _build(source, compiler, flags, library)
        return _open(library)


def _open(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _build(source: Path, compiler: str, flags: Sequence[str], library: Path) -> None:
    """Build a library.

    Raises:
        CalledProcessError: The compiler cannot.
    """
    loading.info("building %s for this processor with %s, once", source.name, compiler)
    command = [compiler, *_flags(), "-x", "c++", str(source), "-o", str(library), *flags]
    subprocess.run(command, check=True, capture_output=True, text=True)
    library.chmod(0o700)


def _compiler() -> str | None:
    """The C++ compiler: that of the environment variable CXX, otherwise the first of `COMPILERS`."""
    wanted = [os.environ["CXX"]] if os.environ.get("CXX") else COMPILERS
    return next((found for name in wanted if (found := shutil.which(name)) is not None), None)


def _flags() -> Sequence[str]:
    """How a file is built for the processor of this machine."""
    return (*FLAGS, "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native")


def _key(source: Path, compiler: str, flags: Sequence[str]) -> str:
    """A hash of all that a library depends on."""
    version = ""
    with suppress(OSError, subprocess.CalledProcessError):
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout
    machine = remembered.machine(torch.device("cpu"))
    parts = (compiler, version, *_flags(), *flags, machine["cpu"], *machine["instructions"])
    return hashlib.sha256("\n".join(parts).encode() + source.read_bytes()).hexdigest()[:32]
