"""The limit on CPU time: work that waits or sleeps does not reach it, work that computes does."""

import asyncio
import subprocess
import sys
import threading
import time

import pytest

import outrider
from outrider.constraints.grammar import regex
from outrider.core.inputs import InputError
from outrider.engine.generation import Generation
from outrider.serve.limits import Limits
from outrider.serve.run import service as module
from outrider.serve.run.cpu_limit import MOST_LEFT, Lane, Limited, Overloaded, ThreadClock
from tests.serve.services import GREEDY, run

pytestmark = pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="threads have no clocks here")


def compute(seconds: float) -> str:
    """Use the processor for a while."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))
    return "computed"


def limited(make, cpu_seconds: float, before=()) -> object:
    """What comes of work, behind other work of the same thread."""

    async def work() -> object:
        pool = Limited(cpu_seconds, "limited")
        for each in before:
            pool._lane.submit(each)
        return await pool.run(make)

    return asyncio.run(work())


def test_time_in_which_a_thread_does_not_run_does_not_count() -> None:
    def slow() -> str:
        time.sleep(0.5)
        return "slept"

    assert limited(slow, 0.2) == "slept"


def test_time_in_the_queue_does_not_count() -> None:
    assert limited(lambda: "made", 0.2, before=[lambda: time.sleep(0.5), lambda: compute(0.5)]) == "made"


def test_a_thread_that_computes_too_long_is_given_up() -> None:
    with pytest.raises(TimeoutError):
        limited(lambda: compute(1.0), 0.1)
    assert limited(lambda: compute(0.05), 30.0) == "computed"


def test_what_the_work_raises_is_raised() -> None:
    def wrong() -> None:
        raise InputError("no")

    with pytest.raises(InputError, match="no"):
        limited(wrong, 1.0)


def test_work_that_nobody_waits_for_does_not_begin() -> None:
    began, done = [], threading.Event()

    async def work() -> None:
        pool = Limited(1.0, "limited")
        pool._lane.submit(lambda: time.sleep(0.3))
        waiting = asyncio.ensure_future(pool.run(lambda: began.append(1)))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        pool._lane.submit(done.set)

    asyncio.run(work())
    assert done.wait(60)
    assert began == []


def test_others_do_not_wait_for_work_that_was_given_up_and_threads_that_are_left_behind_are_few() -> None:
    ending = threading.Event()

    def endless() -> None:
        while not ending.is_set():
            sum(range(1000))

    async def work() -> None:
        pool = Limited(0.1, "limited")
        for _ in range(MOST_LEFT + 1):
            stuck = asyncio.ensure_future(pool.run(endless))
            await asyncio.sleep(0)
            other = asyncio.ensure_future(pool.run(lambda: "made"))
            with pytest.raises(TimeoutError):
                await stuck
            if len(pool._left) <= MOST_LEFT:
                assert await other == "made"
        with pytest.raises(Overloaded) as caught:
            await other
        assert (caught.value.status, caught.value.retry_after) == (503, 10.0)
        ending.set()
        while not all(lane.idle.is_set() for lane in pool._left):
            await asyncio.sleep(0.01)
        assert await pool.run(lambda: "made") == "made"
        assert pool._left == []

    try:
        asyncio.run(work())
    finally:
        ending.set()


def test_a_process_ends_while_a_thread_works() -> None:
    program = """
import asyncio
from outrider.serve.run.cpu_limit import Limited

def endless():
    while True:
        sum(range(1000))

try:
    asyncio.run(Limited(0.1, "limited").run(endless))
except TimeoutError:
    print("given up")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "given up\n"), done.stderr


def test_a_lane_that_is_closed_ends_its_thread() -> None:
    lane = Lane("a-lane-of-this-test")
    [thread] = [each for each in threading.enumerate() if each.name == "a-lane-of-this-test"]
    assert lane.submit(lambda: 5).result(60) == 5
    lane.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_clock_is_that_of_its_own_thread() -> None:
    clock = ThreadClock()
    time.sleep(0.3)
    assert clock.seconds < 0.2


@pytest.mark.parametrize(("wait", "used"), [(3.0, 0.0), (0.0, 5.0)])
def test_a_grammar_is_refused_by_the_cpu_time_of_its_thread_alone(monkeypatch, wait: float, used: float) -> None:
    pytest.importorskip("llguidance")
    real = module.bound

    def later(*arguments):
        time.sleep(wait)
        compute(used)
        return real(*arguments)

    monkeypatch.setattr(module, "bound", later)
    engine, options = outrider.load(dtype="float32", probe=False), Generation(max_new_tokens=4, sampling=GREEDY)

    def made() -> object:
        return run(engine, lambda it: it.bind(regex("(yes|no)"), options), limits=Limits(compile_seconds=2.5))

    if not used:
        assert made() is not None
        return
    with pytest.raises(InputError, match=r"the regex takes more than 2.5 seconds of CPU time to compile; shorten it"):
        made()
