"""ParallelSpec: a head learns to guess all tokens of a draft at once, at mask slots behind many places of a text.

ParallelSpec 2024, https://arxiv.org/abs/2410.05589
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.objective import Places
from outrider.heads.parallel import ParallelFile, ParallelHead, write_parallel
from outrider.heads.parts.layer_config import usual_layer
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import PADDING, Batch, Document
from outrider.learning.divergences import Divergence
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import find_embedding_and_head
from outrider.lm.hf.open import logit_width

GROUP_DRAW = 51
"""What the draw of a row's groups decides, beside its seed, its step and its number."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Where the groups of some rows stand.

    Attributes:
        at: The last place of the text that each group sees. A row with fewer groups than another is filled up with
            groups behind its end.
        real: Which groups count.
    """

    at: Int[Tensor, "rows groups"]
    real: Bool[Tensor, "rows groups"]


class Parallel(Unrolled):
    r"""A parallel head that learns from a target, group by group.

    A group is the mask slots $k = 1 \ldots K$ behind a place $t$, at the positions $t + k$. Slot k sees the text up to
    $t$, and the slots 1 to k of its own group. It learns the token that stands $k$ tokens behind $x_{t+2}$, which the
    place $t$ itself learns. Slots of one number run together, one pass after the other; the places of the text are the
    first pass.

    Args:
        head: The head, in float32.
        target: The target.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        decay: Weight of each guess, as a share of the weight of the guess before it.
        num_groups: Most groups of a row in a step, drawn anew each time the row comes; None: one behind every place.
        noise: Strength of uniform noise on the target's states, in training alone.
        seed: Of the groups and of the noise.

    Raises:
        InputError: A number is too small.
    """

    head: ParallelHead

    def __init__(
        self,
        head: ParallelHead,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        decay: float = 1.0,
        num_groups: int | None = None,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        if num_groups is not None and num_groups < 1:
            raise InputError(f"num_groups must be >= 1, got {num_groups}")
        super().__init__(
            head,
            target,
            taps=(Anatomy.of(target).num_layers,),
            loss=loss,
            num_guesses=head.num_slots + 1,
            decay=decay,
            noise=noise,
            seed=seed,
        )
        self._num_groups = num_groups

    @property
    def most_guesses(self) -> int:
        """One guess at the last place of the text, and one at each slot."""
        return self.num_guesses

    def guesses(self, batch: Batch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What the head returns at all places, then at slot 1, 2, ..., `count - 1` of each group; 0 without a group."""
        rows, length = batch.tokens.shape
        features = self.features(batch)
        if self.training and self._noise:
            features = features + self._noises(batch).to(features)
        places, kept = torch.arange(length, device=batch.tokens.device), GroupKeys()
        tokens = pad(batch.tokens[:, 1:], (0, 1), value=PADDING)
        sees = (places[:, None] >= places).expand(rows, 1, -1, -1)
        yield self.head(tokens, features, places.expand(rows, -1), sees, kept)
        at = self.groups(batch).at
        nothing = features.new_zeros(*at.shape, features.shape[-1])
        seen = (places <= at[..., None])[:, None]
        own = torch.eye(at.shape[1], dtype=torch.bool, device=at.device).expand(rows, 1, -1, -1)
        for number in range(1, count):
            seen = torch.cat([seen, own], -1)
            slots = torch.full_like(at, -number)
            found = self.head(slots, nothing, at + number, seen, kept)
            whole = found.new_zeros(rows, length + 1, found.shape[-1])
            yield whole.scatter(1, at[..., None].expand_as(found), found)[:, :length]

    def groups(self, batch: Batch) -> Groups:
        """The groups of a step: some of the places whose next guess is learnt, or all places."""
        rows, length = batch.tokens.shape
        if self._num_groups is None or not self.training:
            every = torch.arange(length, device=batch.tokens.device).expand(rows, -1)
            return Groups(at=every, real=torch.ones_like(every, dtype=torch.bool))
        drawn = []
        for learnt, number in zip(batch.learnt.cpu().numpy(), batch.rows, strict=True):
            places = np.flatnonzero(learnt[2:])
            dice = np.random.default_rng([self._seed, batch.step, number, GROUP_DRAW])
            drawn.append(np.sort(dice.permutation(places)[: self._num_groups]))
        most = max(1, *(len(each) for each in drawn))
        at = np.stack([np.pad(each, (0, most - len(each)), constant_values=length) for each in drawn])
        found = torch.from_numpy(at).to(batch.tokens.device)
        return Groups(at=found, real=found < length)

    def places(self, batch: Batch, number: int) -> Places:
        """All places for the first guess, and those of the groups for the others."""
        every = super().places(batch, number)
        if not number:
            return every
        groups, grouped = self.groups(batch), torch.zeros_like(batch.learnt)
        rows, which = groups.real.nonzero(as_tuple=True)
        grouped[rows, groups.at[rows, which]] = True
        kept = grouped[every.rows, every.at]
        return Places(every.rows[kept], every.at[kept], every.labels[kept])

    def places_of(self, documents: Sequence[Document], max_length: int) -> Float[Tensor, " guesses"]:
        """As of every head; of the slots of groups that are drawn, as many as there are on average."""
        if self._num_groups is None:
            return super().places_of(documents, max_length)
        slots, total = torch.arange(self.num_guesses), torch.zeros(self.num_guesses, dtype=torch.float64)
        for document in documents:
            first = super().places_of([document], max_length)[0]
            # Groups begin where the first guess is learnt, and their last ones reach behind the text.
            drawn = (self._num_groups / first.clamp(min=1)).clamp(max=1)
            total += torch.where(slots > 0, drawn, 1.0) * (first - slots).clamp(min=0)
        return total

    def write(self, folder: Path) -> None:
        """Write the head in the layout of this project."""
        write_parallel(self.head, folder, self.shape, self.dtype)


