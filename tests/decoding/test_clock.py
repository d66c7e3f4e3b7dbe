"""Parts of a step on a device that works behind the host: true, and read without waiting in the loop."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch

import outrider.decoding.step as step
from outrider.core.types import Request, Timing
from outrider.decoding.both import at_once, in_turn
from outrider.decoding.clock import EventClock, StepClock, clock_on
from outrider.decoding.progress import begin, end, prefill
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.goodput import GoodputLength
from outrider.verifiers.match import MatchVerifier
from tests.decoding.pearl_engines import GREEDY
from tests.world.tables import tables


@dataclass
class Card:
    """A device with a queue of work, told what to do by a host.

    Attributes:
        host: Seconds on the host's clock.
        done: When the device will have done all that it has been told.
        waits: How often the host has waited for an event.
    """

    host: float = 0.0
    done: float = 0.0
    waits: int = 0

    def tell(self, seconds: float, telling: float = 0.001) -> None:
        """Give the device work; telling takes time of the host's."""
        self.host += telling
        self.done = max(self.done, self.host) + seconds

    def wait(self) -> None:
        """Wait for all work, as a copy to the host does."""
        self.host = max(self.host, self.done)

    def record(self) -> "Place":
        return Place(card=self, at=max(self.done, self.host))

    def clock(self) -> EventClock:
        return EventClock(self.record, lambda: self.host)


@dataclass
class Place:
    """An event in the queue."""

    card: Card = field(repr=False)
    at: float

    def synchronize(self) -> None:
        self.card.waits += 1
        self.card.host = max(self.card.host, self.at)

    def elapsed_time(self, end_event: "Place") -> float:
        return 1000 * (end_event.at - self.at)


def decoded(card: Card) -> EventClock:
    """A clock after one step: draft, forward, a copy to the host, commit, and the drafter's own forward."""
    clock = card.clock()
    for part, seconds in (("drafter", 0.02), ("target", 0.1), ("rows", 0.005)):
        card.tell(seconds)
        clock.lap(part)
    card.wait()
    clock.lap("verify")
    for part, seconds in (("commit", 0.003), ("drafter", 0.04)):
        card.tell(seconds)
        clock.lap(part)
    return clock


def test_parts_are_the_seconds_of_the_device_and_not_those_of_telling_it():
    timing = decoded(Card()).timing
    # Two waits of a millisecond for the host: before the first work, and after the copy.
    assert timing.target == pytest.approx(0.1)
    assert timing.rows == pytest.approx(0.005)
    assert timing.drafter == pytest.approx(0.001 + 0.02 + 0.04)
    assert timing.commit == pytest.approx(0.001 + 0.003)
    assert timing.total == pytest.approx(0.17)


def test_nothing_waits_for_the_device_until_a_part_is_read():
    card = Card()
    clock = decoded(card)
    assert clock.seconds == pytest.approx(card.host)
    assert clock.seconds < card.done
    assert card.waits == 0
    assert clock.timing.target > 0
    waits = card.waits
    assert waits == 6
    assert clock.timing.total > 0
    assert card.waits == waits


def test_laps_after_a_reading_are_added():
    card = Card()
    clock = decoded(card)
    before = clock.timing.total
    card.tell(0.5)
    clock.lap("rest")
    # The queue was read to its end, so the device waits for the host's millisecond.
    assert clock.timing.total == pytest.approx(before + 0.501)
    assert repr(clock.timing).startswith("LateTiming(target=0.1")


def test_in_turn_two_devices_save_the_shorter_side_whatever_comes_later():
    card = Card()
    clock = card.clock()

    def read() -> str:
        card.tell(0.1)
        clock.lap("target")
        return "read"

    assert in_turn(lambda: card.tell(0.04), read, clock) == (None, "read")
    card.tell(0.7)
    clock.lap("drafter")
    assert card.waits == 0
    assert clock.timing.overlap == pytest.approx(0.041)
    assert clock.timing.drafter == pytest.approx(0.741)


def test_at_once_a_drafter_on_the_host_overlaps_with_the_device():
    card, told = Card(), threading.Event()
    clock = card.clock()

    def read() -> None:
        card.tell(0.2)
        clock.lap("target")
        told.set()

    def draft() -> str:
        told.wait()
        card.host += 0.25
        return "draft"

    with ThreadPoolExecutor(1) as worker:
        drafted, _ = at_once(worker, draft, read, clock, torch.device("cpu"))
    timing = clock.timing
    assert drafted == "draft"
    # The worker may look at its clock before or after the host has told the device.
    assert timing.drafter == pytest.approx(0.25, abs=0.0011)
    assert timing.overlap == pytest.approx(0.2, abs=0.0021)
    assert timing.rest == 0.0
    assert timing.total == pytest.approx(0.25, abs=0.0021)


def test_on_a_cpu_the_host_keeps_the_time():
    clock = clock_on(torch.device("cpu"))
    assert type(clock) is StepClock
    assert type(clock.timing) is Timing


def test_a_step_whose_seconds_are_compared_with_the_costs_waits_for_no_event(monkeypatch):
    card = Card()
    monkeypatch.setattr(step, "clock_on", lambda device: card.clock())
    costs = CostTable.of_formula(lambda requests, tokens: 1 + 0.1 * tokens)
    parts = replace(tables(3, MatchVerifier(), GoodputLength()), experience=Experience(costs))
    state = begin(parts, Request(id="one", prompt=(0, 1), max_new_tokens=20, sampling=GREEDY))
    prefill(parts, state)
    steps = [made for _ in range(4) for made in parts.decoding.step(parts, [state])]
    end(parts, state)
    assert card.waits == 0
    assert [made.timing.total for made in steps] == [0.0] * 4
    assert card.waits > 0
