"""Heads that are ready to learn, by name, and texts for them."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider import catalog
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.batch import Document, TrainBatch
from outrider.learning.options import SIZE
from outrider.training.data.batches import Batches
from outrider.training.loop.settings import TrainSettings
from tests.world.zoo import VOCAB

SETTINGS = TrainSettings(
    steps=12, batch_size=3, max_length=24, learning_rate=3e-3, warmup=2, save_every=6, watch_every=6, log_every=1
)


def head_learner(
    name: str,
    target: PreTrainedModel,
    *,
    loss: str | None = None,
    ids: torch.Tensor | None = None,
    depth: int = 5,
    documents: Sequence[Document] = (),
    seed: int = 0,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> HeadObjective:
    """A head of the catalog that learns.

    Args:
        loss: The divergence; None: the cross-entropy of the text's own tokens.
        ids: The tokens that a new head can guess; None: all.
        **options: What the head is told; there is no noise by default, and no size with `init_from`.
    """
    if ids is not None:
        options["draft_vocab"] = len(ids)
        documents = [Document(tokens=ids.numpy(), start=0)]
    spec = catalog.rows("drafter")[name].kind
    if "noise" in {field.name for field in fields(spec.options)}:
        options = {"noise": 0.0, **options}
    if "init_from" in options:
        fixed = spec.options.of_kinds(SIZE)
        options = {key: value for key, value in options.items() if key not in fixed}
    context = HeadContext(target=target, documents=documents, depth=depth, seed=seed, dtype=dtype)
    return spec.learner(spec.options(divergence=loss or "ce", **options), context)


def moved(made: HeadObjective, noise: float = 0.3) -> HeadObjective:
    """The learner with weights that are no longer those of the start."""
    dice = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.requires_grad:
                weight.add_(noise * torch.randn(weight.shape, generator=dice) / max(weight.shape[-1], 1) ** 0.5)
    return made


def documents(count: int = 9) -> list[Document]:
    """Short random texts, a third of each a prompt."""
    dice = np.random.default_rng(0)
    return [
        Document(tokens=dice.integers(3, VOCAB, size=size), start=int(size // 3))
        for size in dice.integers(12, 20, size=count)
    ]


def batch(step: int = 0) -> TrainBatch:
    """Three of these texts."""
    return Batches(documents(), batch_size=3, max_length=24, seed=0).batch(step)


def repeated(given: TrainBatch) -> Batches:
    """Batches that are all the same rows."""

    class Repeated(Batches):
        def batch(self, step: int) -> TrainBatch:
            return replace(given, step=step)

    return Repeated(documents(), batch_size=3, max_length=24, seed=0)
