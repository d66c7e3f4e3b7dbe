"""Logits become probabilities here and nowhere else: penalties, biases, processors, temperature, filters, in that
order."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.adjustment import Adjustment
from outrider.core.nucleus import Spare, nucleus_floor
from outrider.core.texts import Before
from outrider.core.types import Sampling
from outrider.core.uploads import column, row_type, upload

FOLDED_FROM = 0.01
"""From this temperature on, softmax alone takes the maximum off: the quotient of a logit below 1e36 cannot overflow."""
AT_ONCE = {"cpu": 2**19}
"""How many numbers are filtered at once: on a CPU about as many as its cache holds, elsewhere `AT_ONCE_ELSEWHERE`."""
AT_ONCE_ELSEWHERE = 2**25
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int64: np.int64}


def to_rows(
    logits: Float[Tensor, "n vocab"],
    owners: Int[np.ndarray, " n"],
    samplings: Sequence[Sampling],
    before: Callable[[], Before],
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
        before: Returns the text before each row; called only if the settings of a row read it.
        masks: Packed masks of the allowed tokens; None allows all.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
        >>> to_rows(logits, np.array([0]), [Sampling(temperature=0)], lambda: Before.of([[0]], [[]]))
        tensor([[1., 0., 0.]])
    """
    per_row = [samplings[owner] for owner in owners.tolist()]
    return RowRule.of(per_row, logits)(logits, before, masks)


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """`to_rows` for rows with given settings, so that the same settings are looked at once for many calls.

    Attributes:
        per_row: The settings of each row.
        adjusts: What they change in the logits before temperature and filters; None: nothing.
        num_greedy: How many rows are at temperature 0.
        some_greedy: Which rows these are; None where all or none are.
        groups: The rows, as many in a group as are worked on at once.
    """

    per_row: Sequence[Sampling]
    adjusts: Adjustment | None
    num_greedy: int
    some_greedy: Int[Tensor, " rows"] | None
    groups: Sequence["_Group"]

    @property
    def all_greedy(self) -> bool:
        """Whether all rows are at temperature 0."""
        return self.num_greedy == len(self.per_row)

    def temperatures_alone(self, device: torch.device) -> Float[Tensor, "n 1"] | None:
        """The temperatures, where rows are nothing but `tempered` logits; otherwise None."""
        others = self.adjusts is not None or self.num_greedy > 0
        if others or any(group.filter is not None or group.folds for group in self.groups):
            return None
        return column([s.temperature for s in self.per_row], torch.float32, device)

    def likeliest(
        self,
        logits: Float[Tensor, "n vocab"],
        before: Callable[[], Before],
        masks: Int[Tensor, "n words"] | None = None,
    ) -> Int[Tensor, " n"]:
        """The token that each row at temperature 0 is one-hot at; any token where a row is no distribution."""
        return _largest(self._scores(logits, before, masks))

    def lawful_likeliest(
        self,
        logits: Float[Tensor, "n vocab"],
        before: Callable[[], Before],
        masks: Int[Tensor, "n words"] | None = None,
    ) -> Int[Tensor, " n"]:
        """As `likeliest`, with -1 where a row is no distribution."""
        return _lawful_largest(self._scores(logits, before, masks))

    @classmethod
    def of(cls, per_row: Sequence[Sampling], like: Float[Tensor, "n vocab"]) -> "RowRule":
        """The rule for rows of these settings. Logits will be of the shape, type and device of `like`."""
        filters = any(s.top_k or s.top_p < 1 or s.min_p for s in per_row)
        greedy = [i for i, s in enumerate(per_row) if s.temperature == 0]
        count = rows_at_once(like) if filters else max(1, len(per_row))
        firsts = range(0, len(per_row) if len(greedy) < len(per_row) else 0, count)
        return cls(
            per_row=per_row,
            adjusts=Adjustment.of(per_row, like),
            num_greedy=len(greedy),
            some_greedy=upload(np.array(greedy), like.device) if 0 < len(greedy) < len(per_row) else None,
            groups=[_Group.of(slice(first, first + count), per_row, like, filters) for first in firsts],
        )

    def __call__(
        self,
        logits: Float[Tensor, "n vocab"],
        before: Callable[[], Before],
        masks: Int[Tensor, "n words"] | None = None,
    ) -> Float[Tensor, "n vocab"]:
        """The rows of some logits, as `to_rows` makes them."""
        scores = self._scores(logits, before, masks)
        if self.all_greedy:
            return _one_hot(scores)
        rows = fresh(scores, dtype=row_type(scores))
        spare: Spare | None = None
        for group in self.groups:
            part = rows[group.rows]
            group.scale(part, scores[group.rows])
            if group.filter is not None:
                spare = spare or _spare(part)
                group.filter(part, spare.first(len(part)))
            else:
                torch.softmax(part, -1, out=part)
        if self.some_greedy is not None:
            rows[self.some_greedy] = _one_hot(scores[self.some_greedy])
        return rows

    def _scores(
        self, logits: Float[Tensor, "n vocab"], before: Callable[[], Before], masks: Int[Tensor, "n words"] | None
    ) -> Float[Tensor, "n vocab"]:
        """Logits after penalties, biases, processors and the mask."""
        scores = logits if self.adjusts is None else self.adjusts(logits, before)
        return scores if masks is None else masked(scores, masks)


