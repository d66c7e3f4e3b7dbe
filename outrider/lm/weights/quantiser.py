"""Models of plain weights whose matrices are quantised as soon as they are read."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.core.inputs import unknown
from outrider.core.types import InputError
from outrider.host.mapped import release_pages
from outrider.lm.hf.open import LOADING, level_of
from outrider.lm.hf.weights import plain, weight_bytes, whole
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.linear import can_hold_blocks, place_blocks
from outrider.lm.weights.plain import copied, why_plain
from outrider.lm.weights.quantised import QUANTISERS, fitting, quantised

KINDS = {kind.lower(): kind for kind in QUANTISERS}
"""The formats, by the names that options have for them."""
ROUTERS = ("gate", "router", "shared_expert_gate")
"""Layers that choose experts. They are small, and llama.cpp leaves them plain too."""
AT_ONCE = 1 << 27
"""Bytes of weights that are read before their pages are given back."""
log = logging.getLogger(LOADING)


@dataclass(frozen=True, kw_only=True)
class Quantiser:
    """Quantises linear layers, the embedding and the output layer of models as `llama-quantize --pure` does.

    Attributes:
        kind: The format, a name in `QUANTISERS`.
    """

    kind: str

    @classmethod
    def of(cls, weights: str | None) -> "Quantiser | None":
        """The quantiser for the value of an option; None for None.

        Raises:
            InputError: There is no such format.

        Example:
            >>> Quantiser.of("q4_k"), Quantiser.of(None)
            (Quantiser(kind='Q4_K'), None)
        """
        if weights is None:
            return None
        if weights not in KINDS:
            raise unknown("kind of weights", weights, KINDS)
        return cls(kind=KINDS[weights])

    @torch.no_grad()
    def __call__(self, model: PreTrainedModel) -> PreTrainedModel:
        """The quantised model. Where layers cannot compute from blocks, it has plain weights of the same values.

        A matrix is dropped before the next one is read. Matrices whose rows are no whole groups of 32 stay plain.

        Args:
            model: A model on a CPU. It is changed.

        Raises:
            InputError: It has no matrix that can be quantised, or nothing but matrices.
        """
        layers = _layers(model)
        _check(self.kind, model, layers)
        sizes = self._quantise(model, layers)
        if (reason := why_plain(model)) is not None:
            model = copied(model, model.dtype).eval()
        _say(model, sizes, reason)
        return model

    def _quantise(self, model: PreTrainedModel, layers: dict[str, nn.Linear | nn.Embedding]) -> Counter[str]:
        """Put layers with blocks in the places of some. Returns the bytes of each format."""
        blocks, sizes, read = dict[int, BlockWeight](), Counter[str](), 0
        while layers:
            path = next(iter(layers))
            weight = layers.pop(path).weight
            kind = fitting(self.kind, weight.shape[1])
            if kind is None:
                continue
            if id(weight) not in blocks:
                blocks[id(weight)] = quantised(weight, kind)
                sizes[kind] += blocks[id(weight)].data.nbytes
                read += weight.nbytes
            place_blocks(model, path, blocks[id(weight)])
            if read >= AT_ONCE:
                release_pages(model.parameters())
                read = 0
        release_pages(model.parameters())
        return sizes


def _layers(model: PreTrainedModel) -> dict[str, nn.Linear | nn.Embedding]:
    """The layers with matrices in the part that generates text, by their places; the output layer and the embedding
    among them.
    """
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    inside = {id(part) for part in model.get_decoder().modules()} | {id(output)}
    return {
        path: layer
        for path, layer in model.named_modules(remove_duplicate=False)
        if id(layer) in inside and path.rpartition(".")[2] not in ROUTERS
        if plain(layer) or (layer is embedding and can_hold_blocks(layer) and whole(layer))
    }


def _check(kind: str, model: PreTrainedModel, layers: Mapping[str, nn.Linear | nn.Embedding]) -> None:
    """Raise InputError if a model has no matrix that can be quantised, or no other weights."""
    name, matrices = model.config.model_type, {id(layer.weight) for layer in layers.values()}
    if not any(fitting(kind, layer.weight.shape[1]) for layer in layers.values()):
        raise InputError(
            f"weights quantises linear layers whose rows are whole groups of 32, and {name} has none; leave out weights"
        )
    if all(id(weight) in matrices for weight in model.parameters()):
        raise InputError(f"{name} has no weights but matrices, and none would tell its dtype; leave out weights")


def _say(model: PreTrainedModel, sizes: Counter[str], reason: str | None) -> None:
    """Say in the log what the weights are now."""
    total = weight_bytes(model)
    if reason is None:
        kinds = [f"{kind} {size / 1e6:,.4g} MB" for kind, size in sizes.items()]
        now = f"{', '.join(kinds)}, plain {(total - sum(sizes.values())) / 1e6:.3g} MB"
    else:
        now = f"rounded to {', '.join(sizes)} and plain, because {reason}"
    log.log(level_of(model), "its weights are now %s; %s MB in memory", now, f"{total / 1e6:,.4g}")
