"""Heads that are ready to learn, by name."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider import catalog
from outrider.heads.objective import HeadContext, HeadObjective
from outrider.learning.batch import Document
from outrider.learning.options import SIZE


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
        fixed = {field.name for field in fields(spec.options) if field.metadata.get("kind") == SIZE}
        options = {key: value for key, value in options.items() if key not in fixed}
    context = HeadContext(target=target, documents=documents, depth=depth, seed=seed, dtype=dtype)
    return spec.learner(spec.options(divergence=loss or "ce", **options), context)
