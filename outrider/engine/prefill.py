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


def plan(parts: Parts, seats: Sequence[Seat], most: int) -> list[list[Chunk]]:
    """Chunks of all new prompts, first come first, at most so many tokens in all; groups that share a forward.

    Seats of which nothing is left to digest become ready. Where no request decodes yet, the last chunks of prompts are
    left to their first step, whose forward digests them too: their seats become ready as well.
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
    groups = alike([chunk for chunk in chunks if chunk.count])
    alone = len(groups) == 1 and not decoding and not any(seat.ready for seat in new)
    if alone and all(chunk.last for chunk in chunks) and _digests_in_step(parts, new):
        for seat in new:
            seat.ready = True
        return []
    return groups


def alike(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Chunks that can share a forward without much padding; those of suspects stay alone."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks, key=lambda chunk: (chunk.seat.suspect, -chunk.count)):
        if groups and not chunk.seat.suspect and chunk.like(groups[-1][0]):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return groups


def _digests_in_step(parts: Parts, seats: Sequence[Seat]) -> bool:
    """Whether a step may digest a prompt and verify what was drafted behind it in one forward.

    Not where decoding drafts ahead, nor where a rejected draft would make the prompt be digested again. A drafter that
    must see hidden states first drafts nothing in such a step.
    """
    nothing = all(drafter_of(seat.state).taps for seat in seats)
    return not parts.decoding.drafts_ahead and (parts.target.crops or nothing)
