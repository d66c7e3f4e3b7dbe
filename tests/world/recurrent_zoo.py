"""Tiny random hybrid and recurrent causal LMs, seeded and in float64."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Mamba2Config,
    MambaConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
    ZambaConfig,
)

from tests.world.zoo import VOCAB, scrambled

_BODY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 384,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED: dict[str, Any] = {"layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
_CONV: dict[str, Any] = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_DELTA: dict[str, Any] = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_value_heads": 4}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "mamba_expand": 2,
}
_MAMBA: dict[str, Any] = {"state_size": 8, "time_step_rank": 4, "expand": 2}

_ROWS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3_next": (
        Qwen3NextConfig,
        _MIXED
        | _DELTA
        | _EXPERTS
        | {"head_dim": 8, "linear_num_key_heads": 2, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 2},
    ),
    "qwen3_5": (Qwen3_5TextConfig, _MIXED | _DELTA | {"head_dim": 8, "linear_num_key_heads": 2}),
    "olmo_hybrid": (OlmoHybridConfig, _MIXED | _DELTA | {"linear_num_key_heads": 4}),
    "kimi_linear": (
        KimiLinearConfig,
        _MIXED
        | _EXPERTS
        | {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "mamba2": (
        Mamba2Config,
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 8},
    ),
    "falcon_h1": (FalconH1Config, _MAMBA2 | {"mamba_d_ssm": 32, "mamba_n_heads": 4}),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        _MIXED | _MAMBA2 | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16},
    ),
    "bamba": (BambaConfig, _MAMBA2 | {"attn_layer_indices": [2]}),
    "nemotron_h": (
        NemotronHConfig,
        {
            "head_dim": 8,
            "layers_block_type": ["mamba", "moe", "attention", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
        },
    ),
    "zamba2": (
        Zamba2Config,
        {
            "layers_block_type": ["mamba", "hybrid", "mamba", "mamba"],
            "mamba_d_state": 8,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "chunk_size": 8,
            "mamba_headdim": 16,
            "num_key_value_heads": 4,
            "num_mem_blocks": 1,
        },
    ),
    "lfm2": (Lfm2Config, _CONV | {"block_multiple_of": 8}),
    "lfm2_moe": (Lfm2MoeConfig, _CONV | _EXPERTS | {"num_dense_layers": 1}),
    "jamba": (
        JambaConfig,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
    ),
    "zamba": (
        ZambaConfig,
        {
            "num_hidden_layers": 6,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "mamba", "mamba"],
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
            "num_key_value_heads": 4,
        },
    ),
    "mamba": (MambaConfig, _MAMBA),
    "falcon_mamba": (FalconMambaConfig, _MAMBA),
    "recurrent_gemma": (
        RecurrentGemmaConfig,
        {
            "head_dim": 8,
            "lru_width": 32,
            "attention_window_size": 8,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
    ),
}

RECURRENT = list(_ROWS)
"""Names that `tiny_recurrent` knows."""


def recurrent_config(name: str) -> PreTrainedConfig:
    """The config of one tiny model."""
    kind, own = _ROWS[name]
    return kind(**(_BODY | own))


def tiny_recurrent(name: str, *, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """A tiny model of an architecture, in float64, whose logits are far from flat."""
    named = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(recurrent_config(name), experts_implementation="eager", **named)
    return scrambled(model.double().eval(), seed)
