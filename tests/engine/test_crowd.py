"""A crowded machine is noticed from made-up use of the cores, once, when the first model is read."""

import warnings

import torch

import outrider
from outrider.cli.opened import _one_line
from outrider.engine import crowd
from outrider.engine.crowd import CrowdedWarning, crowd_between
from outrider.host.cores import CoreUsage, affinity
from tests.world.forked import printed
from tests.world.models import llama

CORES = len(affinity())
THREADS = CORES + 1
"""More threads than there are cores, so that also a single core can be crowded."""


def said(own: float, others: float, threads: int = THREADS, seconds: float = 1.0) -> str | None:
    """What is said if this process and others used so many cores for so many seconds."""
    before = CoreUsage(seconds=0.0, of_process=0.0, busy=0.0)
    return crowd_between(
        before, CoreUsage(seconds=seconds, of_process=own * seconds, busy=(own + others) * seconds), threads
    )


def test_taken_cores_are_said():
    sentence = said(own=0.4, others=CORES - 0.4)
    assert sentence is not None
    assert sentence.startswith(f"torch has {THREADS} threads, and other processes leave only 0.4 cores free for them,")
    assert "use fewer threads (threads=1 in Python, --threads 1 on the command line), or wait until" in sentence
    assert "\n" not in sentence


def test_free_cores_are_not_said():
    assert said(own=1.0, others=0.0, threads=CORES) is None


def test_a_moment_says_nothing():
    assert said(own=0.4, others=CORES - 0.4, seconds=0.4) is None


def test_a_single_thread_is_never_too_many():
    assert said(own=0.1, others=CORES, threads=1) is None


def test_a_system_that_says_nothing_of_its_cores_is_not_judged():
    moments = [CoreUsage(seconds=float(i), of_process=0.1 * i) for i in range(2)]
    assert crowd_between(*moments, THREADS) is None


def warned() -> None:
    """Print the warnings of two engines that are opened on a crowded machine."""
    now = CoreUsage.now()
    crowd.BEGAN = CoreUsage(seconds=now.seconds - 10, of_process=now.of_process, busy=(now.busy or 0) - 10 * CORES)
    crowd.warn_of_crowd.cache_clear()
    torch.set_num_threads(THREADS)
    found = []
    for _ in range(2):
        with warnings.catch_warnings(record=True) as some:
            warnings.simplefilter("always")
            outrider.load(llama(), drafter="ngram", probe=False)
        found.append([each.category.__name__ for each in some if issubclass(each.category, CrowdedWarning)])
    print(found)


def test_a_process_is_warned_once():
    _, out, err = printed(warned)
    assert out == "[['CrowdedWarning'], []]\n", err


def test_the_command_line_shows_the_warning_as_one_line():
    assert _one_line(CrowdedWarning("a sentence"), CrowdedWarning, "crowd.py", 3) == "warning: a sentence\n"
    assert "other.py:3: UserWarning: a sentence" in _one_line(UserWarning("a sentence"), UserWarning, "other.py", 3)
