"""Random targets with what is published beside them: multi-token-prediction layers and assistants, as checkpoints.

The models have random weights with small layers, so that what is drafted is often what the target says next.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Gemma4AssistantConfig,
    Gemma4TextConfig,
    Glm4MoeConfig,
    MellumConfig,
    MuseGlimmerAssistantConfig,
    MuseGlimmerConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from outrider.lm.hf.assistant import layers_that_share
from recipes.tiny import scrambled

TINY_VOCAB = 64
NORMS = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
ADDING = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj", *NORMS)
"""Ends of the names of weights in whose proportion a layer adds to its input."""
NUM_ASSISTANT_TOKENS = 3
"""What the file of an assistant says about how many tokens transformers drafts."""
ENDS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}


@dataclass(frozen=True, kw_only=True)
class Size:
    """How large a target is.

    Attributes:
        hidden: Width of its hidden states, a multiple of 32.
        layers: Decoder layers, an even number.
        vocab: Tokens.
        window: How far layers with a window look back.
        strength: How much the layers change; 1 leaves them random, and drafts are seldom right.
    """

    hidden: int = 32
    layers: int = 2
    vocab: int = TINY_VOCAB
    window: int = 8
    strength: float = 0.3

    @property
    def common(self) -> dict[str, Any]:
        """Settings that the configs of all families have."""
        heads = max(4, self.hidden // 64)
        return ENDS | {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": 2 * self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 2,
            "head_dim": self.hidden // heads,
            "max_position_embeddings": 2048,
        }

    @property
    def mixed(self) -> dict[str, Any]:
        """Settings of families in which every second layer has a window."""
        kinds = ["sliding_attention", "full_attention"] * (self.layers // 2)
        return self.common | {"layer_types": kinds, "sliding_window": self.window}

    @property
    def recurrent(self) -> dict[str, Any]:
        """Settings of families in which the last layer alone attends, and others keep a state."""
        kinds = ["linear_attention"] * (self.layers - 1) + ["full_attention"]
        widths = {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        return self.common | {"layer_types": kinds, **widths, **heads}

    @property
    def experts(self) -> dict[str, Any]:
        """Settings of families of Qwen with experts."""
        widths = {"moe_intermediate_size": self.hidden, "shared_expert_intermediate_size": self.hidden}
        return {"num_experts": 4, "num_experts_per_tok": 2, **widths}


def glm4_moe(size: Size) -> PreTrainedConfig:
    """GLM-4 MoE."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden}
    return Glm4MoeConfig(**size.common, **experts, first_k_dense_replace=1, use_qk_norm=True)


def deepseek_v3(size: Size) -> PreTrainedConfig:
    """DeepSeek-V3: keys and values of different widths."""
    own = size.common | {"num_key_value_heads": size.common["num_attention_heads"]}
    own.pop("head_dim")
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden}
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return DeepseekV3Config(**own, **experts, **ranks, n_group=1, topk_group=1, first_k_dense_replace=1)


