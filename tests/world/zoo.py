"""Tiny random causal LMs of many architectures, seeded and in float64."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Cohere2Config,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from recipes.tiny import VOCAB, scrambled

_BODY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, Any] = {"head_dim": 8}
_MIXED: dict[str, Any] = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

_ROWS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_hidden_layers": 3}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, _HEADS),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "gemma2": (Gemma2Config, _HEADS | _MIXED | {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0}),
    "gemma3": (Gemma3TextConfig, _HEADS | _MIXED | {"query_pre_attn_scalar": 8}),
    "gpt2": (GPT2Config, {}),
    "opt": (OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "bloom": (BloomConfig, {"n_layer": 2, "n_head": 4}),
    "phi3": (Phi3Config, {"sliding_window": 8}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        _HEADS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    ),
    "qwen2_mixed": (Qwen2Config, _MIXED | {"use_sliding_window": True}),
    "gpt_oss": (GptOssConfig, _HEADS | _MIXED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere2": (Cohere2Config, _MIXED),
    "falcon": (FalconConfig, {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False}),
    "llama4": (
        Llama4TextConfig,
        _HEADS
        | {
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
        },
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
        },
    ),
    "gemma3n": (
        Gemma3nTextConfig,
        _HEADS
        | {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
        },
    ),
}

ARCHITECTURES = list(_ROWS)
"""Names that `tiny` knows."""

_EAGER = ("gemma2", "gpt_oss", "bloom")


def tiny_config(name: str) -> PreTrainedConfig:
    """The config of one tiny model."""
    kind, own = _ROWS[name]
    return kind(**(_BODY | own))


def attention_of(name: str) -> str:
    """The attention implementation that an architecture needs; older transformers choose another for some."""
    return "eager" if name in _EAGER else "sdpa"


def tiny(name: str, *, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny model of an architecture, in float64, whose logits are far from flat."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(name), attn_implementation=attention or attention_of(name), experts_implementation="eager"
        )
    return scrambled(model.double().eval(), seed)
