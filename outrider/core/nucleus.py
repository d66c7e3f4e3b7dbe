"""The nucleus of a row (top-p): the probability of the last token of the smallest set whose mass reaches a bound."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

FIRST_LOOK = 256
"""How many of the most likely tokens top-p looks at first, in vocabularies below `WIDE`; in wider ones that is slower
than what follows it."""
WIDE = 2**15
BUCKETS = 2**14
"""Most buckets of equal exponent and leading bits into which top-p sorts probabilities."""


@dataclass(frozen=True, kw_only=True)
class Spare:
    """Memory that is reused for one group of rows after the other. Fresh memory costs more than the computation."""

    scores: Float[Tensor, "n vocab"]
    masses: Float[Tensor, "n vocab"]
    index: Int[Tensor, "n vocab"]

    def first(self, count: int) -> "Spare":
        """The memory for the first rows."""
        return Spare(scores=self.scores[:count], masses=self.masses[:count], index=self.index[:count])


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """Tokens that include the last one that top-p keeps, the most likely first.

    Attributes:
        probabilities: Of these tokens; padded with 0.
        before: Mass of all tokens that are more likely.
        total: Mass of the whole row.
    """

    probabilities: Float[Tensor, "n some"]
    before: Float[Tensor, "n 1"]
    total: Float[Tensor, "n 1"]


def nucleus_floor(rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"], spare: Spare) -> Float[Tensor, "n 1"]:
    """Probability of the last token of the smallest set whose mass reaches the share top_p of the row's; 0 where all
    tokens are kept.

    A softmax of a hundred thousand numbers in float32 misses a mass of 1 by some 1e-5, so the row's own counts. Masses
    are added up in float64. On a CPU only the tokens near the floor are sorted. Elsewhere the whole row is: this copies
    nothing from the device, so nobody waits for it.
    """
    if rows.device.type != "cpu":
        return _of_sorted(rows, top_p)
    candidates = _most_likely(rows, top_p) or _around(rows, top_p, spare)
    running = torch.cat([candidates.before, candidates.probabilities], 1).cumsum(-1)[:, :-1]
    dropped = (running >= top_p * candidates.total) | (candidates.probabilities == 0)
    floor = candidates.probabilities.masked_fill(dropped, torch.inf).amin(-1, keepdim=True)
    return floor.masked_fill_((top_p >= 1) | candidates.total.isnan(), 0.0)


def _of_sorted(rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """The floor by a full sort. At a top_p of 1 it is the row's smallest probability."""
    best = rows.sort(-1, descending=True).values
    mass = best.cumsum(-1, dtype=torch.float64)
    short = mass[:, :-1] < top_p * mass[:, -1:]
    return best.gather(1, short.sum(-1, keepdim=True))


def _most_likely(rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"]) -> _Candidates | None:
    """The most likely tokens; None if that is slow, or if a row may need more of them."""
    if (vocab := rows.shape[-1]) >= WIDE:
        return None
    best = rows.topk(min(FIRST_LOOK, vocab)).values
    # torch adds in parts, so that float32 is exact enough here.
    total = rows.sum(-1, keepdim=True).double()
    if vocab > FIRST_LOOK:
        short = best.sum(-1, keepdim=True, dtype=torch.float64) < top_p * total
        if bool((short & (top_p < 1)).any()):
            return None
    return _Candidates(probabilities=best, before=torch.zeros_like(top_p), total=total)


def _around(rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"], spare: Spare) -> _Candidates:
    """The tokens near the floor: a radix selection.

    Positive floats are ordered as their bits are. So the mass is added up by leading bits, and only the bucket in which
    it reaches top_p needs sorting. The buckets are read from 1 downwards.
    """
    bits = torch.int32 if rows.dtype == torch.float32 else torch.int64
    one = int(torch.ones((), dtype=rows.dtype).view(bits))
    shift = (one // BUCKETS).bit_length()
    last = one >> shift
    bucket = torch.bitwise_right_shift(rows.view(bits), shift, out=spare.scores.view(bits))
    # What is not a number lies outside; clamped, it spoils no row but its own.
    index = spare.index.copy_(bucket.clamp_(0, last))
    mass = torch.zeros(len(rows), last + 1, dtype=torch.float64, device=rows.device)
    running = mass.scatter_add_(1, index, spare.masses.copy_(rows)).flip(-1).cumsum(-1)
    place = (running < top_p * running[:, -1:]).sum(-1, keepdim=True).clamp_(max=last)
    before = running.gather(1, (place - 1).clamp_(min=0)).masked_fill_(place == 0, 0.0)
    owners, columns = _ones(torch.eq(bucket, (last - place).to(bits), out=bucket))
    counts = torch.bincount(owners, minlength=len(rows))
    number = torch.arange(len(owners), device=rows.device) - (counts.cumsum(0) - counts)[owners]
    best = rows.new_zeros(len(rows), int(counts.max()))
    best[owners, number] = rows[owners, columns]
    best = best.sort(-1, descending=True).values
    return _Candidates(probabilities=best, before=before, total=running[:, -1:])


def _ones(marks: Int[Tensor, "n vocab"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Rows and columns of the marks that are 1, few among many, in order: first the blocks that hold one, then these
    blocks alone, because a maximum is several times faster than a search."""
    vocab = marks.shape[-1]
    block = math.gcd(vocab, 64)
    blocks = marks.view(-1, block)
    holding = blocks.amax(-1).nonzero().squeeze(1)
    inside = blocks[holding].nonzero()
    place = holding[inside[:, 0]] * block + inside[:, 1]
    return place // vocab, place % vocab
