"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTROL, NORMAL = 3, 1
"""Kinds of tokens: special ones, and others."""


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    kind: str = "F32",
    ends: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Write a Llama or Qwen2 model.

    Args:
        kind: The kind of the blocks of all matrices; norms and biases are F32.
        ends: Tokens that end a text (`eos`) or a turn (`eot`).
    """
    config = model.config
    name, layers = config.model_type, config.num_hidden_layers
    writer = gguf.GGUFWriter(file, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for end, id in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{end}_token_id", id)
    names = gguf.get_tensor_name_map({"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[name], layers)
    blocks = gguf.GGMLQuantizationType[kind]
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "llama" and ".q_proj." in key:
            tensor = _interleaved(tensor, config.num_attention_heads)
        if name == "llama" and ".k_proj." in key:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        values = tensor.to(torch.float32).numpy()
        place = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if values.ndim == 1 or kind == "F32":
            writer.add_tensor(place, values)
        else:
            writer.add_tensor(place, gguf.quants.quantize(values, blocks), raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """A projection whose rows are in the order that llama.cpp's rotation of pairs of neighbours needs."""
    halves = weight.view(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerBase) -> None:
    """A byte-level tokenizer with its chat template."""
    tokens = {id: token for token, id in tokenizer.get_vocab().items()}
    special = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([tokens[id] for id in range(len(tokens))])
    writer.add_token_types([CONTROL if id in special else NORMAL for id in range(len(tokens))])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    for add, id in (
        (writer.add_bos_token_id, tokenizer.bos_token_id),
        (writer.add_eos_token_id, tokenizer.eos_token_id),
        (writer.add_pad_token_id, tokenizer.pad_token_id),
    ):
        if id is not None:
            add(id)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
