"""Logits to probabilities: the only place. Penalties, biases, processors, temperature, filters, in that order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.types import Sampling

FIRST_LOOK = 256
"""Up to this vocabulary top-p sorts a row; beyond it, it sorts only the tokens near the floor."""
BUCKETS = 2**14
"""Into how many kinds of equal exponent and leading bits top-p divides the probabilities of a wide row."""
FOLDED_ABOVE = 0.01
"""From this temperature on, the quotient of no logit overflows that is below 1e36, so softmax alone takes the maximum
off; below it, that happens before the division."""
AT_ONCE = {"cpu": 2**19}
"""Numbers in one piece of work, by device: on a CPU as many as its caches hold."""
AT_ONCE_ELSEWHERE = 2**25


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The tokens before a node: the request's prompt, and its output with the node's own path, the node included."""

    prompt: Sequence[int]
    output: Sequence[int]


def to_rows(
    logits: Float[Tensor, "n vocab"],
    owners: Int[np.ndarray, " n"],
    samplings: Sequence[Sampling],
    prefix: Callable[[int], Prefix],
) -> Float[Tensor, "n vocab"]:
    r"""Distributions that tokens are drawn from, each row summing to one, in float32 (float64 stays float64).

    The order is transformers': repetition, frequency and presence penalties, logit bias, processors; then temperature,
    top-k, top-p, min-p. Tokens that tie with the last one kept are kept too. Temperature 0 gives a one-hot row at the
    largest adjusted logit, the first of them on a tie.

    Args:
        logits: Raw logits.
        owners: Which request each row belongs to.
        samplings: One per request.
        prefix: Tokens before row i; called only for rows whose settings read them.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> to_rows(logits, np.array([0]), [Sampling(temperature=0)], lambda row: Prefix(prompt=[], output=[]))
        tensor([[1., 0., 0.]])
    """
    per_row = [samplings[owner] for owner in owners.tolist()]
    scores = logits if logits.dtype == torch.float64 else logits.float()
    if any(s.reads_prefix or s.logit_bias for s in per_row):
        scores = torch.stack(
            [_adjust(row, s, i, prefix) for i, (row, s) in enumerate(zip(scores, per_row, strict=True))]
        )
    if all(s.temperature == 0 for s in per_row):
        return _one_hot(scores)
    rows = torch.empty_like(scores, memory_format=torch.contiguous_format)
    count = max(1, AT_ONCE.get(scores.device.type, AT_ONCE_ELSEWHERE) // max(1, scores.shape[-1]))
    spare = torch.empty_like(rows[:count])
    for first in range(0, len(rows), count):
        part = slice(first, first + count)
        _fill(rows[part], scores[part], per_row[part], spare[: len(rows[part])])
    return rows


def log_probs(logits: Float[Tensor, "n vocab"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Log-softmax of the raw logits at one token per row, in float32."""
    return logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def _column(like: Tensor, values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _one_hot(scores: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1.0)


def _adjust(
    scores: Float[Tensor, " vocab"], sampling: Sampling, row: int, prefix: Callable[[int], Prefix]
) -> Float[Tensor, " vocab"]:
    if sampling.reads_prefix:
        before = prefix(row)
        said = torch.tensor(list(before.output), dtype=torch.long, device=scores.device)
        seen = torch.tensor([*before.prompt, *before.output], dtype=torch.long, device=scores.device)
        counts = torch.bincount(said, minlength=scores.numel())[: scores.numel()].to(scores.dtype)
        if sampling.repetition_penalty != 1:
            old = scores[seen]
            factor = sampling.repetition_penalty
            scores = scores.index_copy(0, seen, torch.where(old > 0, old / factor, old * factor))
        scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
        scores = scores.index_add(0, ids, scores.new_tensor(list(sampling.logit_bias.values())))
    for processor in sampling.processors:
        scores = processor(seen[None], scores[None])[0]
    return scores


def _fill(
    rows: Float[Tensor, "n vocab"],
    scores: Float[Tensor, "n vocab"],
    per_row: Sequence[Sampling],
    spare: Float[Tensor, "n vocab"],
) -> None:
    """Write the distributions of some rows; the scores are read only, the spare memory is overwritten."""
    vocab = scores.shape[-1]
    # A tiny temperature may round to 0, so it has a floor.
    temperatures = [max(s.temperature or 1.0, torch.finfo(rows.dtype).tiny) for s in per_row]
    if min(temperatures) < FOLDED_ABOVE:
        torch.sub(scores, scores.amax(-1, keepdim=True), out=spare).div_(_column(rows, temperatures))
    elif any(t != 1 for t in temperatures):
        torch.div(scores, _column(rows, temperatures), out=spare)
    else:
        spare = spare.copy_(scores)
    torch.softmax(spare, -1, out=rows)
    top_ks = [min(s.top_k, vocab) or vocab for s in per_row]
    if (largest := max((k for k in top_ks if k < vocab), default=0)) > 0:
        best = spare.topk(largest).values
        last = torch.tensor([k - 1 if k < vocab else 0 for k in top_ks], device=rows.device)[:, None]
        floor = torch.where(_column(rows, [k < vocab for k in top_ks]).bool(), best.gather(1, last), -torch.inf)
        _keep(rows, spare.ge_(floor))
    if any(s.top_p < 1 for s in per_row):
        _keep(rows, torch.ge(rows, _nucleus_floor(rows, _column(rows, [s.top_p for s in per_row]).double()), out=spare))
    if any(s.min_p > 0 for s in per_row):
        floor = rows.amax(-1, keepdim=True) * _column(rows, [s.min_p for s in per_row])
        _keep(rows, torch.ge(rows, floor, out=spare))
    if any(s.temperature == 0 for s in per_row):
        greedy = [i for i, s in enumerate(per_row) if s.temperature == 0]
        rows[greedy] = _one_hot(scores[greedy])


def _keep(rows: Float[Tensor, "n vocab"], kept: Float[Tensor, "n vocab"]) -> None:
    """Drop in place what is 0 in `kept`, which is 1 elsewhere. A product is several times faster than a masked fill."""
    rows.mul_(kept)
    rows.div_(rows.sum(-1, keepdim=True))


def _nucleus_floor(rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """Probability of the last token of the smallest set whose mass reaches top_p; 0 where top_p is 1 or not reached.

    Masses are added in float64. Wide rows are never sorted: positive floats are ordered as their bits are, so their
    mass is added up by leading bits, and only the tokens of that bucket in which top_p is reached are sorted.
    """
    if rows.shape[-1] <= FIRST_LOOK:
        best, before = rows.sort(-1, descending=True).values, 0.0
    else:
        best, before = _around(rows, top_p)
    mass = best.double()
    reached = mass.cumsum(-1).sub_(mass).add_(before) >= top_p
    floor = best.masked_fill(reached, torch.inf).amin(-1, keepdim=True)
    everything = (top_p >= 1) | (before + mass.sum(-1, keepdim=True) < top_p)
    return floor.masked_fill(everything, 0.0)


def _around(
    rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"]
) -> tuple[Float[Tensor, "n some"], Float[Tensor, "n 1"]]:
    """Per row, the probabilities of the bucket in which top_p is reached, from the largest on and padded with 0, and
    the mass of all larger ones."""
    bits = torch.int32 if rows.dtype == torch.float32 else torch.int64
    one = int(torch.ones((), dtype=rows.dtype).view(bits))
    shift = max(0, (one // BUCKETS).bit_length())
    size = (one >> shift) + 1
    # Clamped, so that a row that is not a number stays one and does not break the rest.
    bucket = rows.view(bits).bitwise_right_shift(shift).clamp_(0, size - 1)
    mass = torch.zeros(len(rows), size, dtype=torch.float64, device=rows.device)
    mass.scatter_add_(1, bucket.long(), rows.double())
    above = mass.flip(-1).cumsum(-1)
    steps = (above < top_p).sum(-1, keepdim=True).clamp_(max=size - 1)
    before = above.gather(1, (steps - 1).clamp_(min=0)).masked_fill_(steps == 0, 0.0)
    wanted = (size - 1 - steps).to(bits)
    owners, columns = _ones(torch.eq(bucket, wanted, out=bucket))
    counts = torch.bincount(owners, minlength=len(rows))
    number = torch.arange(len(owners), device=rows.device) - (counts.cumsum(0) - counts)[owners]
    best = rows.new_zeros(len(rows), int(counts.max()))
    best[owners, number] = rows[owners, columns]
    return best.sort(-1, descending=True).values, before


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
