"""A model's output layer cut to some tokens, so that it computes no logits of others."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.weights import plain

LEAVE = "leave token_map out"
"""What a user does where nothing can be cut."""


@runtime_checkable
class Cuttable(Protocol):
    """A linear layer that is not torch's."""

    out_features: int

    def cut(self, rows: Sequence[int]) -> nn.Module:
        """A layer of some of its rows, in this order."""


@torch.no_grad()
def narrowed(model: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """The same model with an output layer of the rows of some token ids, in this order. It is changed in place.

    Input embeddings stay whole, also where the output layer shared them.

    Raises:
        InputError: The output layer is no plain linear layer with a row per token.
    """
    short = cut(model.get_output_embeddings(), ids)
    model.set_output_embeddings(short)
    if model.get_output_embeddings() is not short:
        raise InputError(f"the draft model does not let its output layer be replaced; {LEAVE}")
    return model.eval()


@torch.no_grad()
def cut(layer: nn.Module | None, ids: Sequence[int]) -> nn.Module:
    """The rows of some token ids of an output layer, in this order. Packed weights stay packed.

    Raises:
        InputError: It has no row per token.
    """
    if isinstance(layer, Cuttable) and max(ids) < layer.out_features:
        return layer.cut(ids)
    if not isinstance(layer, nn.Linear) or not (plain(layer) or _sketched(layer)) or layer.out_features <= max(ids):
        raise InputError(
            f"the output layer is a {type(layer).__name__}, and only a plain linear layer with a row per token can be "
            f"cut to some tokens; {LEAVE}"
        )
    rows, weight = torch.tensor(list(ids), device=layer.weight.device), layer.weight
    short = nn.Linear(
        layer.in_features, len(ids), bias=layer.bias is not None, device=weight.device, dtype=weight.dtype
    )
    short.weight.copy_(weight[rows])
    if layer.bias is not None:
        short.bias.copy_(layer.bias[rows])
    return short.requires_grad_(weight.requires_grad)


def _sketched(layer: nn.Linear) -> bool:
    """Whether it has sizes and no weights, as in an estimate. An offloaded layer has a `forward` of its own."""
    return type(layer) is nn.Linear and layer.weight.is_meta and "forward" not in vars(layer)