def mellum(size: Size) -> PreTrainedConfig:
    """Mellum: its one multi-token-prediction layer has a window."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": size.hidden}
    return MellumConfig(**size.mixed, **experts)


def qwen3_next(size: Size) -> PreTrainedConfig:
    """Qwen3-Next: three layers of four keep a state."""
    return Qwen3NextConfig(**size.recurrent, **size.experts)


def qwen3_5(size: Size) -> PreTrainedConfig:
    """The texts of Qwen3.5 and Qwen3.6."""
    return Qwen3_5TextConfig(**size.recurrent)


def qwen3_5_moe(size: Size) -> PreTrainedConfig:
    """The texts of their mixtures of experts."""
    return Qwen3_5MoeTextConfig(**size.recurrent, **size.experts)


FAMILIES: Mapping[str, Callable[[Size], PreTrainedConfig]] = {
    "glm4_moe": glm4_moe,
    "deepseek_v3": deepseek_v3,
    "mellum": mellum,
    "qwen3_next": qwen3_next,
    "qwen3_5": qwen3_5,
    "qwen3_5_moe": qwen3_5_moe,
}
"""Families with multi-token-prediction layers that transformers loads."""
BESIDE = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
"""Those whose layers transformers loads if it is told that there are some."""


def mtp_target(family: str, size: Size, folder: Path, *, num_mtp_layers: int = 1, seed: int = 0) -> Path:
    """A checkpoint of a target with multi-token-prediction layers.

    The layers are decoder layers behind the target's own ones, in a model that is as much deeper.
    """
    config, first = FAMILIES[family](size), size.layers
    deeper = json.loads(config.to_json_string(use_diff=False)) | {"num_hidden_layers": first + num_mtp_layers}
    deeper.pop("num_nextn_predict_layers", None)
    attention = "full_attention" if family in BESIDE else "sliding_attention"
    for name, kind in (("layer_types", attention), ("mlp_layer_types", "sparse")):
        if deeper.get(name) is not None:
            deeper[name] = [*deeper[name], *[kind] * num_mtp_layers]
    model = weakened(AutoModelForCausalLM.from_config(type(config).from_dict(deeper)), size.strength, seed)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for number in range(num_mtp_layers):
        _add_layer(tensors, family, first + number, size.hidden, seed)
    save_file(tensors, file, metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    counted = "mtp_num_hidden_layers" if family in BESIDE else "num_nextn_predict_layers"
    written |= {"num_hidden_layers": first, counted: num_mtp_layers}
    for name in ("layer_types", "mlp_layer_types"):
        if written.get(name) is not None:
            written[name] = written[name][:first]
    (folder / "config.json").write_text(json.dumps(written), encoding="utf-8")
    return folder


def _add_layer(tensors: dict[str, Tensor], family: str, number: int, hidden: int, seed: int) -> None:
    """Make a decoder layer one that predicts tokens, under the names of published checkpoints."""
    noise = torch.Generator().manual_seed(seed + number)
    fused = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    fused += 0.1 * torch.randn(hidden, 2 * hidden, generator=noise) / hidden**0.5
    usual = 0 if family in BESIDE else 1
    norms = [usual + 0.05 * torch.randn(hidden, generator=noise) for _ in range(3)]
    if family == "mellum" or family in BESIDE:
        begin = f"model.layers.{number}."
        for name in [name for name in tensors if name.startswith(begin)]:
            tensors[f"mtp.layers.0.{name.removeprefix(begin)}"] = tensors.pop(name)
        names = ("mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
    else:
        before = f"model.layers.{number}"
        names = (f"{before}.eh_proj", f"{before}.enorm", f"{before}.hnorm", f"{before}.shared_head.norm")
    for name, tensor in zip(names, (fused, *norms), strict=True):
        tensors[f"{name}.weight"] = tensor


def gemma4(size: Size, folder: Path, *, ordered: bool = False, seed: int = 0) -> tuple[Path, Path]:
    """Checkpoints of a Gemma 4 target and of its assistant.

    Args:
        ordered: Whether the assistant looks at the tokens of its best clusters only.
    """
    heads = size.mixed | {"global_head_dim": 16, "num_kv_shared_layers": size.layers}
    kinds = {"num_hidden_layers": 2 * size.layers, "layer_types": 2 * size.mixed["layer_types"]}
    given = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": size.vocab}
    none = dict.fromkeys(given, 0)
    target = AutoModelForCausalLM.from_config(Gemma4TextConfig(**(heads | kinds | given)))
    weakened(target, size.strength, seed)
    inner = Gemma4TextConfig(**heads, **none)
    clusters = {"use_ordered_embeddings": ordered, "num_centroids": 8, "centroid_intermediate_top_k": 3}
    config = Gemma4AssistantConfig(text_config=inner, backbone_hidden_size=size.hidden, **clusters)
    with layers_that_share(Gemma4TextConfig):
        own = weakened(AutoModelForCausalLM.from_config(config), size.strength, seed + 1)
    with torch.no_grad():
        # Its guesses follow the target's embedding of the last token.
        eye, noise = torch.eye(size.hidden), torch.Generator().manual_seed(seed)
        own.pre_projection.weight[:, : size.hidden] = eye
        own.pre_projection.weight[:, size.hidden :] *= 0.1
        own.lm_head.weight.copy_(target.lm_head.weight)
        if ordered:
            own.masked_embedding.token_ordering.copy_(torch.randperm(size.vocab, generator=noise))
    own.generation_config.num_assistant_tokens = NUM_ASSISTANT_TOKENS
    target.save_pretrained(folder / "target")
    own.save_pretrained(folder / "assistant")
    return folder / "target", folder / "assistant"


def muse_glimmer(size: Size, folder: Path, *, block_size: int = 4, seed: int = 0) -> tuple[PreTrainedModel, Path]:
    """A Muse Glimmer target and a checkpoint of its assistant. No `AutoModelForCausalLM` opens the target."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MuseGlimmerConfig(
        text_config={**size.mixed, "model_type": "muse_glimmer_text"},
        vision_config=vision,
        out_hidden_size=32,
        projector_hidden_size=32,
        image_token_id=size.vocab - 2,
        video_token_id=size.vocab - 3,
    )
    target = weakened(AutoModelForImageTextToText.from_config(config), size.strength, seed)
    own = size.mixed | {"block_size": block_size, "mask_token_id": size.vocab - 1, "target_layer_ids": [0]}
    own.pop("vocab_size")
    assistant = weakened(AutoModel.from_config(MuseGlimmerAssistantConfig(**own)), size.strength, seed + 1)
    assistant.save_pretrained(folder)
    return target, folder


def weakened(model: PreTrainedModel, strength: float, seed: int) -> PreTrainedModel:
    """The model with random weights; what its layers add is multiplied by `strength`."""
    scrambled(model.eval(), seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(ADDING):
                weight.mul_(strength)
    return model
