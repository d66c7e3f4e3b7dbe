"""Logits to probabilities: the only place. Penalties, biases, processors, temperature, filters, in that order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.types import Sampling

FIRST_LOOK = 256
"""How many of the most likely tokens top-p looks at before it sorts the whole vocabulary."""


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
    greedy = [s.temperature == 0 for s in per_row]
    if all(greedy):
        return _one_hot(scores)
    # A tiny temperature may round to 0, so it has a floor; the largest score becomes 0, lest the quotient overflow.
    # overflow.
    smallest = torch.finfo(scores.dtype).tiny
    temperatures = _column(scores, [max(s.temperature or 1.0, smallest) for s in per_row])
    rows = _filter((scores - scores.amax(-1, keepdim=True)) / temperatures, per_row)
    if any(greedy):
        rows = torch.where(_column(scores, greedy).bool(), _one_hot(scores), rows)
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


def _filter(scores: Float[Tensor, "n vocab"], per_row: Sequence[Sampling]) -> Float[Tensor, "n vocab"]:
    vocab = scores.shape[-1]
    top_ks = [min(s.top_k, vocab) or vocab for s in per_row]
    if (largest := max((k for k in top_ks if k < vocab), default=0)) > 0:
        best = scores.topk(largest).values
        last = torch.tensor([k - 1 if k < vocab else 0 for k in top_ks], device=scores.device)[:, None]
        floor = torch.where(_column(scores, [k < vocab for k in top_ks]).bool(), best.gather(1, last), -torch.inf)
        scores = scores.masked_fill(scores < floor, -torch.inf)
    rows = scores.softmax(-1)
    if any(s.top_p < 1 for s in per_row):
        rows = _keep(rows, _nucleus_floor(rows, _column(rows, [s.top_p for s in per_row])))
    if any(s.min_p > 0 for s in per_row):
        rows = _keep(rows, rows.amax(-1, keepdim=True) * _column(rows, [s.min_p for s in per_row]))
    return rows


def _keep(rows: Float[Tensor, "n vocab"], floor: Float[Tensor, "n 1"]) -> Float[Tensor, "n vocab"]:
    rows = rows.masked_fill(rows < floor, 0.0)
    return rows / rows.sum(-1, keepdim=True)


def _nucleus_floor(rows: Float[Tensor, "n vocab"], top_p: Float[Tensor, "n 1"]) -> Float[Tensor, "n 1"]:
    """Probability of the last token of the smallest set whose mass reaches top_p; 0 where top_p is 1."""
    best = rows.topk(min(FIRST_LOOK, rows.shape[-1])).values
    if best.shape[-1] < rows.shape[-1] and bool(((best.sum(-1, keepdim=True) < top_p) & (top_p < 1)).any()):
        best = rows.sort(-1, descending=True).values
    before = best.cumsum(-1) - best
    floor = best.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    return torch.where(top_p < 1, floor, torch.zeros_like(floor))
