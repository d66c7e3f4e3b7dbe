"""Torch's threads on a CPU: the one place that sets their number, and that ends them."""

import ctypes
import functools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from outrider.core.inputs import InputError
from outrider.host.cores import usable_cores

NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user sets the number of threads."""
BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables that bind threads to cores. The affinity of the main thread is then a single core."""

SOFTLY = 1
"""OpenMP's `omp_pause_soft`."""


def use_threads(wanted: int | None) -> None:
    """Set how many threads torch uses on a CPU, in the whole process.

    None keeps torch's number, but at most one thread per core that the process may use. If the environment sets the
    number or binds threads to cores, None keeps torch's number in any case.

    Raises:
        InputError: More threads than the machine has cores.
    """
    cores = os.cpu_count() or 1
    if wanted is None:
        wanted = torch.get_num_threads()
        if os.environ.keys().isdisjoint((*NUMBERS, *BINDINGS)):
            wanted = min(wanted, usable_cores())
    elif wanted > cores:
        raise InputError(f"threads must be at most {cores}, the number of this machine's cores, got {wanted}")
    if wanted != torch.get_num_threads():
        torch.set_num_threads(wanted)


def release_threads() -> None:
    """End the OpenMP threads that belong to the calling thread. Its next operation on several cores makes them again.

    Every thread that computes keeps OpenMP threads of its own between its operations. When a process has more of them
    than cores, GNU's OpenMP lets all of them sleep after each operation, and waking them takes longer than small
    operations do: on two cores an engine in a second thread took 17 ms instead of 7 for a step. So a thread that has
    computed, and leaves the next work to another thread, calls this. Other OpenMP libraries are left as they are.
    """
    for pause in _pauses():
        pause(SOFTLY)


@functools.cache
def _pauses() -> list[Callable[[int], int]]:
    """`omp_pause_resource_all` of each loaded OpenMP library of GNU: torch's, and those that other packages, such as
    sentencepiece, bring along.
    """
    pauses: list[Callable[[int], int]] = []
    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        # The path is the sixth field, and may hold spaces.
        for library in sorted({line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}):
            with suppress(OSError, AttributeError):
                pauses.append(ctypes.CDLL(library).omp_pause_resource_all)
    return pauses


def threads_are_bound() -> bool:
    """Whether the environment binds threads to cores, so that the affinity says nothing about the whole process."""
    return not os.environ.keys().isdisjoint(BINDINGS)
