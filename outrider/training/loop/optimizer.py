"""The optimizer of a learner."""

from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from outrider.core.types import InputError
from outrider.training.loop.settings import TrainSettings


def adamw(learner: nn.Module, settings: TrainSettings, device: torch.device) -> AdamW:
    """AdamW over the trained parameters. Matrices decay, other parameters do not.

    Args:
        device: Where it runs. On a GPU a step is one kernel for all parameters.

    Raises:
        InputError: All weights are frozen.
    """
    return AdamW(
        _groups(learner, settings.weight_decay),
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        fused=True if device.type == "cuda" else None,
    )


def _groups(learner: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trained parameters: matrices, which decay, and the others."""
    trained = [parameter for parameter in learner.parameters() if parameter.requires_grad]
    if not trained:
        raise InputError("nothing of this drafter can be trained: all its weights are frozen")
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
