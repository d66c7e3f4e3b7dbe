"""Which waiting requests get a slot, and how much of their prompts is already in a cache."""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from outrider.core.types import Request, Running
from outrider.decoding.drafting import drafter_of
from outrider.decoding.progress import begin
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Drafter
from outrider.engine.prefixes import Prefixes, PrefixMatch
from outrider.engine.requests import most_tokens
from outrider.engine.seats import Seat
from outrider.engine.waiting import Waiting
from outrider.lm.protocol import SharesMemory

Route = Callable[[Request], Drafter]
"""Chooses the drafter of a request."""
LEAST_COPY = 16
"""Fewest shared tokens for which a slot is copied. Prefilling fewer tokens takes no longer than the copy."""
LEAST_WAIT = 64
"""Fewest tokens, being read for another request, for which a request waits to copy them. Fewer are read again, beside
the other request's, in less time than a step.
"""


class Admission:
    """The queue of waiting requests, and the slots of running and ended requests. Changes in place.

    The slot of an ended request stays allocated (*warm*). A prompt that continues the text of an ended request takes
    over its slot. A prompt that shares only a beginning with another request, such as a system prompt, gets a copy of
    that beginning, if a slot is free for it. If the other request is still reading that beginning, as with several
    outputs of one prompt, the prompt waits for it, with a slot set aside.

    Where memory does not suffice for all slots at full length, a request waits until it fits, to its last token, beside
    those that run. Requests behind it wait too, so that short ones cannot hold back a long one for ever.

    Attributes:
        max_running: Most requests that run at once.
        max_slots: Most slots in use at once, warm ones included.
        prefixes: The slots that are kept warm.
        waiting: The requests that wait for a slot.

    Args:
        parts: The target whose slots are given out, and the drafter of new requests.
        max_slots: Most requests that run at once.
        max_warm: Most slots that are kept warm.
        max_warm_slots: Slots beside `max_slots` that are for warm ones alone.
        max_warm_tokens: Most tokens in them together; None sets no limit.
        lender: Slots that another engine over the same target keeps warm; they are released when a request needs one.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        max_slots: int,
        max_warm: int,
        max_warm_slots: int = 0,
        max_warm_tokens: int | None = None,
        lender: Prefixes | None = None,
    ) -> None:
        self._parts, self._lender = parts, lender
        self.max_running = min(max_slots, parts.target.max_slots)
        self.max_slots = min(max_slots + max_warm_slots, parts.target.max_slots)
        self.prefixes = Prefixes(parts, min(max_warm, self.max_slots), max_warm_tokens)
        self.waiting = Waiting()
        self._running: list[Seat] = []

    @property
    def parts(self) -> Parts:
        """The target whose slots are given out. Setting parts with another target releases all warm slots."""
        return self._parts

    @parts.setter
    def parts(self, parts: Parts) -> None:
        if parts.target is not self._parts.target:
            self.prefixes.clear()
        self._parts = self.prefixes.parts = parts

    def queue(self, seat: Seat) -> None:
        """Add a request to the queue."""
        self.waiting.add(seat)

    def admit(self, route: Route | None = None) -> list[tuple[Seat, Exception]]:
        """Give slots to waiting requests, by priority and arrival. Returns those that failed to start, with the error.

        Args:
            route: Chooses each request's drafter; None: all get the drafter of `parts`.
        """
        failed: list[tuple[Seat, Exception]] = []
        # Slots are set aside for those that wait for a beginning, so that nobody behind them takes their turn.
        followers = 0
        for seat in self.waiting.in_turn() if len(self._running) < self.max_running else ():
            if len(self._running) + followers >= self.max_running:
                break
            if self._follows(seat.request):
                followers += 1
                continue
            if not self._holds(seat.request):
                break
            self.waiting.remove(seat)
            seat.times = replace(seat.times, admitted=time.monotonic())
            try:
                drafter = self.parts.drafter if route is None else route(seat.request)
                seat.running = self._start(seat, drafter)
            except Exception as error:
                failed.append((seat, error))
            else:
                self._running.append(seat)
        return failed

    def leave(self, seat: Seat) -> None:
        """Remove a request that has ended. Its slot stays warm, if `max_warm` allows."""
        self.waiting.remove(seat)
        if seat.running is not None:
            self._running.remove(seat)
            seat.running.constraint_state = None
            drafter_of(seat.running).ended(seat.running)
            self.prefixes.keep(seat.running)

    def abandon(self, seat: Seat) -> None:
        """Remove a request that ended by an error, and release whatever can be released."""
        self.waiting.remove(seat)
        if seat.running is not None:
            self._running.remove(seat)
            self._give_up(seat.running)

    def _holds(self, request: Request) -> bool:
        """Whether memory suffices for a request, to its end, beside those that run. Warm slots are released for it.

        A request that would run alone may always try.
        """
        target = self.parts.target
        if not isinstance(target, SharesMemory):
            return True
        running = [other.state for other in self._running]
        requests = [request, *(state.request for state in running)]
        lengths = [min(most_tokens(each), target.max_context) for each in requests]
        if self._lender is not None and not target.holds([*lengths, *self.prefixes.lengths, *self._lender.lengths]):
            self._lender.clear()
        if target.holds([*lengths, *self.prefixes.lengths]):
            return True
        if not target.holds(lengths):
            return not running
        prefix = self.prefixes.longest(request.prompt, running)
        taken = prefix is not None and prefix.warm and prefix.is_mostly_shared
        if prefix is not None and taken:
            # It becomes the request's own, so it is released last and not counted.
            self.prefixes.touch(prefix.state)
        while len(self.prefixes) > taken:
            others = self.prefixes.lengths
            if target.holds([*lengths, *(others[:-1] if taken else others)]):
                break
            self.prefixes.evict()
        return True

    def _follows(self, request: Request) -> bool:
        """Whether a request waits because another one reads a long beginning of its prompt right now."""
        if request.prompt_logprobs is not None:
            return False
        running = [other.state for other in self._running]
        return self.prefixes.is_read_by(request.prompt, running, LEAST_WAIT)

    def _start(self, seat: Seat, drafter: Drafter) -> Running:
        """Give a request a slot. If another text begins as its prompt does, the slot already holds that beginning."""
        prompt = seat.request.prompt
        prefix = None
        if seat.request.prompt_logprobs is None:
            prefix = self.prefixes.longest(prompt, [other.state for other in self._running])
        if prefix is not None and self._goes_on(prefix):
            state = self._taken_over(prefix, seat.request, drafter)
        elif prefix is not None and prefix.shared >= LEAST_COPY and self._has_room_beside(prefix):
            state = self._copied(prefix, seat.request, drafter)
        else:
            self._free_slot()
            return begin(replace(self.parts, drafter=drafter), seat.request)
        seat.reused = self.parts.target.length(state.slot)
        self.prefixes.num_reused_tokens += seat.reused
        return state

    @property
    def _is_full(self) -> bool:
        """Whether all slots are in use, warm slots included."""
        lent = 0 if self._lender is None else len(self._lender)
        return len(self._running) + len(self.prefixes) + lent >= self.max_slots

    def _free_slot(self) -> None:
        """Release a warm slot if all slots are in use, first one that another engine keeps warm."""
        if self._is_full:
            (self._lender or self.prefixes).evict()

    def _goes_on(self, prefix: PrefixMatch) -> bool:
        """Whether to take over the slot of an ended request: at least half of its text is shared, or its slot would be
        released next anyway.
        """
        return prefix.warm and (prefix.is_mostly_shared or (self._is_full and self.prefixes.oldest is prefix.state))

    def _has_room_beside(self, prefix: PrefixMatch) -> bool:
        """Whether there is a slot for a copy. A warm slot may be released for it, but not the slot to copy."""
        return not self._is_full or bool(self._lender) or len(self.prefixes) > prefix.warm

    def _taken_over(self, prefix: PrefixMatch, request: Request, drafter: Drafter) -> Running:
        """Start a request in the slot of an ended one."""
        old = prefix.state
        self.prefixes.take(old)
        try:
            self.parts.target.truncate(old.slot, _known(prefix, drafter))
            if old.drafter is drafter:
                drafter_state = drafter.reuse(old.drafter_state, request, prefix.shared)
            else:
                drafter_of(old).close(old.drafter_state)
                drafter_state = drafter.open(request)
        except BaseException:
            self._give_up(old)
            raise
        return self._running_in(old.slot, request, drafter, drafter_state)

    def _copied(self, prefix: PrefixMatch, request: Request, drafter: Drafter) -> Running:
        """Start a request in a new slot, with a copy of the beginning that it shares with another request."""
        old = prefix.state
        if prefix.warm:
            self.prefixes.touch(old)
        self._free_slot()
        slot = self.parts.target.copy(old.slot, _known(prefix, drafter))
        try:
            if old.drafter is drafter:
                drafter_state = drafter.fork(old.drafter_state, request, prefix.shared)
            else:
                drafter_state = drafter.open(request)
        except BaseException:
            self.parts.target.release(slot)
            raise
        return self._running_in(slot, request, drafter, drafter_state)

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
        """Release whatever can be released. Errors are dropped here, because the first error is already reported."""
        with suppress(Exception):
            self.parts.target.release(running.slot, clean=True)
        with suppress(Exception):
            drafter_of(running).close(running.drafter_state)


def _known(prefix: PrefixMatch, drafter: Drafter) -> int:
    """How many tokens need no prefill: the shared ones, up to where the drafter must see hidden states again."""
    if prefix.state.drafter is drafter:
        return min(prefix.shared, drafter.needs(prefix.state.drafter_state, prefix.shared))
    return 0 if drafter.taps else prefix.shared
