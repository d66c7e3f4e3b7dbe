"""What to digest of new prompts in a step, and which of them share a forward."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.decoding.drafting import drafter_of
from outrider.decoding.progress import undigested
from outrider.decoding.protocol import Parts
from outrider.engine.seats import Seat


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a prompt to digest.

    Attributes:
        count: How many tokens.
        end: How many are digested then.
        last: Whether nothing but the newest token is left then.
    """

    seat: Seat
    count: int
    end: int
    last: bool

    def like(self, longest: "Chunk") -> bool:
        """Whether a forward over both pads little, in new tokens and in those behind which they stand."""
        if self.seat.state.drafter is not longest.seat.state.drafter:
            return False
        new, all_ = longest.count - self.count, abs(longest.end - self.end)
        return new <= max(16, longest.count // 4) and all_ <= max(64, longest.end // 4)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What new prompts need.

    Attributes:
        digest: Groups of chunks that share a forward.
        first: Groups of seats whose first step digests what is left of their prompts, apart from those that decode.
    """

    digest: list[list[Chunk]]
    first: list[list[Seat]]


def plan(parts: Parts, seats: Sequence[Seat], most: int) -> Plan:
    """What to digest of all new prompts, first come first, at most so many tokens in all.

    Seats of which nothing is left to digest become ready. Where no request decodes yet, the last chunks of prompts are
    left to their first step, whose forward digests them too. A request whose drafter must see hidden states before it
    drafts makes a plain first step, which always digests the last chunk; beside requests that decode it is made apart.
    """
    left, chunks = most, []
    new = [seat for seat in seats if seat.running is not None and not seat.ready]
    decoding = any(seat.ready for seat in seats)
    for seat in new:
        behind = len(undigested(parts, seat.state))
        count = min(behind, left)
        left -= count
        seat.ready = behind == 0
        end = parts.target.length(seat.state.slot) + count
        chunks.append(Chunk(seat=seat, count=count, end=end, last=count == behind))
    chunks = [chunk for chunk in chunks if chunk.count]
    plain = [chunk for chunk in chunks if chunk.last and _begins_plainly(chunk.seat)]
    groups, first = alike([chunk for chunk in chunks if chunk not in plain]), alike(plain)
    together = len(groups) + len(first) == 1 and not decoding and not any(seat.ready for seat in new)
    if together and all(chunk.last for chunk in chunks) and _digests_in_step(parts, first):
        for seat in new:
            seat.ready = True
        return Plan(digest=[], first=[])
    return Plan(digest=groups, first=[[chunk.seat for chunk in group] for group in first])


def alike(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that can share a forward without much padding; those of suspects stay alone."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.seat.suspect, -chunk.count)):
        if groups and not chunk.seat.suspect and chunk.like(groups[-1][0]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _begins_plainly(seat: Seat) -> bool:
    """Whether a request's next step is its first and drafts nothing, because its drafter reads hidden states."""
    return bool(drafter_of(seat.state).taps) and seat.state.num_steps == 0


def _digests_in_step(parts: Parts, plain: Sequence[object]) -> bool:
    """Whether a step may digest a prompt and verify what was drafted behind it in one forward.

    Not where decoding drafts ahead, nor where a rejected draft would make the prompt be digested again.
    """
    return not parts.decoding.drafts_ahead and (parts.target.crops or bool(plain))
