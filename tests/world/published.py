"""Random checkpoints of heads in the forms that others publish, for a tiny target."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import save_file
from torch import Tensor

from outrider.lm.hf.mtp import SINCE
from outrider.lm.target_info import TargetInfo

Tensors = dict[str, Tensor]


def needs_mtp() -> None:
    """Skip a test of multi-token-prediction layers where transformers is too old to run them."""
    if Version(transformers.__version__) < SINCE:
        pytest.skip(f"transformers {SINCE} or later runs multi-token-prediction layers")


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
    folder: Path, around: TargetInfo, *, heads: int = 4, layers: int = 1, bias: bool = False, seed: int = 0
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


def medusa_with_fewer_tokens(folder: Path, around: TargetInfo, *, shared: bool, whole: bool = False) -> Tensors:
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


def medusa_of_its_authors(folder: Path, around: TargetInfo, *, prefix: str = "", layers: int = 2) -> Tensors:
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


def layer_of(around: TargetInfo, **more: Any) -> dict[str, Any]:
    """The sizes of a decoder layer, as configs of version 4 of transformers name them."""
    return {
        "model_type": "llama",
        "hidden_size": around.hidden_size,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": around.vocab_size,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "rope_scaling": None,
        "max_position_embeddings": 512,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **more,
    }


def layer_shapes(layer: Mapping[str, Any], name: str, width: int) -> dict[str, tuple[int, ...]]:
    """The tensors of a decoder layer whose attention reads vectors of a width, without norms of its input."""
    size, inner = layer["hidden_size"], layer["intermediate_size"]
    dim = layer.get("head_dim") or size // layer["num_attention_heads"]
    queries, keys = layer["num_attention_heads"] * dim, layer["num_key_value_heads"] * dim
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.self_attn.q_proj.weight": (queries, width),
        f"{name}.self_attn.k_proj.weight": (keys, width),
        f"{name}.self_attn.v_proj.weight": (keys, width),
        f"{name}.self_attn.o_proj.weight": (size, queries),
        f"{name}.mlp.gate_proj.weight": (inner, size),
        f"{name}.mlp.up_proj.weight": (inner, size),
        f"{name}.mlp.down_proj.weight": (size, inner),
        f"{name}.post_attention_layernorm.weight": (size,),
    }
    if layer["model_type"] == "qwen3":
        shapes |= {f"{name}.self_attn.q_norm.weight": (dim,), f"{name}.self_attn.k_norm.weight": (dim,)}
    return shapes


def eagle(
    folder: Path,
    around: TargetInfo,
    *,
    vllm: bool = False,
    layers: int = 1,
    qkv_bias: bool = False,
    speculators: bool = False,
) -> Tensors:
    """EAGLE-1 as its authors publish it, with a bias and an embedding; or as vLLM needs it, with neither; or in the
    layout of speculators.
    """
    layer = layer_of(around, num_hidden_layers=layers)
    size = around.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (size, 2 * size)}
    for i in range(layers):
        shapes |= layer_shapes(layer, f"layers.{i}", size)
        if i:
            shapes[f"layers.{i}.input_layernorm.weight"] = (size,)
        if qkv_bias:
            shapes |= {f"layers.{i}.self_attn.{p}_proj.bias": (n,) for p, n in (("q", size), ("k", 16), ("v", 16))}
    if not vllm:
        shapes |= {"fc.bias": (size,), "embed_tokens.weight": (around.vocab_size, size)}
    name = "EagleLlamaForCausalLM" if vllm else "LlamaForCausalLM"
    tensors = drawn(shapes)
    if speculators:
        config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
        config |= {"architectures": ["EagleSpeculator"], "transformer_layer_config": layer}
        parts = {n.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): t for n, t in tensors.items()}
        written(folder, config, parts | {"lm_head.weight": torch.ones(3, 3)}, "model.safetensors")
        return tensors
    if vllm:
        written(folder, {"architectures": [name], **layer}, tensors, "model.safetensors")
    else:
        rotary = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
        written(folder, {"architectures": [name], "bias": True, **layer}, tensors | rotary, "pytorch_model.bin")
    return tensors


def eagle3(
    folder: Path,
    around: TargetInfo,
    *,
    native: bool = False,
    taps: tuple[int, ...] | None = (0, 1, 2),
    few: bool = True,
    layers: int = 1,
    flags: Mapping[str, bool] | None = None,
    size: int | None = None,
    shared_output: bool = False,
    producer: str | None = None,
    **more: Any,
) -> Tensors:
    """EAGLE-3 in the layout of speculators, or in that of its authors.

    Args:
        few: It guesses some tokens only.
        size: Its width, where it has an embedding of its own; None: the target's.
        shared_output: It has no output layer.
        producer: Who wrote the authors' layout: `automodel`, `specforge`, or None.
        **more: Sizes of its layers.
    """
    width, flags = size or around.hidden_size, {"norm_before_residual": False} | dict(flags or {})
    layer = layer_of(around, **({"hidden_size": width, "num_hidden_layers": layers} | more))
    first = "midlayer" if native else "layers.0"
    ids = torch.arange(3, around.vocab_size, 2) if few else torch.arange(around.vocab_size)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 3 * around.hidden_size), "norm.weight": (width,)}
    shapes |= layer_shapes(layer, first, 2 * width)
    shapes |= {f"{first}.input_layernorm.weight": (width,), f"{first}.hidden_norm.weight": (width,)}
    for i in range(1, layers):
        shapes |= layer_shapes(layer, f"layers.{i}", width) | {f"layers.{i}.input_layernorm.weight": (width,)}
    if flags.get("norm_before_fc"):
        shapes["input_norm.weight"] = (3 * around.hidden_size,)
    if flags.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (around.hidden_size,) for i in range(3)}
    if size:
        shapes["embed_tokens.weight"] = (around.vocab_size, width)
    if not shared_output:
        shapes["lm_head.weight"] = (len(ids), width)
    tensors = drawn(shapes)
    if few:
        tensors |= {"d2t": ids - torch.arange(len(ids))}
        tensors |= {"t2d": torch.zeros(around.vocab_size, dtype=torch.bool).index_fill(0, ids, True)}
    shared = {"draft_vocab_size": len(ids), "target_hidden_size": around.hidden_size} | flags
    if native:
        name = "LlamaEagle3DraftModel" if producer == "automodel" else "LlamaForCausalLMEagle3"
        shared |= {"architectures": [name], **layer}
        shared |= {"auto_map": {"AutoModel": "modeling.Head"}} if producer == "specforge" else {}
        shared |= {} if taps is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(taps)}}
        prefix = "model." if producer == "automodel" else ""
        written(folder, shared, {f"{prefix}{each}": t for each, t in tensors.items()}, "pytorch_model.bin")
    else:
        shared |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        shared |= {"transformer_layer_config": layer}
        shared |= {} if taps is None else {"eagle_aux_hidden_state_layer_ids": list(taps)}
        written(folder, shared, tensors, "model.safetensors")
    return tensors


def hydra(folder: Path, around: TargetInfo, *, prefix: bool = True, layers: int = 1, grounded: bool = True) -> Tensors:
    """Hydra heads as their authors publish them: with dropout between the layers and a prefix layer, or with neither.

    The target's config lies in the folder `base` beside them.
    """
    size, vocab, layer = around.hidden_size, around.vocab_size, layer_of(around)
    first, output = (1, ".1") if prefix else (0, "")
    shapes: dict[str, tuple[int, ...]] = {"input_embed_fn.weight": (vocab, size)}
    for i in range(4):
        width = (i + 2) * size if grounded else size
        for name in ("linear", "res_connection") if grounded else ("linear",):
            shapes |= {f"hydra_mlp.{i}.{first}.{name}.weight": (size, width)}
            shapes |= {f"hydra_mlp.{i}.{first}.{name}.bias": (size,)}
        for j in range(1, layers):
            place = first + (1 + first) * j
            shapes |= {f"hydra_mlp.{i}.{place}.linear.weight": (size, size)}
            shapes |= {f"hydra_mlp.{i}.{place}.linear.bias": (size,)}
        shapes |= {f"hydra_lm_head.{i}{output}.weight": (vocab, size), f"hydra_lm_head.{i}{output}.bias": (vocab,)}
    if prefix:
        name = "prefix_embeding_layer"
        shapes |= layer_shapes(layer, f"{name}.layers.0", size)
        shapes |= {f"{name}.layers.0.input_layernorm.weight": (size,), f"{name}.norm.weight": (size,)}
        shapes |= {f"{name}.embed_tokens.weight": (vocab, size)}
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(layer | {"architectures": ["LlamaForCausalLM"]}))
    config = {
        "base_model_name_or_path": str(folder / "base"),
        "hydra_num_heads": 4,
        "hydra_num_layers": layers,
        "hydra_head_arch": "prefix-mlp" if prefix else "mlp",
        "grounded_heads": grounded,
        "hidden_state_offset": 0,
    }
    tensors = drawn(shapes)
    written(folder, config, tensors, "hydra_lm_head.pt")
    return tensors


def mlp_speculator(folder: Path, around: TargetInfo, *, tied: bool = False, scaled: bool = False) -> Tensors:
    """An MLP speculator. If its weights are tied, the file has those of the first depths alone."""
    size, vocab, inner = around.hidden_size, around.vocab_size, 20
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(4):
        if i < 2 or not tied:
            shapes[f"speculator.proj.{i}.weight"] = (inner, inner if i else size)
        if i == 0 or not tied:
            shapes |= {f"speculator.{name}.{i}.weight": (vocab, inner) for name in ("emb", "head")}
            shapes |= {f"speculator.ln.{i}.{name}": (inner,) for name in ("weight", "bias")}
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "vocab_size": vocab,
        "emb_dim": size,
        "inner_dim": inner,
        "n_predict": 4,
        "tie_weights": tied,
        "scale_input": scaled,
    }
    tensors = {name: tensor + 1 if ".ln." in name else tensor for name, tensor in drawn(shapes).items()}
    written(folder, config, tensors, "model.safetensors")
    return tensors
