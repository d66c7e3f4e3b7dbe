"""A process that was forked while another thread ran the engine gets a sentence, and does not wait forever."""

import os
import threading

import pytest

from outrider.core.inputs import InputError
from tests.world.models import engine


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_fork_in_the_middle_of_a_step_is_told_what_to_do():
    ours, inside, leave = engine("none", max_slots=1), threading.Event(), threading.Event()
    ours.between = lambda: (inside.set(), leave.wait(60))[0]
    id = ours.add([3, 5], max_new_tokens=1)
    thread = threading.Thread(target=ours.step)
    thread.start()
    assert inside.wait(60)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = ours.add([3], max_new_tokens=1)
        except InputError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.waitpid(child, 0)
    leave.set()
    thread.join()
    assert os.read(read, 1000).startswith(b"this process was forked while another thread ran the engine")
    assert not ours.cancel(id)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_of_an_engine_at_rest_works():
    ours = engine("none", max_slots=1)
    child = os.fork()
    if child == 0:
        os._exit(0 if ours.add([3], max_new_tokens=1, id="a") == "a" else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_engine_is_busy_while_updates_wait():
    ours = engine("none", max_slots=2)
    added = ours.add([3, 5], max_new_tokens=4)
    assert sum(len(update.tokens) for update in ours.stream([5, 3], max_new_tokens=8, ignore_eos=True)) == 8
    assert ours.busy
    ends = [update.id for update in ours.step() if update.output is not None]
    assert (ends, ours.busy) == ([added], False)
