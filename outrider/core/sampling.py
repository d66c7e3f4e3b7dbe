"""Logits become probabilities here and nowhere else: penalties, biases, processors, temperature, filters, in that
order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.nucleus import Spare, nucleus_floor
from outrider.core.processors import Processor, is_blind
from outrider.core.types import InputError, Sampling

FOLDED_FROM = 0.01
"""From this temperature on, softmax alone takes the maximum off: the quotient of a logit below 1e36 cannot overflow."""
AT_ONCE = {"cpu": 2**19}
"""How many numbers are filtered at once: on a CPU about as many as its cache holds, elsewhere `AT_ONCE_ELSEWHERE`."""
AT_ONCE_ELSEWHERE = 2**25
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The text before a node's children: the prompt, and the output with the node's path, the node included."""

    prompt: Sequence[int]
    output: Sequence[int]


def to_rows(
    logits: Float[Tensor, "n vocab"],
    owners: Int[np.ndarray, " n"],
    samplings: Sequence[Sampling],
    prefix: Callable[[int], Prefix],
    masks: Int[Tensor, "n words"] | None = None,
) -> Float[Tensor, "n vocab"]:
    r"""Distributions that tokens are drawn from, each row summing to one, in float32 (float64 stays float64).

    The order is transformers': repetition, frequency and presence penalties, logit bias, processors, then the mask of
    a constraint, so that nothing brings back what it forbids; then temperature, top-k, top-p, min-p. Tokens that tie
    with the last kept token are kept too. Temperature 0 gives a one-hot row at the largest adjusted logit, the first of
    them on a tie. Processors that read no tokens and stand last in every row's list get all rows at once.

    Args:
        logits: Raw logits.
        owners: Which request each row belongs to.
        samplings: One per request.
        prefix: Returns the text before row i; called only for rows whose settings read it.
        masks: Packed masks of the allowed tokens; None allows all.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> to_rows(logits, np.array([0]), [Sampling(temperature=0)], lambda row: Prefix(prompt=[], output=[]))
        tensor([[1., 0., 0.]])
    """
    per_row = [samplings[owner] for owner in owners.tolist()]
    return RowRule.of(per_row, logits)(logits, prefix, masks)


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """`to_rows` for rows with given settings, so that the same settings are looked at once for many calls.

    Attributes:
        per_row: The settings of each row.
        adjusts: Whether any of them change logits before temperature and filters.
        greedy: The rows at temperature 0.
        groups: The rows, as many in a group as are worked on at once.
    """

    per_row: Sequence[Sampling]
    adjusts: bool
    greedy: Sequence[int]
    groups: Sequence["_Group"]

    @property
    def all_greedy(self) -> bool:
        """Whether all rows are at temperature 0."""
        return len(self.greedy) == len(self.per_row)

    def temperatures_alone(self, device: torch.device) -> Float[Tensor, "n 1"] | None:
        """The temperatures, where rows are nothing but `tempered` logits; otherwise None."""
        if self.adjusts or self.greedy or any(group.filters or group.folds for group in self.groups):
            return None
        return _column([s.temperature for s in self.per_row], torch.float32, device)

    def likeliest(
        self,
        logits: Float[Tensor, "n vocab"],
        prefix: Callable[[int], Prefix],
        masks: Int[Tensor, "n words"] | None = None,
    ) -> Int[Tensor, " n"]:
        """The token that each row at temperature 0 is one-hot at; any token where a row is no distribution."""
        return _largest(self._scores(logits, prefix, masks))

    def lawful_likeliest(
        self,
        logits: Float[Tensor, "n vocab"],
        prefix: Callable[[int], Prefix],
        masks: Int[Tensor, "n words"] | None = None,
    ) -> Int[Tensor, " n"]:
        """As `likeliest`, with -1 where a row is no distribution."""
        return _lawful_largest(self._scores(logits, prefix, masks))

    @classmethod
    def of(cls, per_row: Sequence[Sampling], like: Float[Tensor, "n vocab"]) -> "RowRule":
        """The rule for rows of these settings. Logits will be of the shape, type and device of `like`."""
        filters = any(s.top_k or s.top_p < 1 or s.min_p for s in per_row)
        greedy = [i for i, s in enumerate(per_row) if s.temperature == 0]
        count = rows_at_once(like) if filters else max(1, len(per_row))
        firsts = range(0, len(per_row) if len(greedy) < len(per_row) else 0, count)
        return cls(
            per_row=per_row,
            adjusts=any(s.reads_prefix or s.logit_bias or s.processors for s in per_row),
            greedy=greedy,
            groups=[_Group.of(slice(first, first + count), per_row, like, filters) for first in firsts],
        )

    def __call__(
        self,
        logits: Float[Tensor, "n vocab"],
        prefix: Callable[[int], Prefix],
        masks: Int[Tensor, "n words"] | None = None,
    ) -> Float[Tensor, "n vocab"]:
        """The rows of some logits, as `to_rows` makes them."""
        scores = self._scores(logits, prefix, masks)
        if self.all_greedy:
            return _one_hot(scores)
        rows = fresh(scores, dtype=_dtype(scores))
        spare: Spare | None = None
        for group in self.groups:
            part = rows[group.rows]
            group.scale(part, scores[group.rows])
            if group.filters:
                spare = spare or _spare(part)
                _filter(part, group.per_row, spare.first(len(part)))
            else:
                torch.softmax(part, -1, out=part)
        if self.greedy:
            rows[self.greedy] = _one_hot(scores[self.greedy])
        return rows

    def _scores(
        self, logits: Float[Tensor, "n vocab"], prefix: Callable[[int], Prefix], masks: Int[Tensor, "n words"] | None
    ) -> Float[Tensor, "n vocab"]:
        """Logits after penalties, biases, processors and the mask."""
        scores = _adjusted(logits, self.per_row, prefix) if self.adjusts else logits
        return scores if masks is None else masked(scores, masks)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows that are worked on together.

    Attributes:
        rows: Which rows of a call they are.
        per_row: Their settings.
        filters: Whether any of them is filtered.
        temperatures: What their scores are divided by; None where all are 1.
        folds: Whether the largest score is taken off first.
    """

    rows: slice
    per_row: Sequence[Sampling]
    filters: bool
    temperatures: Float[Tensor, "n 1"] | None
    folds: bool

    @classmethod
    def of(cls, rows: slice, per_row: Sequence[Sampling], like: Float[Tensor, "_ vocab"], filters: bool) -> "_Group":
        own, dtype = per_row[rows], _dtype(like)
        # A tiny temperature may round to 0, so it has a floor.
        temperatures = [max(s.temperature or 1.0, torch.finfo(dtype).tiny) for s in own]
        folds = min(temperatures) < FOLDED_FROM
        scales = folds or any(t != 1 for t in temperatures)
        column = _column(temperatures, dtype, like.device) if scales else None
        return cls(rows=rows, per_row=own, filters=filters, temperatures=column, folds=folds)

    def scale(self, rows: Float[Tensor, "n vocab"], scores: Float[Tensor, "n vocab"]) -> None:
        """Write scores over temperature into the rows."""
        if self.temperatures is None:
            rows.copy_(scores)
        elif self.folds:
            torch.sub(scores, scores.amax(-1, keepdim=True).to(rows.dtype), out=rows).div_(self.temperatures)
        else:
            torch.div(scores, self.temperatures, out=rows)


def tempered(logits: Float[Tensor, "n vocab"], temperatures: Float[Tensor, "n 1"]) -> Float[Tensor, "n vocab"]:
    """The rows of `to_rows` where settings have a temperature of at least `FOLDED_FROM` and nothing else, to the bit.

    Example:
        >>> tempered(torch.tensor([[2.0, 1.0]]), torch.tensor([[0.5]]))
        tensor([[0.8808, 0.1192]])
    """
    return (logits / temperatures.to(_dtype(logits))).softmax(-1)


def pack(allowed: Bool[Tensor, "n vocab"]) -> Int[Tensor, "n words"]:
    """Masks as bits, the first of 32 tokens in the lowest bit of a word; the rest of the last word is 0.

    Example:
        >>> pack(torch.tensor([[True, False, True], [False, True, False]]))
        tensor([[5],
                [2]], dtype=torch.int32)
    """
    bits = np.packbits(allowed.cpu().numpy(), axis=1, bitorder="little")
    return torch.from_numpy(np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4))).view(np.int32))


def unpacked(masks: Int[Tensor, "n words"], width: int) -> Bool[Tensor, "n width"]:
    """Packed masks as bools over the first `width` tokens, on the same device.

    Example:
        >>> unpacked(torch.tensor([[5]], dtype=torch.int32), 4)
        tensor([[ True, False,  True, False]])
    """
    octets = masks.contiguous().view(torch.uint8)
    bits = octets[..., None] >> torch.arange(8, dtype=torch.uint8, device=masks.device) & 1
    return bits.flatten(1)[:, :width] != 0


def masked(logits: Float[Tensor, "n vocab"], masks: Int[Tensor, "n words"]) -> Float[Tensor, "n vocab"]:
    """The logits with -inf at the tokens that packed masks forbid.

    Example:
        >>> masked(torch.zeros(1, 3), pack(torch.tensor([[True, False, True]])))
        tensor([[0., -inf, 0.]])
    """
    allowed = unpacked(masks.to(logits.device, non_blocking=True), logits.shape[1])
    return logits.masked_fill(~allowed, -torch.inf)


def rows_at_once(rows: Float[Tensor, "n vocab"]) -> int:
    """How many rows to copy and work on at once: on a CPU as many as its cache holds."""
    return max(1, AT_ONCE.get(rows.device.type, AT_ONCE_ELSEWHERE) // rows.shape[-1])


def log_probs(logits: Float[Tensor, "n vocab"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Log-softmax of the raw logits at one token per row, in float32."""
    return logits.float().log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a column on the device, without waiting for it."""
    return torch.tensor(values, dtype=dtype)[:, None].to(device, non_blocking=True)


def _one_hot(scores: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """One-hot rows at the largest score, the first on a tie; NaN if no score is above -inf, or if a score is NaN."""
    largest, dtype = _lawful_largest(scores), _dtype(scores)
    if scores.device.type == "cpu":
        # NumPy is several times as fast at few rows.
        places = largest.numpy()
        rows = np.zeros(scores.shape, dtype=_NUMPY[dtype])
        rows[np.arange(len(rows)), places] = 1
        rows[places < 0] = np.nan
        return torch.from_numpy(rows)
    empty = torch.where(largest[:, None] >= 0, 0.0, torch.nan).to(dtype)
    return empty.expand(scores.shape).clone().scatter_add_(-1, largest.clamp_min(0)[:, None], torch.ones_like(empty))


def _lawful_largest(scores: Float[Tensor, "n vocab"]) -> Int[Tensor, " n"]:
    """The place of the largest score, the first on a tie; -1 if no score is above -inf, or if a score is NaN."""
    if scores.device.type == "cpu":
        wide = _on_host(scores)
        places = wide.argmax(-1)
        places[~(wide[np.arange(len(wide)), places] > -np.inf)] = -1
        return torch.from_numpy(places)
    largest = scores.argmax(-1)
    return torch.where(scores.gather(-1, largest[:, None])[:, 0] > -torch.inf, largest, -1)


def _largest(scores: Float[Tensor, "n vocab"]) -> Int[Tensor, " n"]:
    """The place of the largest score, the first on a tie; that of a NaN if there is one."""
    return torch.from_numpy(_on_host(scores).argmax(-1)) if scores.device.type == "cpu" else scores.argmax(-1)


def _on_host(scores: Float[Tensor, "n vocab"]) -> Float[np.ndarray, "n vocab"]:
    """Scores on a CPU as NumPy's, which is several times as fast at the largest of many numbers."""
    wide: Float[np.ndarray, "n vocab"] = (scores if scores.dtype in _NUMPY else scores.float()).numpy()
    return wide


