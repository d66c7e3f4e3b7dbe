"""Small mixture-of-experts models and texts for them."""

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from outrider.surgery.mixture import find_mixtures
from recipes.tiny import VOCAB, tiny_config, tiny_model

KINDS = ("mixtral", "qwen3_moe")


def mixture_model(kind: str = "mixtral", *, experts: int = 6, **changes: object) -> PreTrainedModel:
    if kind == "mixtral":
        changes = {"sliding_window": None, **changes}
    # transformers knows one of the names as another word for the other.
    counts = {"num_experts": experts, "num_local_experts": experts}
    return tiny_model(tiny_config(kind, **counts, **changes), seed=3)


def some_texts(count: int = 6, length: int = 40) -> list[list[int]]:
    dice = torch.Generator().manual_seed(5)
    return torch.randint(3, VOCAB, (count, length), generator=dice).tolist()


@torch.no_grad()
def logits(model: PreTrainedModel) -> Float[Tensor, "tokens vocab"]:
    return model(torch.tensor(some_texts(2))).logits.flatten(0, 1)


def gap(one: PreTrainedModel, other: PreTrainedModel) -> float:
    """The largest difference of logits, in units of their range."""
    ours, theirs = logits(one), logits(other)
    return float((ours - theirs).abs().max() / (theirs.max() - theirs.min()))


@torch.no_grad()
def twin_experts(model: PreTrainedModel, first: int, second: int, *, shuffled: bool) -> None:
    """Make two experts of each layer equal, with equal rows of the router."""
    for mixture in find_mixtures(model):
        mixture.rows[second] = mixture.rows[first]
        order = torch.arange(mixture.down.shape[-1])
        order = order.flip(0) if shuffled else order
        gate, up = mixture.gate_up[first].chunk(2)
        mixture.gate_up[second] = torch.cat([gate[order], up[order]])
        mixture.down[second] = mixture.down[first][:, order]
