"""A crowded machine is noticed from made-up seconds and made-up use of the cores, and it is said once."""

import functools
import itertools
import warnings
from collections.abc import Iterable, Sequence

import torch

from outrider.cli.opened import _one_line
from outrider.core.types import Step, Timing
from outrider.engine.crowd import Crowd, CrowdedWarning, warn_of_crowd
from outrider.host.cores import CoreUsage, affinity
from tests.world.forked import printed
from tests.world.models import engine

CORES = len(affinity())
THREADS = CORES + 1
"""More threads than there are cores, so that also a single core can be crowded."""
STEPS = [0.01] * 60
"""Seconds of steps."""


def usages(own: float, others: float, seconds: float = 1.0) -> Iterable[CoreUsage]:
    """The use of the cores at moments `seconds` apart, if this process and others use so many cores."""
    for i in itertools.count():
        now = seconds * i
        yield CoreUsage(seconds=now, of_process=own * now, busy=(own + others) * now)


def said(steps: Sequence[float], look: Iterable[CoreUsage], threads: int = THREADS) -> list[str]:
    """All sentences about a series of steps."""
    moments = iter(look)
    crowd = Crowd(lambda: next(moments))
    notes = [crowd.note(seconds, threads) for seconds in steps]
    return [note for note in notes if note is not None]


def test_taken_cores_that_leave_some_idle_are_not_said():
    assert said(STEPS, usages(own=0.0, others=CORES - 0.5)) == []


def test_first_steps_on_cores_that_are_all_taken_are_said():
    [sentence] = said(STEPS, usages(own=0.4, others=CORES - 0.4))
    assert sentence.startswith(f"torch has {THREADS} threads, and other processes leave only 0.4 cores free for them,")
    assert "use fewer threads (threads=1 in Python, --threads 1 on the command line), or wait until" in sentence
    assert "\n" not in sentence


def test_free_cores_are_not_said():
    assert said(STEPS, usages(own=1.0, others=0.0), threads=CORES) == []


def test_first_steps_are_judged_once():
    quiet_first = said(STEPS * 10, itertools.chain(list(itertools.islice(usages(0.4, 0.0), 2)), usages(0.4, CORES)))
    assert quiet_first == []


def test_a_single_thread_is_never_too_many():
    assert said(STEPS, usages(own=0.1, others=CORES), threads=1) == []


def test_a_system_that_says_nothing_of_its_cores_is_not_judged():
    moments = (CoreUsage(seconds=float(i), of_process=0.1 * i) for i in itertools.count())
    assert said(STEPS, moments) == []


def step(seconds: float) -> Step:
    return Step(
        request="a",
        num_draft_tokens=4,
        num_accepted_tokens=0,
        tokens=(1,),
        timing=Timing(target=seconds),
        num_requests=1,
    )


def warned() -> None:
    """Print the warnings of two crowded engines."""
    torch.set_num_threads(THREADS)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            moments = iter(usages(own=0.4, others=CORES - 0.4))
            crowd = Crowd(functools.partial(next, moments))
            for _ in range(60):
                warn_of_crowd(crowd, [step(0.1)])
    print([each.category.__name__ for each in found])


def test_a_process_is_warned_once():
    _, out, err = printed(warned)
    assert out == "['CrowdedWarning']\n", err


def test_the_command_line_shows_the_warning_as_one_line():
    assert _one_line(CrowdedWarning("a sentence"), CrowdedWarning, "crowd.py", 3) == "warning: a sentence\n"
    assert "other.py:3: UserWarning: a sentence" in _one_line(UserWarning("a sentence"), UserWarning, "other.py", 3)


def test_an_engine_tells_of_the_steps_that_ran_no_prompt():
    noted: list[Sequence[Step]] = []
    made = engine("model", max_slots=2)
    made._schedule._timed = noted.append
    outputs = made.generate([[1, 2, 3], [4, 5]], max_new_tokens=12, ignore_eos=True)
    steps = [step for output in outputs for step in output.steps]
    first = [output.steps[0] for output in outputs]
    told = [step for group in noted for step in group]
    assert len(told) == len(steps) - len(first)
    assert not {id(step) for step in told} & {id(step) for step in first}
    assert all(len({id(step.timing) for step in group}) == 1 for group in noted)


def test_a_warning_that_is_an_error_loses_no_tokens():
    plain = engine("model").generate([[1, 2, 3]], max_new_tokens=12, ignore_eos=True)[0]
    made = engine("model")
    count = itertools.count()

    def refuse(steps: Sequence[Step]) -> None:
        if next(count) == 1:
            raise CrowdedWarning("a sentence")

    made._schedule._timed = refuse
    id = made.add([1, 2, 3], max_new_tokens=12, sampling=made.sampling, ignore_eos=True)
    tokens: list[int] = []
    raised = 0
    while made.busy:
        try:
            updates = made.step()
        except CrowdedWarning:
            raised += 1
            continue
        tokens += [token for update in updates if update.id == id for token in update.tokens]
    tokens += [token for update in made.step() for token in update.tokens]
    assert raised == 1
    assert len(tokens) == len(plain.tokens) == 12
