"""Random checkpoints of heads in the forms that others publish, for a tiny target."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider.drafters.protocol import Surroundings

Tensors = dict[str, Tensor]


def drawn(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Tensors:
    """Random tensors of these shapes: norms around 1, matrices that keep the size of what they multiply."""
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=dice, dtype=torch.float64)
        found[name] = 1 + 0.2 * noise if len(shape) == 1 and "norm" in name else 1.3 * noise / shape[-1] ** 0.5
    return found


def written(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], file: str) -> None:
    """A checkpoint's two files."""
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(dict(tensors), folder / file)


def medusa_of_vllm(
    folder: Path, around: Surroundings, *, heads: int = 4, layers: int = 1, bias: bool = False, seed: int = 0
) -> Tensors:
    """vLLM's form of Medusa heads."""
    size, vocab = around.hidden_size, around.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        for j in range(layers):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (size, size)
            if bias:
                shapes[f"blocks.{i}.layers.{j}.bias"] = (size,)
        shapes[f"lm_heads.{i}.weight"] = (vocab, size)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": vocab,
        "num_heads": heads,
        "num_hidden_layers": layers,
        "medusa_fc_bias": bias,
    }
    tensors = drawn(shapes, seed)
    written(folder, config, tensors, "model.safetensors")
    return tensors


def medusa_with_fewer_tokens(folder: Path, around: Surroundings, *, shared: bool, whole: bool = False) -> Tensors:
    """vLLM's form with a list of tokens, in no order, and one output layer for all heads or one each.

    Args:
        whole: The output layers have the rows of all tokens.
    """
    size, vocab = around.hidden_size, around.vocab_size
    chosen = torch.randperm(vocab, generator=torch.Generator().manual_seed(5))[: vocab // 2]
    shapes: dict[str, tuple[int, ...]] = {f"medusa_heads.blocks.{i}.layers.0.weight": (size, size) for i in range(3)}
    shapes |= {
        f"medusa_heads.lm_heads.{i}.weight": (vocab if whole else len(chosen), size) for i in range(1 if shared else 3)
    }
    config = {
        "model_type": "medusa",
        "hidden_size": size,
        "vocab_size": vocab,
        "num_heads": 3,
        "truncated_vocab_size": len(chosen),
        "original_lm_head": shared,
    }
    tensors = drawn(shapes) | {"token_map": chosen}
    written(folder, config, tensors, "model.safetensors")
    return tensors


def medusa_of_its_authors(folder: Path, around: Surroundings, *, prefix: str = "", layers: int = 2) -> Tensors:
    """The original form: a pickled file, no sizes that can be trusted in the config, biases."""
    size, vocab = around.hidden_size, around.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        for j in range(layers):
            shapes |= {f"{prefix}{i}.{j}.linear.weight": (size, size), f"{prefix}{i}.{j}.linear.bias": (size,)}
        shapes[f"{prefix}{i}.{layers}.weight"] = (vocab, size)
    config = {"base_model_name_or_path": "org/target", "medusa_num_heads": 2, "medusa_num_layers": 1}
    tensors = drawn(shapes)
    written(folder, config, tensors, "medusa_lm_head.pt")
    return tensors
