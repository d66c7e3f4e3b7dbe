r"""Training of heads that guess blocks (DFlash, DFlare, DSpark): at random anchors, many blocks in one forward.

DFlash 2026, https://arxiv.org/abs/2602.06036
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.blocks import write_block
from outrider.heads.dflash import DFlash
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import Batch, Document
from outrider.learning.block_loss import BlockLoss
from outrider.learning.divergences import CHUNK, among_likeliest, chunked, cross_entropy, divergence
from outrider.learning.learner import Judged, Learner, Loss
from outrider.learning.target_rows import rows_at, with_rows
from outrider.learning.top_rows import TopRows
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.taps import tapped

ANCHOR_DRAW = 40
"""What the draw of a row decides, beside its seed, its step and its number."""
JUDGED_AT_ONCE = 32
"""Blocks of a text that are judged in one forward."""
DISTANCE = divergence("tvd")
"""How far rows are from each other: the chance that token verification rejects."""
RowsOfBoth = Callable[[slice, Float[Tensor, "rows vocab"]], tuple[Tensor, Tensor]]
"""Takes the head's logits of some guesses. Returns the target's row and the head's for each."""


@dataclass(frozen=True, kw_only=True)
class Anchors:
    """The anchors of some rows.

    Attributes:
        places: Where they stand.
        real: Which of them count; a row with fewer anchors than another is filled up.
    """

    places: Int[Tensor, "rows anchors"]
    real: Bool[Tensor, "rows anchors"]


@dataclass(frozen=True, kw_only=True)
class _Guesses:
    """The guesses of some blocks that count.

    Attributes:
        inner: What the head makes their logits of, as `DFlash.informed` says.
        labels: The text's tokens there.
        rows: The row of each.
        before: The place of the token before each.
        valid: Where they stand among all guesses of the blocks.
    """

    inner: Float[Tensor, "n inner"]
    labels: Int[Tensor, " n"]
    rows: Int[Tensor, " n"]
    before: Int[Tensor, " n"]
    valid: Bool[Tensor, "rows anchors depth"]


