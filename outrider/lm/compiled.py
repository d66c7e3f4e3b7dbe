"""Forwards compiled by torch."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

COMPILED = 64
"""Columns up to which forwards are compiled; longer ones digest prompts, in many shapes and seldom."""


def compiled(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's forward, compiled when it is first called.

    On a CPU shapes are symbols, so that one graph serves all lengths (and another one row), and weights become
    constants that the kernel library lays out once. On a GPU shapes are fixed and forwards are replayed as CUDA graphs.
    """
    if model.device.type == "cuda":
        return torch.compile(model, dynamic=False, mode="reduce-overhead")
    return torch.compile(model, dynamic=True, options={"freezing": True})
