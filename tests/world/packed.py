"""Models whose weights are packed, without a file."""

import gguf
import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.lm.weights.blocks import GROUP, BlockWeight
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear


def packed(model: PreTrainedModel, kind: str = "Q8_0") -> PreTrainedModel:
    """The model with blocks in place of the weights of its linear layers and its embedding, if their rows are whole
    blocks of 32 weights.
    """
    blocks = gguf.GGMLQuantizationType[kind]
    for path, layer in list(model.named_modules()):
        if type(layer) not in (nn.Linear, nn.Embedding) or layer.weight.shape[1] % GROUP:
            continue
        rows = gguf.quants.quantize(layer.weight.detach().to(torch.float32).numpy(), blocks)
        weight, bias = BlockWeight.of_gguf(rows, kind), getattr(layer, "bias", None)
        new = (
            BlockLinear(weight, None if bias is None else bias.detach())
            if isinstance(layer, nn.Linear)
            else BlockEmbedding(weight, model.dtype)
        )
        model.set_submodule(path, new)
    return model.eval()
