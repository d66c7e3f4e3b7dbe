"""A model's output layer cut to some tokens, so that it computes no logits of others."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.types import InputError


@torch.no_grad()
def narrowed(model: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """The same model with an output layer of the rows of some token ids, in this order. It is changed in place.

    Input embeddings stay whole, also where the output layer shared them.

    Raises:
        InputError: The output layer is no plain linear layer with a row per token.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.out_features <= max(ids):
        raise InputError(
            f"the draft model's output layer is a {type(head).__name__}, and only a plain linear layer with a row per "
            "token can be cut to some tokens; leave token_map out"
        )
    rows = torch.tensor(list(ids), device=head.weight.device)
    short = nn.Linear(
        head.in_features, len(ids), bias=head.bias is not None, device=head.weight.device, dtype=head.weight.dtype
    )
    short.weight.copy_(head.weight[rows])
    if head.bias is not None:
        short.bias.copy_(head.bias[rows])
    model.set_output_embeddings(short.requires_grad_(head.weight.requires_grad))
    if model.get_output_embeddings() is not short:
        raise InputError("the draft model does not let its output layer be replaced; leave token_map out")
    return model.eval()
