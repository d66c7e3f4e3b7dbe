"""No more threads than cores that the process may use, unless the user asks for them."""

import os
from collections.abc import Iterator

import pytest
import torch

import outrider
from outrider import InputError
from outrider.host.cores import affinity
from outrider.host.threads import BINDINGS, NUMBERS, use_threads


@pytest.fixture(autouse=True)
def _undone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread setting in the environment; torch's number and the affinity are put back after the test."""
    for name in (*NUMBERS, *BINDINGS):
        monkeypatch.delenv(name, raising=False)
    number, cpus = torch.get_num_threads(), affinity()
    yield
    torch.set_num_threads(number)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cpus)


@pytest.fixture
def on_one_core() -> None:
    """Allow this process a single core."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no CPU affinity")
    os.sched_setaffinity(0, {min(affinity())})


def test_by_default_an_engine_uses_no_more_threads_than_cores(on_one_core):
    torch.set_num_threads(2)
    outrider.load(drafter="none", max_slots=1, max_context=32)
    assert torch.get_num_threads() == 1


def test_the_default_never_adds_threads():
    torch.set_num_threads(1)
    use_threads(None)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("name", [*NUMBERS, *BINDINGS])
def test_threads_that_the_environment_sets_are_kept(on_one_core, monkeypatch, name):
    monkeypatch.setenv(name, "2")
    torch.set_num_threads(2)
    use_threads(None)
    assert torch.get_num_threads() == 2


def test_threads_that_are_asked_for_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    outrider.load(drafter="none", max_slots=1, max_context=32, threads=1)
    assert torch.get_num_threads() == 1


def test_more_threads_than_the_machine_has_cores_are_refused():
    cores = os.cpu_count()
    with pytest.raises(InputError, match=f"threads must be at most {cores}, .*, got {cores + 1}"):
        outrider.load(threads=cores + 1)
