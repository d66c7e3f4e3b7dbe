"""Medusa: heads on a frozen target learn to guess the tokens behind the anchor, each from the same state (Medusa-1).

Cai et al. 2024, https://arxiv.org/abs/2401.10774
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.heads.medusa import MedusaConfig, MedusaHeads, read_medusa, write_medusa
from outrider.lm.anatomy import Anatomy
from outrider.lm.open import logit_width
from outrider.training.batches import Batch
from outrider.training.divergences import CHUNK, Divergence
from outrider.training.heads import HeadLearner, Places
from outrider.types import InputError

DECAY = 0.8
"""The paper's weight of a head, as a share of the weight of the head before it."""


class Medusa(HeadLearner):
    """Medusa heads that learn from a target. The target stays as it is.

    Args:
        heads: The heads, in float32.
        target: The target.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        decay: Weight of each head, as a share of the weight of the head before it.

    Raises:
        InputError: The heads are of another shape than the target.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        decay: float = DECAY,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        config = heads.config
        super().__init__(
            target,
            taps=(Anatomy.of(target).num_layers,),
            loss=loss,
            num_guesses=config.num_heads,
            decay=decay,
            ids=heads.token_map,
            dtype=dtype,
            chunk=chunk,
        )
        if (config.hidden_size, config.vocab_size) != (self.shape.hidden_size, self.shape.vocab_size):
            raise InputError(
                f"the heads are for hidden states of width {config.hidden_size} and {config.vocab_size:,} tokens, and "
                f"the target has {self.shape.hidden_size} and {self.shape.vocab_size:,}"
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

    def write(self, folder: Path) -> None:
        """Write the heads in vLLM's form."""
        write_medusa(self.heads, folder, self.shape, self.dtype)

    @torch.no_grad()
    def accuracies(
        self, batches: Iterable[Batch], *, ranks: int = 10, greedy: bool
    ) -> Float[np.ndarray, "heads ranks"]:
        """How often a head's likeliest, second likeliest, ... token is the one that comes.

        Args:
            greedy: The token that comes is the target's likeliest one; otherwise it is the text's.
        """
        ranks = min(ranks, self.heads.config.width)
        ids = self._ids_on(self.heads.weight.device)
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


def medusa_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    num_heads: int = 5,
    num_layers: int = 1,
    shared: bool = False,
    ids: Int[Tensor, " width"] | None = None,
    begin: str | None = None,
    decay: float = DECAY,
    seed: int = 0,
    device: torch.device | None = None,
    chunk: int = CHUNK,
) -> Medusa:
    """The learner for new Medusa heads of a target, or for heads on disk.

    Args:
        num_heads: Number of heads.
        num_layers: Residual layers of each head.
        shared: Whether all heads use one copy of the target's output layer, which does not learn. Otherwise each
            head has a copy of its own.
        ids: The tokens that the heads can guess, ascending; None: all.
        begin: Directory or hub id of heads to train further; the sizes are theirs.
        seed: Of what cannot be copied from the target.

    Raises:
        InputError: A size makes no sense, or the heads on disk do not fit the target.
    """
    if begin is not None:
        heads = read_medusa(begin, vocab_size=logit_width(target)).float()
    else:
        torch.manual_seed(seed)
        config = MedusaConfig(
            hidden_size=Anatomy.of(target).hidden_size,
            vocab_size=logit_width(target),
            num_heads=num_heads,
            num_hidden_layers=num_layers,
            truncated_vocab_size=None if ids is None else len(ids),
            original_lm_head=shared,
        )
        heads = MedusaHeads(config)
        output = target.get_output_embeddings()
        heads.begin_from(None if output is None else output.weight, ids)
    if heads.config.original_lm_head:
        heads.lm_heads.requires_grad_(False)
    return Medusa(heads.train().to(device or target.device), target, loss=loss, decay=decay, chunk=chunk)
