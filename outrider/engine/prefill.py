"""Which chunks of new prompts a step prefills, and which of them share a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decoding.drafting import drafter_of
from outrider.decoding.progress import pending_tokens
from outrider.decoding.protocol import Parts
from outrider.engine.seats import Seat
from outrider.lm.slots.budget import prefill_size


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """A part of a prompt to prefill.

    Attributes:
        count: Number of tokens.
        end: Number of tokens in the target's cache afterwards.
        last: Whether only the newest token is left afterwards.
    """

    seat: Seat
    count: int
    end: int
    last: bool

    def like(self, longest: "PrefillChunk") -> bool:
        """Whether a forward over both chunks needs little padding, in new tokens and in context."""
        if self.seat.state.drafter is not longest.seat.state.drafter:
            return False
        new, all_ = longest.count - self.count, abs(longest.end - self.end)
        return new <= max(16, longest.count // 4) and all_ <= max(64, longest.end // 4)


@dataclass(frozen=True, kw_only=True)
class PrefillPlan:
    """What to do about new prompts in one step.

    Attributes:
        prefill: Groups of chunks to prefill; a group shares a forward.
        first: Groups of seats that make their first step now, without the decoding requests. That step also prefills
            the rest of the prompt.
    """

    prefill: list[list[PrefillChunk]]
    first: list[list[Seat]]


def plan(parts: Parts, seats: Sequence[Seat], most: int | None) -> PrefillPlan:
    """Choose the chunks of new prompts to prefill, first come first served, at most `most` tokens in all; None: as many
    as is usual on the target's device.

    A seat with nothing left to prefill becomes ready. If no request decodes yet, the first step of a request prefills
    the last chunk of its prompt. A drafter that reads hidden states cannot draft in the first step of a request. That
    step always prefills the last chunk, in a forward apart from requests that decode.
    """
    new = [seat for seat in seats if seat.running is not None and not seat.ready]
    if not new:
        return PrefillPlan(prefill=[], first=[])
    decoding = any(seat.ready for seat in seats)
    left = prefill_size(parts.target.device, decoding=decoding) if most is None else most
    chunks: list[PrefillChunk] = []
    for seat in new:
        behind = len(pending_tokens(parts, seat.state))
        count = min(behind, left)
        left -= count
        seat.ready = behind == 0
        end = parts.target.length(seat.state.slot) + count
        chunks.append(PrefillChunk(seat=seat, count=count, end=end, last=count == behind))
    chunks = [chunk for chunk in chunks if chunk.count]
    plain = [chunk for chunk in chunks if chunk.last and _begins_plainly(chunk.seat) and not _scores(chunk.seat)]
    groups, first = alike([chunk for chunk in chunks if chunk not in plain]), alike(plain)
    together = len(groups) + len(first) == 1 and not decoding and not any(seat.ready for seat in new)
    together = together and not any(_scores(chunk.seat) for chunk in chunks)
    if together and all(chunk.last for chunk in chunks) and _prefills_in_step(parts, first):
        for chunk in chunks:
            chunk.seat.ready = True
        return PrefillPlan(prefill=[], first=[])
    return PrefillPlan(prefill=groups, first=[[chunk.seat for chunk in group] for group in first])


def alike(chunks: Sequence[PrefillChunk]) -> list[list[PrefillChunk]]:
    """Group chunks that can share a forward without much padding. A chunk of a suspect stays alone."""
    groups: list[list[PrefillChunk]] = []
    drafters = {id(drafter): i for i, drafter in enumerate(chunk.seat.state.drafter for chunk in chunks)}
    for chunk in sorted(chunks, key=lambda c: (c.seat.suspect, drafters[id(c.seat.state.drafter)], -c.count)):
        if groups and not chunk.seat.suspect and chunk.like(groups[-1][0]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _begins_plainly(seat: Seat) -> bool:
    """Whether a request's next step is its first and drafts nothing, because its drafter reads hidden states."""
    return bool(drafter_of(seat.state).taps) and seat.state.num_steps == 0


def _scores(seat: Seat) -> bool:
    """Whether the logits of a request's prompt are wanted, which a step does not keep."""
    return seat.request.prompt_logprobs is not None


def _prefills_in_step(parts: Parts, plain: Sequence[object]) -> bool:
    """Whether one forward may prefill the rest of a prompt and verify a draft behind it.

    It may not if decoding drafts ahead, or if a rejected draft would force a second prefill (`LM.crops`).
    """
    return not parts.decoding.drafts_ahead and (parts.target.crops or bool(plain))
