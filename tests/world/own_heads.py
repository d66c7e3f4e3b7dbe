"""Random checkpoints of heads in layouts of this project, for a tiny target, and drafters with them."""

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from outrider.drafters.model import ModelDrafter
from outrider.heads.blockwise import SPEC, PathsDrafter, RescoredDrafter
from outrider.heads.parts.backoff import BackoffModel, write_backoff
from outrider.lm.target_info import TargetInfo
from tests.world.published import Tensors, drawn, eagle3, layer_of, layer_shapes, written


def blockwise(folder: Path, around: TargetInfo, *, heads: int = 4, seed: int = 0) -> Tensors:
    """Blockwise heads, and an n-gram model beside them."""
    size, inner, vocab = around.hidden_size, around.hidden_size + 8, around.vocab_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(heads):
        shapes |= {f"heads.{i}.up.weight": (inner, size), f"heads.{i}.up.bias": (inner,)}
        shapes |= {f"heads.{i}.down.weight": (size, inner), f"heads.{i}.down.bias": (size,)}
    config = {
        "outrider_head": "blockwise",
        "hidden_size": size,
        "vocab_size": vocab,
        "num_heads": heads,
        "intermediate_size": inner,
    }
    tensors = drawn(shapes, seed)
    written(folder, config, tensors, "model.safetensors")
    write_backoff(grams(vocab), folder)
    return tensors


def grams(vocab: int, *, order: int = 3) -> BackoffModel:
    """An n-gram model of a random text."""
    text = np.random.default_rng(3).integers(vocab, size=200)
    return BackoffModel.count([text], vocab_size=vocab, order=order, least=1)


def parallel(
    folder: Path, around: TargetInfo, *, form: str = "eagle", slots: int = 3, layers: int = 1, seed: int = 0
) -> Tensors:
    """A parallel head."""
    size, layer = around.hidden_size, layer_of(around, num_hidden_layers=layers)
    width = 2 * size if form == "eagle" else size
    shapes: dict[str, tuple[int, ...]] = {"slots": (slots, width)}
    if form == "eagle":
        shapes["fc.weight"] = (size, width)
    for i in range(layers):
        shapes |= layer_shapes(layer, f"layers.{i}", size)
        if i or form == "medusa":
            shapes[f"layers.{i}.input_layernorm.weight"] = (size,)
    config = {"outrider_head": "parallel", "form": form, "num_slots": slots, "layer": layer}
    tensors = drawn(shapes, seed)
    # The slots differ as much as what positions of the text read.
    tensors["slots"] *= 3
    written(folder, config, tensors, "model.safetensors")
    return tensors


def peagle(folder: Path, around: TargetInfo, *, tokens: int | None = 4, mask_id: int = 5, **more: Any) -> Tensors:
    """P-EAGLE in the layout of speculators or, with `native`, of vLLM: EAGLE-3 with a mask token and its states.

    Args:
        tokens: How many tokens of a draft its config names; None: none.
        **more: What `eagle3` can be told.
    """
    tensors = eagle3(folder, around, **more)
    tensors |= drawn({"mask_hidden": (1, 1, 3 * around.hidden_size)}, seed=9)
    config = json.loads((folder / "config.json").read_text())
    if more.get("native"):
        config |= {"pard_token": mask_id, "parallel_drafting": True}
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
        (folder / "pytorch_model.bin").unlink()
        if more.get("producer") == "automodel":
            config |= {"mask_token_id": config.pop("pard_token"), "num_depths": tokens}
            written(folder, config, {f"model.{name}": each for name, each in tensors.items()}, "model.safetensors")
            return tensors
    else:
        config |= {"speculators_model_type": "peagle", "architectures": ["PEagleSpeculator"], "mask_token_id": mask_id}
    if tokens is not None and not more.get("native"):
        config["speculators_config"] = {"proposal_methods": [{"speculative_tokens": tokens}]}
    written(folder, config, tensors, "model.safetensors")
    return tensors


def rescored(around: TargetInfo, rescorer: ModelDrafter, *, lam: float = 0.5, top_k: int = 4) -> RescoredDrafter:
    """Blockwise heads with a language model that chooses among their guesses."""
    plain = _plain(around)
    return RescoredDrafter(
        head=plain.head,
        tap=plain.tap,
        vocab_size=plain.vocab_size,
        norm=plain.norm,
        rescorer=rescorer,
        lam=lam,
        top_k=top_k,
    )


def with_paths(around: TargetInfo, **fields: object) -> PathsDrafter:
    """Blockwise heads that draft the best paths; the fields are those of `TrainedBlockwise`."""
    drafter = _plain(around, **({"paths": 3, "top_k": 4} | fields))
    assert isinstance(drafter, PathsDrafter)
    return drafter


def _plain(around: TargetInfo, **fields: object):
    with tempfile.TemporaryDirectory() as folder:
        blockwise(Path(folder), around)
        return SPEC.at(folder, **fields).bind(around)