@dataclass(frozen=True, kw_only=True)
class _Group:
    """Rows that are worked on together.

    Attributes:
        rows: Which rows of a call they are.
        per_row: Their settings.
        filter: What is filtered out of them; None: nothing.
        temperatures: What their scores are divided by; None where all are 1.
        folds: Whether the largest score is taken off first.
    """

    rows: slice
    per_row: Sequence[Sampling]
    filter: "_Filter | None"
    temperatures: Float[Tensor, "n 1"] | None
    folds: bool

    @classmethod
    def of(cls, rows: slice, per_row: Sequence[Sampling], like: Float[Tensor, "_ vocab"], filters: bool) -> "_Group":
        group, dtype = per_row[rows], row_type(like)
        # A tiny temperature may round to 0, so it has a floor.
        temperatures = [max(s.temperature or 1.0, torch.finfo(dtype).tiny) for s in group]
        folds = min(temperatures) < FOLDED_FROM
        scales = folds or any(t != 1 for t in temperatures)
        scaled = column(temperatures, dtype, like.device) if scales else None
        kept = _Filter.of(group, like) if filters else None
        return cls(rows=rows, per_row=group, filter=kept, temperatures=scaled, folds=folds)

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
    return (logits / temperatures.to(row_type(logits))).softmax(-1)


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


def _one_hot(scores: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """One-hot rows at the largest score, the first on a tie; NaN if no score is above -inf, or if a score is NaN."""
    largest, dtype = _lawful_largest(scores), row_type(scores)
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


def fresh(like: Tensor, *, rows: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Uninitialised memory of a tensor's size, or for other rows, or of another type.

    On a CPU NumPy allocates it, with huge pages, which are faster to write for the first time.
    """
    shape, dtype = (len(like) if rows is None else rows, *like.shape[1:]), dtype or like.dtype
    if like.device.type == "cpu" and dtype in _NUMPY:
        return torch.from_numpy(np.empty(shape, dtype=_NUMPY[dtype]))
    return torch.empty(shape, dtype=dtype, device=like.device)


def _spare(rows: Float[Tensor, "n vocab"]) -> Spare:
    """Memory for rows of this size."""
    return Spare(scores=fresh(rows), masses=fresh(rows, dtype=torch.float64), index=fresh(rows, dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class _Filter:
    """The filters of some rows, one number per row of a column; None where no row has one.

    Attributes:
        most: The largest top-k; 0 if no row has one.
        last: The place of the last token that top-k keeps.
        without: The rows without top-k.
    """

    most: int
    last: Int[Tensor, "n 1"] | None
    without: Bool[Tensor, "n 1"] | None
    top_p: Float[Tensor, "n 1"] | None
    min_p: Float[Tensor, "n 1"] | None

    @classmethod
    def of(cls, per_row: Sequence[Sampling], like: Float[Tensor, "_ vocab"]) -> "_Filter":
        device, vocab = like.device, like.shape[-1]
        # What no mass reaches keeps everything; so does a top-p of 1, whose bound rounding might reach too early.
        top_ps = [s.top_p if s.top_p < 1 else math.inf for s in per_row]
        min_ps = [s.min_p for s in per_row]
        top_ks = [min(s.top_k, vocab) or vocab for s in per_row]
        most = max((k for k in top_ks if k < vocab), default=0)
        return cls(
            most=most,
            last=column([min(k, most) - 1 for k in top_ks], torch.int64, device) if most else None,
            without=column([k > most for k in top_ks], torch.bool, device) if max(top_ks) > most > 0 else None,
            top_p=column(top_ps, torch.float64, device) if min(top_ps) < 1 else None,
            min_p=column(min_ps, row_type(like), device) if max(min_ps) > 0 else None,
        )

    def __call__(self, rows: Float[Tensor, "n vocab"], spare: Spare) -> None:
        """Turn scaled scores into filtered distributions, in place."""
        if self.last is not None:
            floor = rows.topk(self.most).values.gather(1, self.last)
            if self.without is not None:
                floor = floor.masked_fill_(self.without, -torch.inf)
            torch.ge(rows, floor, out=spare.scores)
        torch.softmax(rows, -1, out=rows)
        if self.last is not None:
            _keep(rows, spare.scores)
        if self.top_p is not None:
            _keep(rows, torch.ge(rows, nucleus_floor(rows, self.top_p, spare), out=spare.scores))
        if self.min_p is not None:
            floor = rows.amax(-1, keepdim=True) * self.min_p
            _keep(rows, torch.ge(rows, floor, out=spare.scores))


def _keep(rows: Float[Tensor, "n vocab"], kept: Float[Tensor, "n vocab"]) -> None:
    """Set to 0, in place, the entries where `kept` is 0; it is 1 elsewhere. A product is several times faster than a
    masked fill.
    """
    rows.mul_(kept)
    rows.div_(rows.sum(-1, keepdim=True))
