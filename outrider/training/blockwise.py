"""Blockwise heads on a frozen target learn to guess the tokens behind the anchor, each from the same state.

Stern et al. 2018, https://arxiv.org/abs/1811.03115
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.core.dice import Purpose, step_generator
from outrider.core.types import InputError
from outrider.heads.blockwise import BlockwiseConfig, BlockwiseHeads, read_blockwise, write_blockwise
from outrider.heads.parts.backoff import FILE, BackoffModel, read_backoff, write_backoff
from outrider.learning.batch import Batch, Document
from outrider.learning.divergences import CHUNK, Divergence
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.checkpoint import local_file
from outrider.lm.hf.embedding_and_head import find_embedding_and_head
from outrider.lm.hf.open import logit_width
from outrider.training.state_heads import DECAY, StateHeadsLearner


class Blockwise(StateHeadsLearner):
    r"""Blockwise heads that learn from a target.

    With `one_head`, each step computes the loss of one head, drawn with probability proportional to its weight. So the
    mean over steps is the weighted mean of the losses of all heads, and a step holds the logits of one.

    Args:
        one_head: Whether a step learns one drawn head.
        grams: An n-gram model to write beside the heads; None: there is none.
        seed: Of the drawn heads.

    Raises:
        InputError: The heads are of another shape than the target.
    """

    heads: BlockwiseHeads

    def __init__(
        self,
        heads: BlockwiseHeads,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        decay: float = DECAY,
        one_head: bool = False,
        grams: BackoffModel | None = None,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(heads, target, loss=loss, decay=decay, dtype=dtype, chunk=chunk)
        config = heads.config
        if (config.hidden_size, config.vocab_size) != (self.shape.hidden_size, self.shape.vocab_size):
            raise InputError(
                f"the heads are for hidden states of width {config.hidden_size} and {config.vocab_size:,} tokens, and "
                f"the target has {self.shape.hidden_size} and {self.shape.vocab_size:,}"
            )
        self.grams = grams
        self._one_head, self._seed = one_head, seed

    def counted(self, batch: Batch) -> Collection[int]:
        """All heads, or the step's own."""
        if not self._one_head or not self.training:
            return super().counted(batch)
        weights = self.decay ** np.arange(self.num_guesses)
        dice = step_generator(Purpose.HEAD, seed=self._seed, step=batch.step)
        return (int(dice.choice(self.num_guesses, p=weights / weights.sum())),)

    def write(self, folder: Path) -> None:
        """Write the heads, and the n-gram model beside them."""
        write_blockwise(self.heads, folder, self.shape, self.dtype)
        if self.grams is not None:
            write_backoff(self.grams, folder)


def blockwise_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    num_heads: int = 5,
    intermediate_size: int | None = None,
    documents: Sequence[Document] = (),
    order: int = 3,
    least: int = 2,
    one_head: bool = False,
    begin: str | None = None,
    decay: float = DECAY,
    seed: int = 0,
    device: torch.device | None = None,
    chunk: int = CHUNK,
) -> Blockwise:
    """The learner for new blockwise heads of a target, or for heads on disk.

    Args:
        num_heads: Number of heads.
        intermediate_size: Width of each head between its matrices; None: the target's width.
        documents: The texts that an n-gram model is counted on; none of them: there is no such model, or that beside
            the heads on disk.
        order: Most tokens of an n-gram; 0: there is no n-gram model.
        least: How often an n-gram of two or more tokens must be seen to be kept.
        one_head: Whether a step learns one drawn head.
        begin: Directory or hub id of heads to train further; the sizes are theirs.
        seed: Of new weights and of the drawn heads.

    Raises:
        InputError: A size makes no sense, or the heads on disk do not fit the target.
    """
    ends, width = find_embedding_and_head(target, Anatomy.of(target)), logit_width(target)
    if begin is not None:
        heads = read_blockwise(begin, ends).float()
    else:
        torch.manual_seed(seed)
        size = Anatomy.of(target).hidden_size
        config = BlockwiseConfig(
            hidden_size=size,
            vocab_size=width,
            num_heads=num_heads,
            intermediate_size=size if intermediate_size is None else intermediate_size,
        )
        heads = BlockwiseHeads(config, ends)
    grams = None
    if order and documents:
        grams = BackoffModel.count((each.tokens for each in documents), vocab_size=width, order=order, least=least)
    elif order and begin is not None and (file := local_file(begin, FILE)) is not None:
        grams = read_backoff(file)
    return Blockwise(
        heads.train().to(device or target.device),
        target,
        loss=loss,
        decay=decay,
        one_head=one_head,
        grams=grams,
        seed=seed,
        chunk=chunk,
    )
