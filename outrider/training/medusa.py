"""Medusa: heads on a frozen target learn to guess the tokens behind the anchor, each from the same state (Medusa-1).

Cai et al. 2024, https://arxiv.org/abs/2401.10774
"""

from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.medusa import MedusaConfig, MedusaHeads, read_medusa, write_medusa
from outrider.learning.divergences import CHUNK, Divergence
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.open import logit_width
from outrider.training.state_heads import DECAY, StateHeadsLearner


class Medusa(StateHeadsLearner):
    """Medusa heads that learn from a target.

    Raises:
        InputError: The heads are of another shape than the target.
    """

    heads: MedusaHeads

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
        super().__init__(heads, target, loss=loss, decay=decay, ids=heads.token_map, dtype=dtype, chunk=chunk)
        config = heads.config
        if (config.hidden_size, config.vocab_size) != (self.shape.hidden_size, self.shape.vocab_size):
            raise InputError(
                f"the heads are for hidden states of width {config.hidden_size} and {config.vocab_size:,} tokens, and "
                f"the target has {self.shape.hidden_size} and {self.shape.vocab_size:,}"
            )

    def write(self, folder: Path) -> None:
        """Write the heads in vLLM's form."""
        write_medusa(self.heads, folder, self.shape, self.dtype)


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
