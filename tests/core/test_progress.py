"""What is said while a command works: nothing is silent for long, and nothing is said where nobody asked."""

import subprocess
import sys
import time
from itertools import pairwise

from outrider.core import progress
from outrider.core.deadline import ENDLESS, Deadline
from outrider.core.progress import PATIENCE, PERIOD, Display, ProgressTask
from outrider.core.watcher import Watcher


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(seconds: float, tasks: dict[float, str]) -> list[tuple[float, str]]:
    """What a display without a terminal says, and when, if tasks follow each other at these times."""
    clock, said = Clock(), list[tuple[float, str]]()
    display = Display(terminal=False, say=lambda line: said.append((clock.now, line)), clock=clock)
    current = None
    while clock.now < seconds:
        if clock.now in tasks:
            if current is not None:
                display.remove(current)
            current = ProgressTask(tasks[clock.now], None, "")
            current.began = clock.now
            display.add(current)
        display.look()
        clock.now += 1.0
    return said


def test_nothing_is_silent_for_longer_than_half_a_minute():
    said = lines_of(200.0, {0.0: "one", 90.0: "other"})
    times = [0.0, *(at for at, _ in said), 200.0]
    assert max(b - a for a, b in pairwise(times)) <= PERIOD
    assert said[0][0] == PATIENCE
    assert said[0][1].startswith("one")


def test_a_new_task_is_named_after_some_seconds_of_silence_and_short_ones_do_not_flood():
    said = lines_of(60.0, {0.0: "one", 12.0: "two", 13.0: "three", 14.0: "four"})
    assert [line.split(" (")[0] for _, line in said][:2] == ["one", "two"]
    times = [at for at, _ in said]
    assert min(b - a for a, b in pairwise(times)) >= PATIENCE


def test_a_line_says_how_far_all_tasks_are():
    clock, said = Clock(), list[str]()
    display = Display(terminal=False, say=said.append, clock=clock)
    for task in (ProgressTask("is it lossless?", 3, "configurations"), ProgressTask("greedy texts", None, "tokens")):
        task.began = 0.0
        task.advance(2)
        display.add(task)
    clock.now = PERIOD
    display.look()
    assert said == ["is it lossless?, 2 of 3 configurations; greedy texts, 2 tokens (30 s)"]


def test_without_a_display_tasks_only_count(capsys):
    with progress.task("reading", 2) as reading:
        reading.advance(2)
    assert reading.done == 2
    assert capsys.readouterr() == ("", "")


def test_what_is_short_is_done_in_silence_and_a_display_ends(capsys):
    with progress.shown("working"), progress.task("reading", 2) as reading:
        reading.advance()
        with progress.shown("working within"):
            pass
    assert capsys.readouterr() == ("", "")
    assert progress._display is None


def test_a_part_of_a_deadline_comes_before_it():
    clock = Clock()
    whole = Deadline(at=10.0, clock=clock)
    clock.now = 2.0
    assert (whole.part(0.25).at, whole.part(1.0).at) == (4.0, 10.0)
    assert not whole.part(0.25).passed
    clock.now = 4.0
    assert whole.part(0.0).passed
    assert ENDLESS.part(0.1) is ENDLESS
    assert Deadline.after(1000).at > time.monotonic()


HELD = """
import ctypes
from outrider.core import progress
progress.PATIENCE, progress.PERIOD, progress.DELAY, progress.BEAT = 0.2, 60.0, 0.0, 0.02
with progress.shown("working"), progress.task("compiling", 3, "parts"):
    progress.time.sleep(0.5)
    # A function that is called so keeps the interpreter to itself.
    ctypes.PyDLL(None).usleep(1_500_000)
print("end", flush=True)
"""


def test_what_goes_on_is_said_while_a_library_holds_the_interpreter():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.endswith("s in one call of a library")]
    assert done.stdout == "end\n"
    assert [line.partition(" parts, ")[0] for line in lines] == ["compiling, 0 of 3"]


class Recorded(Watcher):
    """A watcher that notes what it hears."""

    def __init__(self, *, running: bool) -> None:
        super().__init__(terminal=False, patience=9.0, period=9.0)
        self.running, self.heard = running, list[str]()

    @property
    def runs(self) -> bool:
        return self.running

    def hear(self, line: str) -> None:
        self.heard.append(line)


def test_a_watcher_hears_of_a_task_at_once_where_it_runs_already_and_starts_only_for_long_ones():
    for running, heard in ((True, ["new", "new"]), (False, [""])):
        clock, watcher = Clock(), Recorded(running=running)
        display = Display(terminal=False, say=lambda line: None, clock=clock, watcher=watcher)
        task = ProgressTask("new", None, "")
        task.began = 0.0
        display.add(task)
        display.look()
        assert watcher.heard == heard


def test_a_watcher_that_hears_nothing_of_note_starts_no_process_and_ends_the_one_it_started():
    watcher = Watcher(terminal=False, patience=9.0, period=9.0)
    watcher.hear("")
    assert watcher._process is None
    watcher.hear("compiling")
    process = watcher._process
    assert process is not None
    watcher.stop()
    assert process.returncode is not None
    watcher.stop()
