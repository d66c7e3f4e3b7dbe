"""The base of learners whose heads all guess from the target's last hidden state (Medusa and its kin)."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.heads.objective import HeadLearner, Places
from outrider.heads.state_heads import StateHeads
from outrider.learning.batch import Batch
from outrider.learning.divergences import CHUNK, Divergence
from outrider.lm.hf.anatomy import Anatomy

DECAY = 0.8
"""Medusa's weight of a head, as a share of the weight of the head before it."""


class StateHeadsLearner(HeadLearner):
    """Heads that learn from a target. The target stays as it is.

    Args:
        heads: The heads, in float32.
        target: The target.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        decay: Weight of each head, as a share of the weight of the head before it.
        ids: The tokens that the heads can guess, ascending; None: all.
    """

    heads: StateHeads

    def __init__(
        self,
        heads: StateHeads,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        decay: float = DECAY,
        ids: Int[Tensor, " width"] | None = None,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(
            target,
            taps=(Anatomy.of(target).num_layers,),
            loss=loss,
            num_guesses=heads.num_heads,
            decay=decay,
            ids=ids,
            dtype=dtype,
            chunk=chunk,
        )
        self.heads = heads

    @property
    def most_guesses(self) -> int:
        """The number of heads."""
        return self.num_guesses

    def guesses(self, batch: Batch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What head 0, 1, ..., `count - 1` makes of each state."""
        hidden = self.last_states(batch).to(self.heads.weight.dtype)
        for number in range(count):
            yield self.heads(hidden, number)

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """Logits of a head."""
        return self.heads.logits(hidden, number)

    @torch.no_grad()
    def accuracies(
        self, batches: Iterable[Batch], *, ranks: int = 10, greedy: bool
    ) -> Float[np.ndarray, "heads ranks"]:
        """How often a head's likeliest, second likeliest, ... token is the one that comes.

        Args:
            greedy: The token that comes is the target's likeliest one; otherwise it is the text's.
        """
        ids = self._ids_on(self.heads.weight.device)
        ranks = min(ranks, self.shape.vocab_size if ids is None else len(ids))
        hits, counts = np.zeros((self.num_guesses, ranks)), np.zeros((self.num_guesses, 1))
        for given in batches:
            batch = self.with_states(given)
            for number, hidden in enumerate(self.guesses(batch, self.num_guesses)):
                places = Places.of(batch, number)
                picked, target = hidden[places.rows, places.at], self._target_logits(batch, number, places)
                for begin in range(0, len(places.labels), self.chunk):
                    rows = slice(begin, begin + self.chunk)
                    likeliest = self.logits(picked[rows], number).topk(ranks, -1).indices
                    tokens = likeliest if ids is None else ids[likeliest]
                    comes = target(rows).argmax(-1) if greedy else places.labels[rows]
                    hits[number] += (tokens == comes[:, None]).sum(0).cpu().numpy()
                counts[number] += len(places.labels)
        return hits / counts.clip(min=1)