class BlockLearner(Learner):
    r"""A head that learns to guess blocks along texts.

    Anchors are drawn among the learnt tokens. The block of an anchor at $a$ sees the target's features at positions
    below $a$, because the feature at $a$ is not known while drafting, and its own positions. All blocks of a text run
    in one forward and do not see each other. A position of a block that lies behind the text, or guesses a token that
    is not learnt, counts for nothing.

    A confidence head learns $1 - \mathrm{TV}(p, q)$ of each guess, the chance that token verification accepts it. The
    rest of the head does not learn from that.

    Args:
        head: The head, in float32.
        target: The target.
        loss: What is minimised.
        num_anchors: Most anchors of a row.
        seed: Of the anchors.
        dtype: Of the written weights; None: the target's.
        chunk: Rows whose logits are in memory at once.

    Raises:
        InputError: The head does not fit the target, or a number is too small.
    """

    slot_weights: tuple[float, ...] | None = None
    """A weight of the guesses at each depth beside that of the loss; None: 1."""

    def __init__(
        self,
        head: DFlash,
        target: PreTrainedModel,
        *,
        loss: BlockLoss,
        num_anchors: int = 64,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__()
        if num_anchors < 1:
            raise InputError(f"num_anchors must be >= 1, got {num_anchors}")
        anatomy = Anatomy.of(target)
        if max(head.config.taps) > anatomy.num_layers or head.config.target_size != anatomy.hidden_size:
            raise InputError(
                f"the head reads hidden states {list(head.config.taps)} of width {head.config.target_size}, and the "
                f"target has {anatomy.num_layers} layers of width {anatomy.hidden_size}"
            )
        self.head, self.loss = head, loss
        self.dtype = dtype or target.dtype
        # Hidden in tuples, so that torch takes neither the target nor its layers for modules of this one.
        self._target, self._layers = (target,), (anatomy.layers,)
        self._last, self._num_anchors, self._seed, self._chunk = anatomy.num_layers, num_anchors, seed, chunk
        self.captured_taps = tuple(sorted({*head.config.taps, anatomy.num_layers}))

    @property
    def taps(self) -> tuple[int, ...]:
        """The target's hidden states that the head reads."""
        return self.head.config.taps

    def forward(self, batch: Batch) -> Loss:
        """The loss of the guesses of all drawn blocks."""
        batch = self._with_states(batch)
        drawn = self.anchors(batch)
        found = self._guesses(batch, self._context(batch), drawn, self.head.config.max_depth)
        counts = bool(found.valid.any())
        of_labels = self.loss.reads_labels
        agreed = torch.zeros(len(found.labels), dtype=torch.bool, device=found.inner.device)
        said = torch.zeros(len(found.labels), device=found.inner.device)
        sure, of = self.head.confidence(found.inner.detach()), self.loss.of
        far = torch.zeros(len(found.labels), device=found.inner.device)
        both = None
        if sure is not None or of is not None:
            both = self._rows_of_both(with_rows(batch, self.head.ends, self._last, self.head.vocab_size), found)

        def each(rows: slice, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
            agreed[rows] = among_likeliest(found.labels[rows], logits.detach())
            hard = logits.new_zeros(())
            if of_labels:
                hard = cross_entropy(found.labels[rows], logits)
                said[rows] = -hard.detach().float()
            if both is None:
                return hard
            theirs, ours = both(rows, logits)
            if sure is not None:
                far[rows] = DISTANCE(theirs, ours.detach()).float()
            if of is None:
                return hard
            soft = of(theirs, ours)
            return soft if not self.loss.hard else self.loss.hard * hard + (1 - self.loss.hard) * soft

        values = chunked(each, found.inner, self.head.informed_logits, chunk=self._chunk, width=self.head.vocab_size)
        if sure is not None:
            values = values + _misjudged(sure, far)
        weights = torch.zeros_like(values)
        if counts:
            log_q = torch.zeros(found.valid.shape, device=found.inner.device)
            log_q[found.valid] = said
            every = self.loss.weights(log_q, found.valid)
            slots = None if self.slot_weights is None else every.new_tensor(self.slot_weights)
            weights = (every if slots is None else every * slots)[found.valid]
        return Loss(
            total=(weights * values).sum(),
            weight=weights.sum().double(),
            parts={
                "agreement": (weights * agreed).sum(),
                **({"log_likelihood": (weights * said).sum()} if of_labels else {}),
            },
        )

    def places_of(self, documents: Sequence[Document], max_length: int) -> Float[Tensor, " depths"]:
        """How many anchors of some texts have a guess at each depth, in rows of at most so many tokens."""
        depths, counts = np.arange(self.head.config.max_depth), np.zeros(self.head.config.max_depth, dtype=np.int64)
        for document in documents:
            learnt = min(len(document.tokens) - document.start, max_length)
            counts += np.maximum(learnt - 1 - depths, 0)
        return torch.from_numpy(counts).double()

    def anchors(self, batch: Batch) -> Anchors:
        """The anchors of the rows in the batch's step, in order. Each is a learnt token that another follows."""
        learnt = batch.learnt.cpu().numpy()
        drawn: list[Int[np.ndarray, " anchors"]] = []
        for row, number in enumerate(batch.rows):
            places = np.flatnonzero(learnt[row, :-1] & learnt[row, 1:])
            if not len(places):
                # The one learnt token follows a prompt.
                places = np.flatnonzero(learnt[row, 1:])
            dice = np.random.default_rng([self._seed, batch.step, number, ANCHOR_DRAW])
            drawn.append(np.sort(dice.permutation(places)[: self._num_anchors]))
        return _filled(drawn, batch.tokens.device)

    @torch.no_grad()
    def judged(self, batch: Batch, depth: int) -> Judged:
        """Drafts along the texts of a batch, which begin behind every learnt token."""
        if depth > self.head.config.max_depth:
            raise InputError(
                f"a block of {self.head.config.block_size} guesses {self.head.config.max_depth} tokens, and depth is "
                f"{depth}; give a smaller depth or a larger block size"
            )
        if batch.learnt.shape[1] <= depth:
            return Judged(log_ratios=np.zeros((0, depth)), agrees=np.zeros((0, depth), dtype=bool))
        batch = self._with_states(batch)
        begins = batch.learnt.unfold(1, depth + 1, 1).all(-1).cpu().numpy()
        every, context = _filled([np.flatnonzero(row) for row in begins], batch.tokens.device), self._context(batch)
        ratios, agrees = [np.zeros((0, depth))], [np.zeros((0, depth), dtype=bool)]
        for first in range(0, every.places.shape[1], JUDGED_AT_ONCE):
            part = slice(first, first + JUDGED_AT_ONCE)
            some = Anchors(places=every.places[:, part], real=every.real[:, part])
            if not bool(some.real.any()):
                continue
            found = self._guesses(batch, context, some, depth)
            values, equal = self._compared(batch, found)
            # Blocks that count have `depth` guesses that count.
            ratios.append(values.view(-1, depth).double().cpu().numpy())
            agrees.append(equal.view(-1, depth).cpu().numpy())
        return Judged(log_ratios=np.concatenate(ratios), agrees=np.concatenate(agrees))

    def write(self, folder: Path) -> None:
        """Write the head in the `speculators` layout."""
        write_block(self.head, folder, self._target[0], self.dtype)

    def _with_states(self, batch: Batch) -> Batch:
        """The batch with the target's states: captured ones, or those of a forward now."""
        wanted = set(self.captured_taps)
        captured = batch.logits_of_target is not None or batch.rows_of_target is not None
        if wanted <= batch.hidden.keys() or (captured and set(self.head.config.taps) <= batch.hidden.keys()):
            return batch
        with torch.no_grad(), tapped(self._layers[0], sorted(wanted)) as seen:
            self._target[0].base_model(input_ids=batch.tokens, use_cache=False)
        return replace(batch, hidden=dict(seen))

    def _context(self, batch: Batch) -> GroupKeys:
        """Keys and values of all positions of the texts."""
        cache, weight = GroupKeys(self.head.config.block_size), self.head.norm.weight
        features = torch.cat([batch.hidden[tap].to(weight.dtype) for tap in self.head.config.taps], -1)
        rows, length = batch.tokens.shape
        places = torch.arange(length, device=batch.tokens.device).expand(rows, -1)
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.tokens.device)
        self.head(batch.tokens, features, places, mask.expand(rows, 1, length, length), cache)
        return cache

    def _guesses(self, batch: Batch, context: GroupKeys, anchors: Anchors, depth: int) -> _Guesses:
        """The first `depth` guesses of the blocks of some anchors; one that counts for nothing if there are none."""
        config = self.head.config
        hidden = blocks(self.head, batch.tokens, context, anchors.places)
        ahead = torch.arange(depth, device=batch.tokens.device)
        before = anchors.places[..., None] + ahead
        inside = before + 1 < batch.lengths[:, None, None]
        before = before.clamp(max=batch.tokens.shape[1] - 2)
        rows = torch.arange(len(before), device=before.device)[:, None, None].expand(before.shape)
        valid = anchors.real[..., None] & inside & batch.learnt[rows, before + 1]
        inner = self.head.informed(hidden[:, :, config.first : config.first + depth], batch.tokens[rows, before])
        kept = valid
        if not bool(valid.any()):
            kept = torch.zeros_like(valid)
            kept[0, 0, 0] = True
        return _Guesses(
            inner=inner[kept],
            labels=batch.tokens[rows, before + 1][kept],
            rows=rows[kept],
            before=before[kept],
            valid=valid,
        )

    def _rows_of_both(self, batch: Batch, found: _Guesses) -> RowsOfBoth:
        """The target's rows of some guesses and the head's own, over the same outcomes."""
        if batch.logits_of_target is None and batch.rows_of_target is not None:
            kept, places = batch.rows_of_target, (found.rows, found.before)
            top = TopRows(tokens=kept.tokens[places], log_probs=kept.log_probs[places], log_rest=kept.log_rest[places])
            return lambda rows, draft: (top[rows].outcomes, top[rows].grouped(draft))

        def live(rows: slice, draft: Float[Tensor, "rows vocab"]) -> tuple[Tensor, Tensor]:
            logits = self._target_logits(batch, found, rows)
            width = min(logits.shape[-1], draft.shape[-1])
            return logits[..., :width], draft[..., :width]

        return live

    @torch.no_grad()
    def _target_logits(self, batch: Batch, found: _Guesses, rows: slice) -> Float[Tensor, "rows vocab"]:
        """The target's logits of the tokens that some guesses are of."""
        places = (found.rows[rows], found.before[rows])
        if batch.logits_of_target is not None:
            return rows_at(batch.logits_of_target, *places)
        ends = self.head.ends
        return ends.head(ends.norm(batch.hidden[self._last][places]))

    def _compared(self, batch: Batch, found: _Guesses) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
        """The log-ratio of each label's probabilities, and whether the likeliest tokens of both agree."""
        ratios, agrees = [], []
        for begin in range(0, len(found.labels), self._chunk):
            rows = slice(begin, begin + self._chunk)
            ours, theirs = self.head.informed_logits(found.inner[rows]), self._target_logits(batch, found, rows)
            width = min(ours.shape[-1], theirs.shape[-1])
            log_q, log_p = (each[..., :width].float().log_softmax(-1) for each in (ours, theirs))
            ratios.append((log_q - log_p).gather(-1, found.labels[rows, None])[:, 0])
            agrees.append(log_q.argmax(-1) == log_p.argmax(-1))
        return torch.cat(ratios), torch.cat(agrees)


def blocks(
    head: DFlash, tokens: Int[Tensor, "rows length"], context: GroupKeys, places: Int[Tensor, "rows anchors"]
) -> Float[Tensor, "rows anchors block hidden"]:
    """The output features of the blocks of some anchors, all in one forward.

    Args:
        context: Keys and values of all positions of the texts.
        places: Where the anchors stand.
    """
    size, length = head.config.block_size, tokens.shape[1]
    read = torch.full((*places.shape, size), head.config.mask_id, device=tokens.device)
    read[..., 0] = tokens.gather(1, places)
    positions = (places[..., None] + torch.arange(size, device=tokens.device)).flatten(1)
    along = torch.arange(length, device=tokens.device)
    number = torch.arange(positions.shape[1], device=tokens.device) // size
    behind = along < places.repeat_interleave(size, 1)[..., None]
    together = (number[:, None] == number).expand(len(tokens), -1, -1)
    keys = torch.cat([along.expand(len(tokens), -1), positions], 1)
    mask = torch.cat([behind, together], -1)[:, None]
    return head.block(read.flatten(1), positions, mask, context, keys).unflatten(1, (-1, size))


def _misjudged(sure: Float[Tensor, " n"], far: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The divergence of what a confidence head says from what it should say: 1 less the distance of the rows.

    Args:
        sure: Its logits.
        far: The distances.
    """
    # A sum of rounded differences may be a little above 1.
    far = far.clamp(0, 1)
    least = torch.special.entr(far) + torch.special.entr(1 - far)
    return binary_cross_entropy_with_logits(sure.float(), 1 - far, reduction="none") - least


def _filled(drawn: list[Int[np.ndarray, " _"]], device: torch.device) -> Anchors:
    """Anchors of rows that have different numbers of them."""
    most = max(1, *(len(each) for each in drawn))
    places = np.zeros((len(drawn), most), dtype=np.int64)
    for row, each in enumerate(drawn):
        places[row, : len(each)] = each
    real = np.arange(most) < np.array([len(each) for each in drawn])[:, None]
    return Anchors(places=torch.from_numpy(places).to(device), real=torch.from_numpy(real).to(device))
