"""What an engine does next: admit requests, prefill prompts, decode, and handle requests that fail."""

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from outrider.core.dice import Dice
from outrider.core.types import Request, Running, Step
from outrider.decoding.drafting import drafter_of
from outrider.decoding.progress import Mark, mark, prefill_chunk, rewind, tokens_left
from outrider.decoding.protocol import Parts, Watch
from outrider.drafters.protocol import Drafter
from outrider.engine.admission import Admission, Route
from outrider.engine.output import FinishReason, Output, Update
from outrider.engine.prefill import PrefillChunk, plan
from outrider.engine.prefixes import Prefixes
from outrider.engine.seats import Seat, ending_of
from outrider.engine.waiting import Waiting


class Schedule:
    """The requests of an engine, from the queue to their ends. Changes in place.

    Attributes:
        seats: The requests, by their ids, in the order in which they came.

    Args:
        parts: What decodes new requests.
        tokenizer: For text and stop strings.
        max_slots: Most requests that run at once.
        max_warm: Most slots that are kept warm.
        max_warm_slots: Slots beside `max_slots` that are for warm ones alone.
        lender: Slots that another engine over the same target keeps warm.
        max_warm_tokens: Most tokens in them together; None sets no limit.
        deliver: Called with every update.
    """

    def __init__(
        self,
        parts: Parts,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_slots: int,
        max_warm: int,
        max_warm_slots: int = 0,
        lender: Prefixes | None = None,
        max_warm_tokens: int | None = None,
        deliver: Callable[[Update], None],
    ) -> None:
        self.seats: dict[str, Seat] = {}
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._admission = Admission(
            parts,
            max_slots=max_slots,
            max_warm=max_warm,
            max_warm_slots=max_warm_slots,
            max_warm_tokens=max_warm_tokens,
            lender=lender,
        )

    @property
    def waiting(self) -> Waiting:
        """The requests that wait for a slot."""
        return self._admission.waiting

    @property
    def parts(self) -> Parts:
        """What decodes new requests."""
        return self._admission.parts

    @parts.setter
    def parts(self, parts: Parts) -> None:
        self._admission.parts = parts

    @property
    def prefixes(self) -> Prefixes:
        """The slots that are kept warm."""
        return self._admission.prefixes

    @property
    def running(self) -> dict[str, Drafter]:
        """The drafter of each request that has a slot."""
        return {id: drafter_of(seat.running) for id, seat in self.seats.items() if seat.running is not None}

    @property
    def num_cached_tokens(self) -> int:
        """Tokens in the target's cache, those of ended requests included."""
        running = [seat.running for seat in self.seats.values() if seat.running is not None]
        return sum([self.parts.target.length(state.slot) for state in [*running, *self.prefixes.states]])

    @property
    def num_unread_tokens(self) -> int:
        """Prompt tokens that the target has not run on yet."""
        new = [seat for seat in self.seats.values() if not seat.ready]
        known = (0 if each.running is None else self.parts.target.length(each.state.slot) for each in new)
        return sum(len(seat.request.prompt) - count for seat, count in zip(new, known, strict=True))

    def queue(self, request: Request) -> None:
        """Add a request to the queue for a slot."""
        seat = Seat(request=request, ending=ending_of(request, self._tokenizer))
        self.seats[request.id] = seat
        self._admission.queue(seat)

    def cancel(self, id: str) -> Output | None:
        """End a request now; None if there is no such request."""
        return self._finish(self.seats[id], "cancelled") if id in self.seats else None

    def advance(
        self,
        max_prefill_tokens: int | None,
        dice: Callable[[Sequence[Running]], Dice] | None,
        watch: Watch | None,
        route: Route | None = None,
    ) -> None:
        """Admit requests, prefill new prompts, and make one step of all ready requests."""
        for seat, error in self._admission.admit(route):
            self._fail(seat, error)
        planned = plan(self.parts, list(self.seats.values()), max_prefill_tokens)
        for group in planned.prefill:
            self._prefill(group)
        for seat in [seat for seat in self.seats.values() if seat.ready and seat.request.max_new_tokens == 0]:
            output = self._finish(seat, "length")
            self._deliver(Update(id=seat.request.id, tokens=[], text="", output=output, times=seat.times))
        ready = [seat for seat in self.seats.values() if seat.ready]
        together = [seat for seat in ready if not seat.suspect]
        for seats in ([together] if together else []) + [[seat] for seat in ready if seat.suspect]:
            self._decode(seats, dice, watch)
        for seats in planned.first:
            self._decode(seats, dice, watch)

    def _prefill(self, chunks: Sequence[PrefillChunk]) -> None:
        """Prefill chunks in one forward."""
        seats = [chunk.seat for chunk in chunks]
        marks = [mark(seat.state) for seat in seats]
        try:
            logprobs = prefill_chunk(self.parts, [seat.state for seat in seats], [chunk.count for chunk in chunks])
        except BaseException as error:
            self._failed(seats, marks, error)
        else:
            for chunk, scores in zip(chunks, logprobs, strict=True):
                chunk.seat.ready = chunk.last
                if scores is not None:
                    chunk.seat.note_prompt(chunk.end - chunk.count, scores)

    def _decode(
        self, seats: Sequence[Seat], dice: Callable[[Sequence[Running]], Dice] | None, watch: Watch | None
    ) -> None:
        """One step of ready seats together."""
        by_id = {seat.request.id: seat for seat in seats}
        states = [seat.state for seat in seats]
        marks = [mark(state) for state in states]
        try:
            steps = self.parts.decoding.step(
                self.parts,
                states,
                dice=None if dice is None else dice(states),
                keep=lambda state, tokens: by_id[state.request.id].keep(tokens),
                watch=watch,
            )
        except BaseException as error:
            self._failed(seats, marks, error)
        else:
            for step in steps:
                by_id[step.request].ready = True
                self._deliver(self._update(by_id[step.request], step))

    def _failed(self, seats: Sequence[Seat], marks: Sequence[Mark], error: BaseException) -> None:
        """Undo a forward that failed. A single request ends; several requests will be tried one by one. An interrupt is
        raised again.
        """
        stood = [self._take_back(seat, to) for seat, to in zip(seats, marks, strict=True)]
        if not isinstance(error, Exception):
            raise error
        if len(seats) == 1 and stood[0]:
            self._fail(seats[0], error)

    def _take_back(self, seat: Seat, to: Mark) -> bool:
        """Put a request back to where it was before a failed step. If that fails too, end it and return False."""
        try:
            rewind(self.parts, seat.state, to)
            seat.start_over(self._tokenizer)
        except Exception as error:
            self._fail(seat, error)
            return False
        return True

    def _update(self, seat: Seat, step: Step) -> Update:
        tokens = list(step.tokens)
        seat.note(step)
        text = seat.ending.take()
        reason: FinishReason | None = None
        if seat.ended or seat.ending.stopped or tokens[-1] in seat.request.eos_ids:
            reason = "stop"
        elif tokens_left(self.parts, seat.state) == 0:
            reason = "length"
        if reason is None:
            return Update(id=step.request, tokens=tokens, text=text, step=step, times=seat.times)
        text += seat.ending.finish()
        output = self._finish(seat, reason)
        return Update(id=step.request, tokens=tokens, text=text, output=output, step=step, times=seat.times)

    def _fail(self, seat: Seat, error: Exception) -> None:
        """End a request by an error."""
        del self.seats[seat.request.id]
        self._admission.abandon(seat)
        output = seat.output("error", error)
        self._deliver(Update(id=seat.request.id, tokens=[], text="", output=output, times=seat.times))

    def _finish(self, seat: Seat, reason: FinishReason) -> Output:
        """End a request. Its slot stays warm for a prompt with the same beginning."""
        del self.seats[seat.request.id]
        self._admission.leave(seat)
        seat.ending.finish()
        return seat.output(reason)
