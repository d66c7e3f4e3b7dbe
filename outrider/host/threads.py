"""Torch's threads on a CPU: the one place that sets their number."""

import os

import torch

from outrider.core.inputs import InputError
from outrider.host.cores import usable_cores

NUMBERS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables with which a user sets the number of threads."""
BINDINGS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Environment variables that bind threads to cores. The affinity of the main thread is then a single core."""


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


def threads_are_bound() -> bool:
    """Whether the environment binds threads to cores, so that the affinity says nothing about the whole process."""
    return not os.environ.keys().isdisjoint(BINDINGS)
