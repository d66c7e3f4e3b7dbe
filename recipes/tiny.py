"""Tiny random models of every causal LM architecture that transformers knows, in float64."""

import copy
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 64
"""Every model's vocabulary."""
MODEL_TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
"""Every model type that `AutoModelForCausalLM` opens."""

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("input_embedding_size", "output_embedding_size", "lru_width", "mamba_d_ssm"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "dff", "n_inner", "ffn_hidden_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dense_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "linear_num_heads", "linear_num_value_heads", "n_mamba_heads"), 4),
    **dict.fromkeys(("head_dim", "linear_head_dim", "linear_key_head_dim", "linear_value_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "global_head_dim", "mamba_d_head", "mamba_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("kv_channels", "query_pre_attn_scalar", "swa_v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 384),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size", "q_lora_rank"), 16),
    **dict.fromkeys(("kv_lora_rank", "router_hidden_size"), 16),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers", "moe_layer_interval"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size", "window_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "adapter_rank", "laurel_rank"), 4),
    **dict.fromkeys(("hidden_size_per_layer_input", "block_multiple_of"), 8),
    "attn_logit_softcapping": 2.0,
    "local_attention": 8,
    "use_sliding_window": True,
    "use_mamba_kernels": False,
    "max_window_layers": 2,
    "moe_layer_end_index": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Values for the settings that a config has."""

_GEMMA4: dict[str, Any] = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
        "layer_types": ["full_attention"] * 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 2.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {"vision_config": {"adapter_out_dim": 32}, "audio_config": {"adapter_out_dim": 32}},
    "falcon_h1": {"mamba_n_heads": 4},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_assistant": {
        "text_config": {
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 4,
        }
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "granitemoehybrid": {"layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "hrm_text": {"num_layers_per_stack": 1, "L_cycles": 2, "num_hidden_layers": 6},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
}
"""Further settings that single model types need."""
_START: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
"""Settings without which a default config is not valid."""
_SPARED = {
    "dots3_note": ("vision_config", "audio_config"),
    "falcon": ("head_dim",),
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    "xlstm": ("head_dim", "v_head_dim"),
}
"""Settings that are derived from other settings."""


class Float64(TorchFunctionMode):
    """Inside it, nothing is computed in a lower floating type. transformers casts to float32 in norms, softmaxes,
    rotary tables and routers. This would hide small errors, and two ways to compute one value would differ.
    """

    def __enter__(self) -> "Float64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.set_default_dtype(self._default)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(_widened, args), **{k: _widened(v) for k, v in (kwargs or {}).items()})


def _widened(value: object) -> object:
    low = (torch.float32, torch.float16, torch.bfloat16)
    return torch.float64 if isinstance(value, torch.dtype) and value in low else value


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """The config of a tiny model that has a layer of every kind that the architecture has by default.

    Args:
        model_type: One of `MODEL_TYPES`, or of a model of text and images.
        changes: Further settings of the language model.
    """
    kind = CONFIG_MAPPING[model_type]
    start = kind(**_START.get(model_type, {}))
    given, own = _shrunk(start), OWN.get(model_type, {})
    text = start.get_text_config(decoder=True)
    if "text_config" not in given:
        return kind(**(given | own | changes))
    inner = given["text_config"] | OWN.get(text.model_type, {}) | own.get("text_config", {}) | changes
    return kind(**(given | own | {"text_config": inner}))


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Small values for a config's settings: sizes, and per-layer lists that keep each of their values."""
    spared = _SPARED.get(config.model_type, ())
    given = {name: v for name, v in _SMALL.items() if _setting(config, name) is not None and name not in spared}
    heads, shared = (_setting(config, name) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads is not None and heads == shared:
        given["num_key_value_heads"] = given["num_attention_heads"]
    if "qk_rope_head_dim" in given and "head_dim" in given:
        given["head_dim"] = given["qk_rope_head_dim"]
    if getattr(config, "is_decoder", None) is False and not config.is_encoder_decoder:
        given["is_decoder"] = True
    layers = getattr(config, "num_hidden_layers", None)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and layers and len(value) == layers:
            kinds = [v for i, v in enumerate(value) if v not in value[:i]]
            given[name] = [kinds[i % len(kinds)] for i in range(4)]
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None and name not in spared:
            given[name] = _shrunk(inner) | {"model_type": inner.model_type}
    return given


def _setting(config: PreTrainedConfig, name: str) -> Any:
    """A setting, or a large number if it differs by layer, so that it counts as present and is shrunk."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return 1 << 20


def tiny_model(config: PreTrainedConfig, *, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A model with random weights in float64 and evaluation mode, whose logits are far from flat."""
    named = {} if attention is None else {"attn_implementation": attention}
    kind = AutoModelForCausalLM if config.model_type in MODEL_TYPES else AutoModelForImageTextToText
    model = kind.from_config(config, experts_implementation="eager", **named)
    return scrambled(model.double().eval(), seed)


def scrambled(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """The model with random weights: matrices that keep or raise the size of their input, and vectors close to their
    old values.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.add_(noise * 0.1)
    return model


def noisy(model: PreTrainedModel, noise: float = 0.02) -> PreTrainedModel:
    """A copy with some noise on its weights: it often agrees with the model, but not always."""
    twin, generator = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.dim() > 1:
                weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return twin
