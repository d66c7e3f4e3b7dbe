"""Which waiting requests get a slot, and what of their prompts is there already."""

import time
from collections import deque
from contextlib import suppress

from outrider.decoding.drafting import drafter_of
from outrider.decoding.progress import begin
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Drafter
from outrider.engine.prefixes import Found, Prefixes
from outrider.engine.seats import Seat
from outrider.types import Request, Running

LEAST_COPY = 16
"""Fewest shared tokens for which a slot is copied; fewer are digested as quickly."""


class Admission:
    """Requests that wait, and slots: those of requests that run, and those kept warm. Changes in place.

    A prompt that goes on where an ended request stopped takes over its slot. One that shares no more than a beginning
    with another request, a system prompt say, gets a copy of that beginning, as long as there is a slot for it.

    Attributes:
        prefixes: The slots that are kept warm.

    Args:
        parts: Whose slots are given out; new requests get its drafter.
        max_slots: Most slots in use at once, warm ones included.
        max_warm: Most slots that are kept warm.
    """

    def __init__(self, parts: Parts, *, max_slots: int, max_warm: int) -> None:
        self.parts = parts
        self.max_slots = min(max_slots, parts.target.max_slots)
        self.prefixes = Prefixes(parts, min(max_warm, self.max_slots))
        self._waiting: deque[Seat] = deque()
        self._running: list[Seat] = []

    def queue(self, seat: Seat) -> None:
        """Let a request wait for a slot."""
        self._waiting.append(seat)

    def admit(self) -> list[tuple[Seat, Exception]]:
        """Give slots to those that wait longest; those that failed to start, with the reason."""
        failed: list[tuple[Seat, Exception]] = []
        while self._waiting and len(self._running) < self.max_slots:
            seat = self._waiting.popleft()
            seat.admitted = time.perf_counter()
            try:
                seat.running = self._start(seat)
            except Exception as error:
                failed.append((seat, error))
            else:
                self._running.append(seat)
        return failed

    def leave(self, seat: Seat) -> None:
        """Take a request out that has ended; its slot is kept warm if any are."""
        if seat in self._waiting:
            self._waiting.remove(seat)
        if seat.running is not None:
            self._running.remove(seat)
            seat.running.constraint_state = None
            self.prefixes.keep(seat.running)

    def abandon(self, seat: Seat) -> None:
        """Take a request out that ended by an error, and give back what can be given back."""
        if seat in self._waiting:
            self._waiting.remove(seat)
        if seat.running is not None:
            self._running.remove(seat)
            self._give_up(seat.running)

    def _start(self, seat: Seat) -> Running:
        """A request with a slot, in which as much of its prompt is digested as others have digested before."""
        prompt = seat.request.prompt
        found = self.prefixes.longest(prompt, [other.state for other in self._running])
        if found is not None and self._goes_on(found):
            state = self._taken_over(found, seat.request)
        elif found is not None and found.shared >= LEAST_COPY and self._has_room_beside(found):
            state = self._copied(found, seat.request)
        else:
            if self._is_full:
                self.prefixes.evict()
            return begin(self.parts, seat.request)
        seat.reused = self.parts.target.length(state.slot)
        self.prefixes.num_reused_tokens += seat.reused
        return state

    @property
    def _is_full(self) -> bool:
        """Whether all slots are in use, some of them perhaps to keep texts warm."""
        return len(self._running) + len(self.prefixes) >= self.max_slots

    def _goes_on(self, found: Found) -> bool:
        """Whether to take over an ended request's slot: it has little more than what is shared, or would go first."""
        much = 2 * found.shared >= len(found.state.tokens)
        return found.warm and (much or (self._is_full and self.prefixes.oldest is found.state))

    def _has_room_beside(self, found: Found) -> bool:
        """Whether there is a slot for a copy, after letting go of a warm one that is not the one to copy."""
        return not self._is_full or len(self.prefixes) > found.warm

    def _taken_over(self, found: Found, request: Request) -> Running:
        """The request in the slot of an ended one."""
        old, drafter = found.state, self.parts.drafter
        self.prefixes.take(old)
        try:
            self.parts.target.truncate(old.slot, self._known(found))
            if old.drafter is drafter:
                drafter_state = drafter.reuse(old.drafter_state, request, found.shared)
            else:
                drafter_of(old).close(old.drafter_state)
                drafter_state = drafter.open(request)
        except BaseException:
            self._give_up(old)
            raise
        return self._running_in(old.slot, request, drafter, drafter_state)

    def _copied(self, found: Found, request: Request) -> Running:
        """The request in a slot of its own, with a copy of what it shares with another."""
        old, drafter = found.state, self.parts.drafter
        if found.warm:
            self.prefixes.touch(old)
        if self._is_full:
            self.prefixes.evict()
        slot = self.parts.target.copy(old.slot, self._known(found))
        try:
            if old.drafter is drafter:
                drafter_state = drafter.fork(old.drafter_state, request, found.shared)
            else:
                drafter_state = drafter.open(request)
        except BaseException:
            self.parts.target.release(slot)
            raise
        return self._running_in(slot, request, drafter, drafter_state)

    def _known(self, found: Found) -> int:
        """How many tokens need not be digested: those shared, as far as the drafter need not see them again."""
        drafter = self.parts.drafter
        if found.state.drafter is drafter:
            return min(found.shared, drafter.needs(found.state.drafter_state, found.shared))
        return 0 if drafter.taps else found.shared

    def _running_in(self, slot: int, request: Request, drafter: Drafter, drafter_state: object) -> Running:
        return Running(
            request=request,
            tokens=list(request.prompt),
            slot=slot,
            drafter=drafter,
            drafter_state=drafter_state,
            length_state=self.parts.length.open(),
        )

    def _give_up(self, running: Running) -> None:
        """Release what can be released; the error that comes first is the one to report."""
        with suppress(Exception):
            self.parts.target.release(running.slot)
        with suppress(Exception):
            drafter_of(running).close(running.drafter_state)
