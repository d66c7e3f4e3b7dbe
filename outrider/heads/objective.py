"""What all trained heads share: which guess at which place learns which token, from which states of the target."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.types import InputError
from outrider.heads.head import HeadFiles
from outrider.learning.batch import Document, TrainBatch, on_device
from outrider.learning.divergences import CHUNK, HARD, Divergence, among_likeliest, chunked, cross_entropy, divergence
from outrider.learning.learner import JudgedDrafts, Learner, Loss
from outrider.learning.packing import check_apart
from outrider.learning.target_rows import rows_at, states_along, with_few_rows, with_rows
from outrider.lm.forwards.packed import packed, worth_packing
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.checkpoint import TargetShape, write_head
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class HeadContext:
    """What the target and the data decide of a head that is trained.

    Attributes:
        target: The target.
        tokenizer: Its tokenizer; None if there is none.
        documents: The texts to learn from.
        depth: Draft tokens of a step: how many are watched, and how many heads there are where each guesses one.
        watch_temperature: The temperature that the head is kept for, 1 or 0.
        max_length: Most tokens of a text in a step.
        seed: Of new weights and of every draw.
        device: Where the head learns; by default on the target's device.
        dtype: Of the written weights; by default the target's.
    """

    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None = None
    documents: Sequence[Document] = ()
    depth: int = 5
    watch_temperature: int = 1
    max_length: int = 512
    seed: int = 0
    device: torch.device | None = None
    dtype: torch.dtype | None = None

    @cached_property
    def info(self) -> TargetInfo:
        """What the head may know of the target."""
        return TargetInfo.of_model(self.target, self.tokenizer)

    @cached_property
    def anatomy(self) -> Anatomy:
        """What the target is made of."""
        return Anatomy.of(self.target)

    @property
    def place(self) -> torch.device:
        """Where the head learns."""
        return self.device or self.target.device

    def frequent_tokens(self, count: int | None) -> Int[Tensor, " count"] | None:
        """The most frequent learnt tokens of the texts, ascending; None for None."""
        return None if count is None else frequent_tokens(self.documents, count, self.info.vocab_size)


class HeadObjective(Learner):
    """What a head learns from a target. All objectives have this constructor.

    Attributes:
        options: What was said.
        context: The target and the data.
        taps: The hidden states that the head reads.
        shape: The target that the head is trained for.
        chunk: Rows whose logits are in memory at once.

    Args:
        head: The head, in float32.

    Raises:
        InputError: The target's hidden states cannot be read.
    """

    chunk = CHUNK
    _packed = False

    def __init__(self, head: Any, options: Any, context: HeadContext) -> None:
        super().__init__()
        self.head, self.options, self.context = head, options, context
        info = context.info
        context.target.eval()
        self.taps = tuple(head.reads(info.num_layers))
        if wrong := [tap for tap in self.taps if not 0 <= tap <= info.num_layers]:
            raise InputError(f"taps must be in 0..{info.num_layers}, the number of the target's layers, got {wrong[0]}")
        self.shape = TargetShape(
            num_layers=info.num_layers, hidden_size=info.hidden_size, vocab_size=info.vocab_size, taps=self.taps
        )
        self.captured_taps = tuple(sorted({*self.taps, info.num_layers}))
        self.embedding_and_head = info.embedding_and_head()

    @cached_property
    def divergence(self) -> Divergence | None:
        """How far the head's rows are from the target's; None: the cross-entropy of the text's own tokens."""
        return None if self.options.divergence == HARD else divergence(self.options.divergence)

    @cached_property
    def slot_weights(self) -> tuple[float, ...] | None:
        """A weight of each guess beside its decay; None: 1."""
        if not self.options.slot_balanced:
            return None
        return tuple(slot_balanced(self.places_of(self.context.documents, self.context.max_length)).tolist())

    @abstractmethod
    def places_of(self, documents: Sequence[Document], max_length: int) -> Float[Tensor, " guesses"]:
        """How many places of some texts each guess has, in rows of at most so many tokens."""

    def head_tokens(self, length: int) -> int:
        """Positions at which the head's layers run in a step, for a row of so many tokens."""
        return length

    @abstractmethod
    def guess_rows(self, length: int) -> int:
        """Rows of logits that are learnt in a step, for a row of so many tokens."""

    @abstractmethod
    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        """Drafts along the texts of a batch, as `outrider.learning.learner.Judging` says."""

    def with_states(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the tapped states and the target's last one: captured ones, or those of a forward now."""
        wanted = set(self.captured_taps)
        if wanted <= batch.hidden.keys():
            return batch
        below = cast(PreTrainedModel, self._running.base_model)
        with torch.no_grad():
            states = states_along(below, Anatomy.of(self._running).layers, sorted(wanted), batch, packed=self._packed)
        return replace(batch, hidden=states)

    def with_target_rows(self, batch: TrainBatch) -> TrainBatch:
        """The batch with all the target's logits, if they are few, so that no guess computes them again."""
        return with_rows(batch, self.embedding_and_head, self.shape.num_layers, self.shape.vocab_size)

    @cached_property
    def _running(self) -> PreTrainedModel:
        """The target, with copies of its linear layers that are faster where there are such."""
        target = self.context.target
        return packed(target) if worth_packing(target) else target

    def pack(self) -> None:
        check_apart(self.context.target, "the target")
        self._packed = True

    def record(self, dtype: torch.dtype) -> HeadFiles:
        """The config and the tensors that are written."""
        written: HeadFiles = self.head.record(self.shape, dtype, str(self.context.target.name_or_path))
        return written

    def write(self, folder: Path) -> None:
        """Write the head as a user loads it."""
        dtype = self.context.dtype or self.context.target.dtype
        write_head(folder, *self.record(dtype), dtype)


class GuessObjective(HeadObjective):
    r"""A head that reads hidden states of a target and learns to guess what the target says next.

    The target has read $x_0 \ldots x_t$, so that $f_t$ is known, and $x_{t+1}$ is the anchor. Guess $j = 0, 1, \ldots$
    at place $t$ is of $x_{t+2+j}$, the draft token number $j + 1$ behind the anchor. The tokens between are those of
    the text. The loss is the weighted mean of the divergences at all places whose guessed token is learnt; guess $j$
    has the weight `options.decay` to the power $j$.

    Where the head can guess some tokens only, a place is not learnt if the target's likeliest token is none of them.
    The divergence compares rows over these tokens alone.
    """

    @property
    @abstractmethod
    def num_guesses(self) -> int:
        """How many tokens behind the anchor are learnt."""

    @abstractmethod
    def guesses(self, batch: TrainBatch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What the output layer reads for guess 0, 1, ..., `count - 1` at every place.

        Args:
            batch: Rows with the tapped states.
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """Logits of guess `number`, from what `guesses` gives."""

    def guess_rows(self, length: int) -> int:
        return length * self.num_guesses

    def counted(self, batch: TrainBatch) -> Collection[int]:
        """The guesses that the loss of a step counts; by default all."""
        return range(self.num_guesses)

    def places(self, batch: TrainBatch, number: int) -> "LearntPositions":
        """The places at which the loss of a step counts a guess; by default all whose guessed token is learnt."""
        return LearntPositions.of(batch, number)

    def auxiliary_loss(
        self, batch: TrainBatch, hidden: Float[Tensor, "rows length hidden"], number: int, places: "LearntPositions"
    ) -> Float[Tensor, ""] | None:
        """A loss beside the divergence, as a sum over the places; None: there is none."""
        return None

    def kept(
        self,
        batch: TrainBatch,
        hidden: Float[Tensor, "rows length hidden"],
        number: int,
        before: Bool[Tensor, "rows length"] | None,
    ) -> Bool[Tensor, "rows length"] | None:
        """The places at which the guesses behind guess `number` are learnt; None: all.

        Args:
            before: The places at which this guess was learnt.
        """
        return before

    def drafted(self, batch: TrainBatch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """As `guesses`, for the guesses that drafts of `count` tokens really make."""
        return self.guesses(batch, count)

    def places_of(self, documents: Sequence[Document], max_length: int) -> Float[Tensor, " guesses"]:
        """How many places of some texts each guess has, in rows of at most so many tokens."""
        counts = np.zeros(self.num_guesses, dtype=np.int64)
        depths = np.arange(self.num_guesses)
        for document in documents:
            length = min(len(document.tokens), max_length)
            counts += np.maximum(length - np.maximum(document.start, 2 + depths), 0)
        return torch.from_numpy(counts).double()

    def forward(self, batch: TrainBatch) -> Loss:
        """The loss of all guesses."""
        batch = self.with_states(batch)
        total, weight, agreed, counted = [], [], [], self.counted(batch)
        if self.divergence is not None and len(counted) > 1:
            batch = self._with_rows(batch)
        kept: Bool[Tensor, "rows length"] | None = None
        for number, hidden in enumerate(self.guesses(batch, self.num_guesses)):
            if number not in counted:
                continue
            places = self.places(batch, number) if kept is None else LearntPositions.of(batch, number, kept)
            share = self.options.decay**number * self._slot_weight(number)
            values, agrees = self._values(batch, hidden, number, places)
            auxiliary = self.auxiliary_loss(batch, hidden, number, places)
            total.append(share * (values if auxiliary is None else values + auxiliary))
            weight.append(share * len(places.labels))
            agreed.append(share * agrees)
            kept = self.kept(batch, hidden, number, kept)
        device = batch.tokens.device
        return Loss(
            total=torch.stack(total).sum(),
            weight=torch.full((), float(sum(weight)), device=device),
            parts={"agreement": torch.stack(agreed).sum()},
        )

    @property
    def most_guesses(self) -> int | None:
        """The deepest draft; None: any depth."""
        return None

    @torch.no_grad()
    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        """Drafts along the texts of a batch, which begin behind every learnt token."""
        if self.most_guesses is not None and depth > self.most_guesses:
            raise InputError(f"this head drafts {self.most_guesses} tokens, so a depth of {depth} cannot be watched")
        batch = self.with_target_rows(self.with_states(batch))
        learnt = batch.learnt
        begins = learnt[:, 1:].unfold(1, depth + 1, 1).all(-1) if learnt.shape[1] > depth + 1 else learnt[:, :0]
        ratios, agrees = [], []
        for number, hidden in enumerate(self.drafted(batch, depth)):
            places = LearntPositions.of(batch, number)
            whole, equal = learnt.new_zeros(learnt.shape, dtype=torch.float32), torch.zeros_like(learnt)
            compared = self._compared(batch, hidden, number, places)
            whole[places.rows, places.at], equal[places.rows, places.at] = compared
            ratios.append(whole[:, : begins.shape[1]][begins])
            agrees.append(equal[:, : begins.shape[1]][begins])
        return JudgedDrafts(
            log_ratios=torch.stack(ratios, -1).double().cpu().numpy(), agrees=torch.stack(agrees, -1).cpu().numpy()
        )

    @property
    def ids(self) -> Int[Tensor, " width"] | None:
        """The tokens that the head can guess; None: all."""
        ids: Tensor | None = getattr(self.head, "ids", None)
        return ids

    def last_states(self, batch: TrainBatch) -> Float[Tensor, "rows length hidden"]:
        """The target's last hidden states, normed: what its output layer reads."""
        with torch.no_grad():
            return self.embedding_and_head.norm(batch.hidden[self.shape.num_layers])

    def _values(
        self, batch: TrainBatch, hidden: Float[Tensor, "rows length hidden"], number: int, places: "LearntPositions"
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """The sum of the divergences of a guess, and how often its likeliest token is the text's."""
        labels, ids = places.labels, self._ids_on(hidden.device)
        numbers, known = labels, torch.ones_like(labels, dtype=torch.bool)
        if ids is not None:
            numbers = torch.searchsorted(ids, labels).clamp_max(len(ids) - 1)
            known = ids[numbers] == labels
        agreed = torch.zeros_like(known)
        target = self._target_rows(batch, number, places)

        def loss(rows: slice, logits: Float[Tensor, "rows width"]) -> Float[Tensor, " rows"]:
            agreed[rows] = among_likeliest(numbers[rows], logits.detach()) & known[rows]
            if self.divergence is None:
                return torch.where(known[rows], cross_entropy(numbers[rows], logits), 0.0)
            theirs, covered = target(rows)
            values = self.divergence(theirs, logits)
            return values if covered is None else torch.where(covered, values, 0.0)

        picked = hidden[places.rows, places.at]
        width = self.shape.vocab_size if ids is None else len(ids)
        values = chunked(
            loss, picked, lambda states: self._narrow(self.logits(states, number)), chunk=self.chunk, width=width
        )
        return values.sum(), agreed.sum()

    def _compared(
        self, batch: TrainBatch, hidden: Float[Tensor, "rows length hidden"], number: int, places: "LearntPositions"
    ) -> tuple[Float[Tensor, " n"], Bool[Tensor, " n"]]:
        """The log-ratio of each label's probabilities, and whether the likeliest tokens of both models agree."""
        labels, ids, target = places.labels, self._ids_on(hidden.device), self._target_logits(batch, number, places)
        picked = hidden[places.rows, places.at]
        ratios, agrees = [labels.new_zeros(0, dtype=torch.float32)], [labels.new_zeros(0, dtype=torch.bool)]
        for begin in range(0, len(labels), self.chunk):
            rows = slice(begin, begin + self.chunk)
            log_p = target(rows).float().log_softmax(-1)
            log_q = self._narrow(self.logits(picked[rows], number)).float().log_softmax(-1)
            if ids is not None:
                log_q = torch.full_like(log_p, -torch.inf).index_copy_(1, ids, log_q)
            ratios.append((log_q - log_p).gather(-1, labels[rows, None])[:, 0])
            agrees.append(log_q.argmax(-1) == log_p.argmax(-1))
        return torch.cat(ratios), torch.cat(agrees)

    def _with_rows(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the target's logits, of the tokens that the head can guess, if they are few."""
        ids = self._ids_on(batch.tokens.device)
        if ids is None:
            return self.with_target_rows(batch)
        return with_few_rows(batch, self.embedding_and_head, self.shape.num_layers, self.shape.vocab_size, ids)

    def _target_rows(
        self, batch: TrainBatch, number: int, places: "LearntPositions"
    ) -> Callable[[slice], tuple[Tensor, Tensor | None]]:
        """As `_target_logits`, of the tokens that the head can guess, and whether the likeliest is one of them; None
        where it can guess all.
        """
        if (few := batch.few_of_target) is not None:
            return lambda rows: few.at(places.rows[rows], places.at[rows] + 1 + number)
        ids, target = self._ids_on(batch.tokens.device), self._target_logits(batch, number, places)

        def made(rows: slice) -> tuple[Tensor, Tensor | None]:
            logits = target(rows)
            return (logits, None) if ids is None else (logits[:, ids], torch.isin(logits.argmax(-1), ids))

        return made

    def _target_logits(self, batch: TrainBatch, number: int, places: "LearntPositions") -> Callable[[slice], Tensor]:
        """The target's logits of the guessed tokens, for some of the places at a time."""
        if (known := batch.logits_of_target) is not None:
            return lambda rows: rows_at(known, places.rows[rows], places.at[rows] + 1 + number)
        states = self.last_states(batch)[places.rows, places.at + 1 + number]

        def logits(rows: slice) -> Float[Tensor, "rows vocab"]:
            with torch.no_grad():
                return self.embedding_and_head.head(states[rows])

        return logits

    def _slot_weight(self, number: int) -> float:
        return 1.0 if self.slot_weights is None else self.slot_weights[number]

    def _narrow(self, logits: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
        """Logits without those behind the target's last token."""
        return logits if self.ids is not None else logits[..., : self.shape.vocab_size]

    def _ids_on(self, device: torch.device) -> Int[Tensor, " width"] | None:
        return None if self.ids is None else self.ids.to(device)


class LearntPositions:
    """The places of a batch at which a guess is learnt: `labels[i]` stands `2 + number` tokens behind `at[i]`."""

    def __init__(self, rows: Int[Tensor, " n"], at: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> None:
        self.rows, self.at, self.labels = rows, at, labels

    @classmethod
    def of(cls, batch: TrainBatch, number: int, kept: Bool[Tensor, "rows length"] | None = None) -> "LearntPositions":
        """The places of guess `number`.

        Args:
            kept: The places that may be learnt; None: all.

        Example:
            >>> tokens = torch.tensor([[7, 8, 9, 5]])
            >>> batch = TrainBatch(
            ...     tokens=tokens, learnt=torch.tensor([[False, True, True, True]]), lengths=torch.tensor([4]), step=0,
            ...     rows=range(1),
            ... )
            >>> LearntPositions.of(batch, 0).labels.tolist(), LearntPositions.of(batch, 1).labels.tolist()
            ([9, 5], [5])
        """
        if kept is None:
            rows, at = (on_device(each, batch.tokens.device) for each in learnt_places(batch, number))
        else:
            # What a model has decided is on its device, and so is how many places there are.
            learnt = batch.learnt[:, 2 + number :]
            rows, at = (learnt & kept[:, : learnt.shape[1]]).nonzero(as_tuple=True)
        return cls.at_places(batch, number, rows, at)

    @classmethod
    def at_places(
        cls, batch: TrainBatch, number: int, rows: Int[Tensor, " n"], at: Int[Tensor, " n"]
    ) -> "LearntPositions":
        """Some of these places."""
        return cls(rows, at, batch.tokens[rows, at + 2 + number])


def learnt_places(batch: TrainBatch, number: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """Rows and places at which the token of guess `number` is learnt."""
    rows, at = batch.host.learnt[:, 2 + number :].nonzero()
    return rows, at


def frequent_tokens(documents: Sequence[Document], count: int, vocab_size: int) -> Int[Tensor, " count"]:
    """The most frequent learnt tokens of a corpus, in ascending order. Of equally frequent ones the lower id is taken.

    Raises:
        InputError: The count is not in 1..`vocab_size`.

    Example:
        >>> frequent_tokens([Document(tokens=np.array([5, 3, 3, 1]), start=1)], 2, vocab_size=8).tolist()
        [1, 3]
    """
    if not 1 <= count <= vocab_size:
        raise InputError(f"the draft vocabulary must have 1..{vocab_size} tokens, got {count}")
    seen = np.zeros(vocab_size, dtype=np.int64)
    for document in documents:
        seen += np.bincount(document.tokens[document.start :], minlength=vocab_size)[:vocab_size]
    return torch.from_numpy(np.sort(np.argsort(-seen, kind="stable")[:count]))


def slot_balanced(counts: Int[Tensor, " slots"] | Float[Tensor, " slots"]) -> Float[Tensor, " slots"]:
    r"""The weight of a row of each slot, so that all slots with rows have the same total weight.

    Deep draft slots and rear positions have fewer rows than others. With $n$ rows, $k$ slots that have some, and $n_s$
    rows of slot $s$, a row of slot $s$ weighs $n / (k n_s)$; so all weights sum to $n$.

    Args:
        counts: How many rows each slot has: a depth in a draft, or a bucket of positions.

    Example:
        >>> slot_balanced(torch.tensor([3, 1, 0]))
        tensor([0.6667, 2.0000, 0.0000])
    """
    known = (counts > 0).sum().clamp(min=1)
    return torch.where(counts > 0, counts.sum() / (known * counts.clamp(min=1)), 0.0)
