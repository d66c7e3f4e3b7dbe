"""GGUF files of tiny models, as llama.cpp's converter writes them."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.lm.weights.blocks import KINDS

CONTROL, NORMAL = 3, 1
"""Kinds of tokens: special ones, and others."""


def write_gguf(
    file: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    kind: str = "F32",
    kinds: Mapping[str, str] = MappingProxyType({}),
    ends: Mapping[str, int] = MappingProxyType({}),
) -> Path:
    """Write a Llama, Qwen2 or Gemma3 model.

    Args:
        kind: The kind of the blocks of all matrices; norms and biases are F32. Where `gguf` cannot make such blocks,
            they are random.
        kinds: The kinds of the matrices whose names in the file have this text in them.
        ends: Tokens that end a text (`eos`) or a turn (`eot`).
    """
    config = model.config
    name, layers = config.model_type.removesuffix("_text"), config.num_hidden_layers
    writer = gguf.GGUFWriter(file, name)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    rotary = config.rope_parameters
    writer.add_rope_freq_base(rotary.get("full_attention", rotary)["rope_theta"])
    if name == "gemma3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    if tokenizer is not None:
        _add_tokenizer(writer, tokenizer)
    for end, id in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{end}_token_id", id)
    [architecture] = [each for each, known in gguf.MODEL_ARCH_NAMES.items() if known == name]
    names = gguf.get_tensor_name_map(architecture, layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name == "llama" and ".q_proj." in key:
            tensor = _interleaved(tensor, config.num_attention_heads)
        if name == "llama" and ".k_proj." in key:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        values = tensor.to(torch.float32).numpy()
        if name == "gemma3" and "norm" in key:
            values = values + 1
        place = names.get_name(key, try_suffixes=(".weight", ".bias"))
        wanted = next((each for part, each in kinds.items() if part in place), kind)
        if values.ndim == 1 or wanted == "F32":
            writer.add_tensor(place, values)
        else:
            blocks = gguf.GGMLQuantizationType[wanted]
            try:
                content = gguf.quants.quantize(values, blocks)
            except NotImplementedError:
                content = random_blocks(wanted, *values.shape, seed=len(place) + sum(place.encode()))
            writer.add_tensor(place, content, raw_dtype=blocks)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def random_blocks(
    kind: str, rows: int, features: int, *, seed: int = 0, spread: float = 0.1
) -> UInt8[np.ndarray, "rows bytes"]:
    """Blocks of a file whose weights are random, around zero, with this standard deviation."""
    layout = KINDS[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (rows, features // layout.weights, layout.size), np.uint8)
    half = float(2**layout.bits - 1) / 2

    def scaled(scale: float) -> UInt8[np.ndarray, "rows bytes"]:
        scales = np.array([scale, half * scale if layout.weights > 32 else -half * scale][: layout.halves], np.float16)
        place = slice(-2, None) if kind == "Q6_K" else slice(0, 2 * layout.halves)
        blocks[..., place] = scales.view(np.uint8)
        return blocks.reshape(rows, -1)

    unit = gguf.quants.dequantize(scaled(1.0), gguf.GGMLQuantizationType[kind])
    return scaled(spread / float(unit.std()))


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
    writer.add_token_scores([0.0] * len(tokens))
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