def without_law(rows: Float[Tensor, "n vocab"]) -> Bool[Tensor, " n"]:
    """Which rows of `to_rows` are not distributions, because their logits are NaN or all tokens are forbidden.

    Softmax and temperature 0 spread NaN over the whole row.
    """
    return rows[:, 0].isnan()


def _dtype(scores: Tensor) -> torch.dtype:
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def fresh(like: Tensor, *, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory of a tensor's size, or for other rows, or of another type.

    On a CPU NumPy allocates it, with huge pages, which are faster to write for the first time.
    """
    shape, dtype = (len(like) if rows is None else rows, *like.shape[1:]), dtype or like.dtype
    if like.device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty(shape, dtype=_NUMPY[dtype]))
    return torch.empty(shape, dtype=dtype, device=like.device)


def _together(per_row: Sequence[Sampling]) -> Sequence[Processor]:
    """The processors that end every row's list and read no tokens."""
    lists = list({id(s.processors): s.processors for s in per_row}.values())
    count = 0
    for column in zip(*(reversed(processors) for processors in lists), strict=False):
        if not is_blind(column[0]) or any(processor is not column[0] for processor in column):
            break
        count += 1
    return lists[0][len(lists[0]) - count :]


def _adjusted(
    logits: Float[Tensor, "n vocab"], per_row: Sequence[Sampling], prefix: Callable[[int], Prefix]
) -> Float[Tensor, "n vocab"]:
    """Penalties, biases and processors of all rows."""
    scores = logits if logits.dtype == torch.float64 else logits.float()
    together = _together(per_row)
    if any(s.reads_prefix or s.logit_bias or len(s.processors) > len(together) for s in per_row):
        each = [s.processors[: len(s.processors) - len(together)] for s in per_row]
        scores = torch.stack([_adjust(scores[i], s, each[i], i, prefix) for i, s in enumerate(per_row)])
    for processor in together:
        scores = processor(torch.empty(len(scores), 0, dtype=torch.long, device=scores.device), scores)
    return scores


def _adjust(
    scores: Float[Tensor, " vocab"],
    sampling: Sampling,
    processors: Sequence[Processor],
    row: int,
    prefix: Callable[[int], Prefix],
) -> Float[Tensor, " vocab"]:
    """Penalties, biases and the row's own processors. The scores are copied: processors may change them in place."""
    scores, seen = scores.clone(), torch.empty(0, dtype=torch.long, device=scores.device)
    if sampling.reads_prefix:
        before = prefix(row)
        seen = torch.tensor([*before.prompt, *before.output], dtype=torch.long, device=scores.device)
        if sampling.repetition_penalty != 1:
            old = scores[seen]
            factor = sampling.repetition_penalty
            scores = scores.index_copy(0, seen, torch.where(old > 0, old / factor, old * factor))
        if sampling.frequency_penalty or sampling.presence_penalty:
            said = seen[len(before.prompt) :]
            counts = torch.bincount(said, minlength=scores.numel())[: scores.numel()].to(scores.dtype)
            scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.logit_bias:
        ids = torch.tensor(list(sampling.logit_bias), device=scores.device)
        scores = scores.index_add(0, ids, scores.new_tensor(list(sampling.logit_bias.values())))
    for processor in processors:
        scores = _processed(processor, seen, scores)
    return scores


def _processed(
    processor: Processor, seen: Int[Tensor, " seen"], scores: Float[Tensor, " vocab"]
) -> Float[Tensor, " vocab"]:
    """What a processor makes of one row. Raises InputError where that is no row of the same tokens."""
    made = processor(seen[None], scores[None])
    if not isinstance(made, Tensor) or made.shape != (1, len(scores)):
        name = getattr(processor, "__name__", type(processor).__name__)
        shape = f"shape {tuple(made.shape)}" if isinstance(made, Tensor) else repr(made)
        raise InputError(f"the logits processor {name} must return scores of shape (1, {len(scores)}), got {shape}")
    return made[0]


def _spare(rows: Float[Tensor, "n vocab"]) -> Spare:
    """Memory for rows of this size."""
    return Spare(scores=fresh(rows), masses=fresh(rows, dtype=torch.float64), index=fresh(rows, dtype=torch.int64))


def _filter(rows: Float[Tensor, "n vocab"], per_row: Sequence[Sampling], spare: Spare) -> None:
    """Turn scaled scores into filtered distributions, in place."""
    top_ks = [min(s.top_k, rows.shape[-1]) or rows.shape[-1] for s in per_row]
    largest = max((k for k in top_ks if k < rows.shape[-1]), default=0)
    if largest:
        best = rows.topk(largest).values
        last = _column([min(k, largest) - 1 for k in top_ks], torch.int64, rows.device)
        without = _column([k > largest for k in top_ks], torch.bool, rows.device)
        floor = best.gather(1, last).masked_fill_(without, -torch.inf)
        torch.ge(rows, floor, out=spare.scores)
    torch.softmax(rows, -1, out=rows)
    if largest:
        _keep(rows, spare.scores)
    if any(s.top_p < 1 for s in per_row):
        top_ps = _column([s.top_p for s in per_row], torch.float64, rows.device)
        _keep(rows, torch.ge(rows, nucleus_floor(rows, top_ps, spare), out=spare.scores))
    if any(s.min_p > 0 for s in per_row):
        floor = rows.amax(-1, keepdim=True) * _column([s.min_p for s in per_row], rows.dtype, rows.device)
        _keep(rows, torch.ge(rows, floor, out=spare.scores))


def _keep(rows: Float[Tensor, "n vocab"], kept: Float[Tensor, "n vocab"]) -> None:
    """Set to 0, in place, the entries where `kept` is 0; it is 1 elsewhere. A product is several times faster than a
    masked fill.
    """
    rows.mul_(kept)
    rows.div_(rows.sum(-1, keepdim=True))