def parallel_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    form: str = "eagle",
    num_slots: int = 4,
    layers: int = 1,
    decay: float = 0.8,
    num_groups: int | None = None,
    noise: float = 0.0,
    intermediate_size: int | None = None,
    begin: str | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Parallel:
    """The learner for a new parallel head of a target, or for a head on disk.

    Args:
        form: What a place of the text reads: `eagle` or `medusa`.
        num_slots: Mask slots. The head drafts one token more.
        layers: Decoder layers of the head.
        num_groups: Most groups of a row in a step; None: one behind every place.
        intermediate_size: Width of the feed-forward; None: the target's.
        begin: Directory or hub id of a head to train further; the sizes are its own.

    Raises:
        InputError: A size makes no sense, or the head on disk does not fit the target.
    """
    anatomy, width = Anatomy.of(target), logit_width(target)
    ends = find_embedding_and_head(target, anatomy)
    if begin is None:
        if layers < 1:
            raise InputError(f"a parallel head must have a layer, got {layers}")
        torch.manual_seed(seed)
        layer = usual_layer(anatomy, vocab_size=width, intermediate_size=intermediate_size)
        layer.num_hidden_layers = layers
        head = ParallelHead(layer, ends, vocab_size=width, form=form, num_slots=num_slots)
    else:
        file = ParallelFile.read(begin)
        if (file.layer.hidden_size, file.layer.vocab_size) != (anatomy.hidden_size, width):
            raise InputError(
                f"the head in {begin} is for hidden states of width {file.layer.hidden_size} and "
                f"{file.layer.vocab_size:,} tokens, and the target has {anatomy.hidden_size} and {width:,}"
            )
        head = file.head(ends, width).float()
    return Parallel(
        head.train().to(device or target.device),
        target,
        loss=loss,
        decay=decay,
        num_groups=num_groups,
        noise=noise,
        seed=seed,
    )
