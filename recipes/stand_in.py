"""A target with the outputs of the embedded target and the cost of a larger one, to measure drafting at that cost.

`python -m recipes stand_in --out DIR` widens the feed-forward layers of the embedded target until the model has 110
million parameters. The added neurons compute like the others, but their outputs have the weight zero. The logits equal
the embedded target's up to the order of sums, so the embedded draft model is accepted exactly as often. A forward costs
as much as the added weights require. The acceptance is real and the cost is synthetic: a trained model of this size
would have more and wider layers, and would be harder to predict.
"""

import shutil
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import open_model

PARAMETERS = 110_000_000
QUICK = {"parameters": 20_000_000}
WIDTHS = 64
"""The width of feed-forward layers is a multiple of this."""
SPREAD = 0.02
"""Standard deviation of the weights into the added neurons, as in untrained layers."""


def num_parameters(model: PreTrainedModel) -> int:
    """Number of weights; tied weights count once."""
    return sum(weight.numel() for weight in model.parameters())


def width_for(model: PreTrainedModel, parameters: int) -> int:
    """The feed-forward width at which the model has about `parameters` parameters."""
    config = model.config
    per_neuron = 3 * config.hidden_size * config.num_hidden_layers
    more = (parameters - num_parameters(model)) / per_neuron
    width = config.intermediate_size + round(more / WIDTHS) * WIDTHS
    if width < config.intermediate_size:
        raise InputError(
            f"parameters must be at least the {num_parameters(model)} that the model has already, got {parameters}"
        )
    return width


@torch.no_grad()
def widen(model: PreTrainedModel, width: int, seed: int = 0) -> PreTrainedModel:
    """The model with wider feed-forward layers, changed in place; its outputs stay the same.

    Args:
        model: A model whose layers have `mlp.gate_proj`, `up_proj` and `down_proj` without biases, such as a Llama.
        width: Neurons of each layer, at least as many as before.
    """
    generator = torch.Generator().manual_seed(seed)
    for layer in model.model.layers:
        mlp = layer.mlp
        more = width - mlp.gate_proj.out_features
        for projection in (mlp.gate_proj, mlp.up_proj):
            old = projection.weight
            fresh = torch.randn(more, old.shape[1], generator=generator) * SPREAD
            projection.weight = torch.nn.Parameter(torch.cat([old, fresh.to(old)]))
            projection.out_features = width
        old = mlp.down_proj.weight
        mlp.down_proj.weight = torch.nn.Parameter(torch.cat([old, old.new_zeros(old.shape[0], more)], 1))
        mlp.down_proj.in_features = width
        mlp.intermediate_size = width
    model.config.intermediate_size = width
    return model


def stand_in(parameters: int = PARAMETERS, seed: int = 0) -> PreTrainedModel:
    """A stand-in for the embedded target, in its dtype."""
    model = open_model(str(EMBEDDED_TARGET), device="cpu")
    return widen(model, width_for(model, parameters), seed)


def build(out: Path, parameters: int = PARAMETERS, seed: int = 0) -> Path:
    """Write a stand-in for the embedded target to a folder that `outrider.load` takes, its tokenizer beside it."""
    model = stand_in(parameters, seed)
    try:
        out.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(out)
        for file in EMBEDDED_TARGET.iterdir():
            if "token" in file.name or "template" in file.name:
                shutil.copyfile(file, out / file.name)
    except OSError as error:
        raise InputError(f"cannot write to {out}: {error.strerror}; give another folder with --out") from error
    return out


def main(
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    parameters: Annotated[int, typer.Option(help="How many it is to have, about.")] = PARAMETERS,
    seed: Annotated[int, typer.Option(help="Of the added weights.")] = 0,
) -> None:
    """Write a model with the outputs of the embedded target and the cost of a larger model."""
    build(out, parameters, seed)
    made = open_model(str(out), device="cpu")
    typer.echo(f"{out}: {num_parameters(made):,} parameters, feed-forward layers of {made.config.intermediate_size}")
