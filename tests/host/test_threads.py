"""No more threads than cores that the process may use, unless the user asks for them."""

import ctypes
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import outrider
from outrider import InputError
from outrider.host.cores import affinity
from outrider.host.threads import BINDINGS, NUMBERS, _pauses, release_threads, use_threads
from outrider.serve.run.service import Service


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


def num_threads() -> int:
    """Threads of this process that Python did not start. One that has ended may be listed a little longer."""
    found = [-1]
    while len(found) < 5 or len(set(found[-5:])) > 1:
        time.sleep(0.01)
        found.append(len(os.listdir("/proc/self/task")) - threading.active_count())
    return found[-1]


@pytest.fixture
def busy_threads() -> Iterator[None]:
    """This thread has computed on three cores, so that two OpenMP threads wait for more."""
    if not Path("/proc/self/task").exists():
        pytest.skip("this system does not list a process's threads")
    release_threads()
    before = num_threads()
    torch.set_num_threads(3)
    torch.ones(1000, 1000).exp()
    assert num_threads() == before + 2
    yield
    release_threads()


def test_released_threads_end_and_come_back(busy_threads):
    many = num_threads()
    release_threads()
    assert num_threads() == many - 2
    torch.ones(1000, 1000).exp()
    assert num_threads() == many


def test_the_threads_of_torch_end_though_another_openmp_library_is_loaded(tmp_path):
    mine = next((each for each in (Path(torch.__file__).parent / "lib").glob("libgomp*")), None)
    if mine is None:
        pytest.skip("torch brings no OpenMP library of GNU along")
    for name in ("a libgomp.so.1", "z libgomp.so.1"):
        shutil.copy(mine, tmp_path / name)
        ctypes.CDLL(str(tmp_path / name))
    _pauses.cache_clear()
    torch.set_num_threads(3)
    torch.ones(1000, 1000).exp()
    many = num_threads()
    release_threads()
    assert num_threads() == many - 2
    _pauses.cache_clear()


def test_who_loads_an_engine_or_starts_a_server_leaves_no_threads(busy_threads):
    many = num_threads()
    engine = outrider.load(drafter="none", max_slots=1, max_context=32)
    assert num_threads() == many - 2
    torch.ones(1000, 1000).exp()
    service = Service(engine, names=("pair",))
    service.start()
    assert num_threads() == many - 2
    service.close()


def test_threads_of_another_thread_go_on(busy_threads):
    many = num_threads()
    other = threading.Thread(target=release_threads)
    other.start()
    other.join()
    assert num_threads() == many
