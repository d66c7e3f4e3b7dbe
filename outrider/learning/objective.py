"""What all trained heads share: which guess at which place learns which token, from which states of the target."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.files import TargetShape
from outrider.learning.batch import Batch, Document
from outrider.learning.divergences import CHUNK, Divergence, among_likeliest, chunked, cross_entropy
from outrider.learning.learner import Judged, Learner, Loss
from outrider.learning.target_rows import rows_at, with_rows
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead, find_embedding_and_head
from outrider.lm.hf.open import logit_width
from outrider.lm.hf.taps import tapped


class HeadLearner(Learner):
    r"""A head that reads hidden states of a target and learns to guess what the target says next.

    The target has read $x_0 \ldots x_t$, so that $f_t$ is known, and $x_{t+1}$ is the anchor. Guess $j = 0, 1, \ldots$
    at place $t$ is of $x_{t+2+j}$, the draft token number $j + 1$ behind the anchor. The tokens between are those of
    the text. The loss is the weighted mean of the divergences at all places whose guessed token is learnt; guess $j$
    has the weight `decay` to the power $j$.

    Args:
        target: The target.
        taps: The hidden states that the head reads.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        num_guesses: How many tokens behind the anchor are learnt.
        decay: Weight of each guess, as a share of the weight of the guess before it.
        ids: The tokens that the head can guess, ascending; None: all. A place is not learnt if the target's likeliest
            token is none of them. The divergence compares rows over these tokens alone.
        dtype: Of the written weights; by default the target's.
        chunk: Rows whose logits are in memory at once.

    Raises:
        InputError: A number is too small, or the target's hidden states cannot be read.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        taps: Sequence[int],
        loss: Divergence | None,
        num_guesses: int,
        decay: float = 1.0,
        ids: Int[Tensor, " width"] | None = None,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__()
        if num_guesses < 1:
            raise InputError(f"at least one guess must be learnt, got {num_guesses}")
        if not decay > 0:
            raise InputError(f"decay must be > 0, got {decay}")
        anatomy = Anatomy.of(target.eval())
        if wrong := [tap for tap in taps if not 0 <= tap <= anatomy.num_layers]:
            raise InputError(
                f"taps must be in 0..{anatomy.num_layers}, the number of the target's layers, got {wrong[0]}"
            )
        ends = find_embedding_and_head(target, anatomy)
        self.taps, self.num_guesses, self.decay = tuple(taps), num_guesses, decay
        self.divergence, self.chunk, self.dtype = loss, chunk, dtype or target.dtype
        self.captured_taps = tuple(sorted({*taps, anatomy.num_layers}))
        self.shape = TargetShape(
            num_layers=anatomy.num_layers,
            hidden_size=anatomy.hidden_size,
            vocab_size=logit_width(target),
            taps=self.taps,
        )
        # Hidden in tuples, so that torch takes none of these for modules of this one.
        self._target, self._layers, self._ends = (target,), (anatomy.layers,), (ends,)
        self._ids = (ids,)

    slot_weights: tuple[float, ...] | None = None
    """A weight of each guess beside its decay; None: 1. `slot_balanced` makes such weights from `places_of`."""

    @abstractmethod
    def guesses(self, batch: Batch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What the output layer reads for guess 0, 1, ..., `count - 1` at every place.

        Args:
            batch: Rows with the tapped states.
        """

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """Logits of guess `number`, from what `guesses` gives."""

    def counted(self, batch: Batch) -> Collection[int]:
        """The guesses that the loss of a step counts; by default all."""
        return range(self.num_guesses)

    def places(self, batch: Batch, number: int) -> "Places":
        """The places at which the loss of a step counts a guess; by default all whose guessed token is learnt."""
        return Places.of(batch, number)

    def beside(
        self, batch: Batch, hidden: Float[Tensor, "rows length hidden"], number: int, places: "Places"
    ) -> Float[Tensor, ""] | None:
        """A loss beside the divergence, as a sum over the places; None: there is none."""
        return None

    def kept(
        self,
        batch: Batch,
        hidden: Float[Tensor, "rows length hidden"],
        number: int,
        before: Bool[Tensor, "rows length"] | None,
    ) -> Bool[Tensor, "rows length"] | None:
        """The places at which the guesses behind guess `number` are learnt; None: all.

        Args:
            before: The places at which this guess was learnt.
        """
        return before

    def drafted(self, batch: Batch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
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

    def forward(self, batch: Batch) -> Loss:
        """The loss of all guesses."""
        batch = self.with_states(batch)
        total, weight, agreed, counted = [], [], [], self.counted(batch)
        if self.divergence is not None and len(counted) > 1:
            batch = with_rows(batch, self.ends, self.shape.num_layers, self.shape.vocab_size)
        kept: Bool[Tensor, "rows length"] | None = None
        for number, hidden in enumerate(self.guesses(batch, self.num_guesses)):
            if number not in counted:
                continue
            places = self.places(batch, number) if kept is None else Places.of(batch, number, kept)
            share = self.decay**number * self._slot_weight(number)
            values, agrees = self._values(batch, hidden, number, places)
            beside = self.beside(batch, hidden, number, places)
            total.append(share * (values if beside is None else values + beside))
            weight.append(share * len(places.labels))
            agreed.append(share * agrees)
            kept = self.kept(batch, hidden, number, kept)
        device = batch.tokens.device
        return Loss(
            total=torch.stack(total).sum(),
            weight=torch.tensor(float(sum(weight)), device=device),
            parts={"agreement": torch.stack(agreed).sum()},
        )

    @property
    def most_guesses(self) -> int | None:
        """The deepest draft; None: any depth."""
        return None

    @torch.no_grad()
    def judged(self, batch: Batch, depth: int) -> Judged:
        """Drafts along the texts of a batch, which begin behind every learnt token."""
        if self.most_guesses is not None and depth > self.most_guesses:
            raise InputError(f"this head drafts {self.most_guesses} tokens, so a depth of {depth} cannot be watched")
        batch = self.with_states(batch)
        learnt = batch.learnt
        begins = learnt[:, 1:].unfold(1, depth + 1, 1).all(-1) if learnt.shape[1] > depth + 1 else learnt[:, :0]
        ratios, agrees = [], []
        for number, hidden in enumerate(self.drafted(batch, depth)):
            places = Places.of(batch, number)
            whole, equal = learnt.new_zeros(learnt.shape, dtype=torch.float32), torch.zeros_like(learnt)
            compared = self._compared(batch, hidden, number, places)
            whole[places.rows, places.at], equal[places.rows, places.at] = compared
            ratios.append(whole[:, : begins.shape[1]][begins])
            agrees.append(equal[:, : begins.shape[1]][begins])
        return Judged(
            log_ratios=torch.stack(ratios, -1).double().cpu().numpy(), agrees=torch.stack(agrees, -1).cpu().numpy()
        )

    def with_states(self, batch: Batch) -> Batch:
        """The batch with the tapped states and the target's last one: captured ones, or those of a forward now."""
        wanted = set(self.captured_taps)
        if wanted <= batch.hidden.keys():
            return batch
        with torch.no_grad(), tapped(self._layers[0], sorted(wanted)) as seen:
            cast(PreTrainedModel, self._target[0]).base_model(input_ids=batch.tokens, use_cache=False)
        return replace(batch, hidden=dict(seen))

    @property
    def ends(self) -> EmbeddingAndHead:
        """The target's ends."""
        return self._ends[0]

    @property
    def ids(self) -> Int[Tensor, " width"] | None:
        """The tokens that the head can guess; None: all."""
        return self._ids[0]

    def last_states(self, batch: Batch) -> Float[Tensor, "rows length hidden"]:
        """The target's last hidden states, normed: what its output layer reads."""
        with torch.no_grad():
            return self.ends.norm(batch.hidden[self.shape.num_layers])

    def _values(
        self, batch: Batch, hidden: Float[Tensor, "rows length hidden"], number: int, places: "Places"
    ) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
        """The sum of the divergences of a guess, and how often its likeliest token is the text's."""
        labels, ids = places.labels, self._ids_on(hidden.device)
        numbers, known = labels, torch.ones_like(labels, dtype=torch.bool)
        if ids is not None:
            numbers = torch.searchsorted(ids, labels).clamp_max(len(ids) - 1)
            known = ids[numbers] == labels
        agreed = torch.zeros_like(known)
        target = self._target_logits(batch, number, places)

        def loss(rows: slice, logits: Float[Tensor, "rows width"]) -> Float[Tensor, " rows"]:
            agreed[rows] = among_likeliest(numbers[rows], logits.detach()) & known[rows]
            if self.divergence is None:
                return torch.where(known[rows], cross_entropy(numbers[rows], logits), 0.0)
            theirs = target(rows)
            if ids is None:
                return self.divergence(theirs, logits)
            covered = torch.isin(theirs.argmax(-1), ids)
            return torch.where(covered, self.divergence(theirs[:, ids], logits), 0.0)

        picked = hidden[places.rows, places.at]
        width = self.shape.vocab_size if ids is None else len(ids)
        values = chunked(
            loss, picked, lambda states: self._narrow(self.logits(states, number)), chunk=self.chunk, width=width
        )
        return values.sum(), agreed.sum()

    def _compared(
        self, batch: Batch, hidden: Float[Tensor, "rows length hidden"], number: int, places: "Places"
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

    def _target_logits(self, batch: Batch, number: int, places: "Places") -> Callable[[slice], Tensor]:
        """The target's logits of the guessed tokens, for some of the places at a time."""
        if (known := batch.logits_of_target) is not None:
            return lambda rows: rows_at(known, places.rows[rows], places.at[rows] + 1 + number)
        states = self.last_states(batch)[places.rows, places.at + 1 + number]

        def logits(rows: slice) -> Float[Tensor, "rows vocab"]:
            with torch.no_grad():
                return self.ends.head(states[rows])

        return logits

    def _slot_weight(self, number: int) -> float:
        return 1.0 if self.slot_weights is None else self.slot_weights[number]

    def _narrow(self, logits: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
        """Logits without those behind the target's last token."""
        return logits if self.ids is not None else logits[..., : self.shape.vocab_size]

    def _ids_on(self, device: torch.device) -> Int[Tensor, " width"] | None:
        return None if self.ids is None else self.ids.to(device)


class Places:
    """The places of a batch at which a guess is learnt: `labels[i]` stands `2 + number` tokens behind `at[i]`."""

    def __init__(self, rows: Int[Tensor, " n"], at: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> None:
        self.rows, self.at, self.labels = rows, at, labels

    @classmethod
    def of(cls, batch: Batch, number: int, kept: Bool[Tensor, "rows length"] | None = None) -> "Places":
        """The places of guess `number`.

        Args:
            kept: The places that may be learnt; None: all.

        Example:
            >>> tokens = torch.tensor([[7, 8, 9, 5]])
            >>> batch = Batch(
            ...     tokens=tokens, learnt=torch.tensor([[False, True, True, True]]), lengths=torch.tensor([4]), step=0,
            ...     rows=range(1),
            ... )
            >>> Places.of(batch, 0).labels.tolist(), Places.of(batch, 1).labels.tolist()
            ([9, 5], [5])
        """
        learnt = batch.learnt[:, 2 + number :]
        rows, at = (learnt if kept is None else learnt & kept[:, : learnt.shape[1]]).nonzero(as_tuple=True)
        return cls(rows, at, batch.tokens[rows, at + 2 + number])


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
