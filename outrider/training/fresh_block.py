"""Heads that guess blocks, ready to learn: new ones of the sizes that fit a target, and ones on disk."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, Qwen3Config

from outrider.core.types import InputError
from outrider.heads.blocks import HEADS, read_block
from outrider.heads.dflash import BlockConfig, DFlash, Method, spread_taps
from outrider.heads.dspark import MarkovHead
from outrider.lm.hf.anatomy import Anatomy, rotary_parameters
from outrider.lm.hf.embedding_and_head import find_embedding_and_head
from outrider.lm.hf.open import logit_width

LAYERS: dict[str, int] = {"dflash": 5, "dflare": 7, "dspark": 5}
"""Layers of the published heads."""
NUM_TAPS: dict[str, int] = {"dflash": 5, "dflare": 9, "dspark": 5}
"""Hidden states that the published heads read."""
BLOCKS: dict[str, int] = {"dflash": 8, "dflare": 8, "dspark": 7}
"""Positions of a block, by default."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a new head that a user may choose; None takes those of the published heads.

    Attributes:
        method: Which head.
        layers: Decoder layers.
        block_size: Positions of a block, the anchor's included.
        taps: The target's hidden states that it reads.
        mask_token_id: The token that stands for an unknown token; None chooses one that texts do not have, if there is
            one.
        markov: The kind of sequential head, of dspark.
        markov_rank: Its width.
        confidence: Whether it has a confidence head, of dspark.
    """

    method: Method
    layers: int | None = None
    block_size: int | None = None
    taps: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    markov: str = "vanilla"
    markov_rank: int = 256
    confidence: bool = True


def fresh_head(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, shape: Shape, *, seed: int = 0
) -> DFlash:
    """A new head in float32, on the target's device. Its layers are as wide as the target's.

    Raises:
        InputError: A size does not fit, or the target is of a kind whose hidden states or ends cannot be read.
    """
    anatomy = Anatomy.of(target)
    ends = find_embedding_and_head(target, anatomy)
    taps = spread_taps(anatomy.num_layers, NUM_TAPS[shape.method]) if shape.taps is None else shape.taps
    if max(taps) > anatomy.num_layers:
        raise InputError(
            f"taps must be in 0..{anatomy.num_layers}, the number of the target's layers, got {list(taps)}"
        )
    mask_id = unknown_token(target, tokenizer) if shape.mask_token_id is None else shape.mask_token_id
    known = target.get_input_embeddings().weight.shape[0]
    if not 0 <= mask_id < known:
        raise InputError(f"mask_token_id must be in 0..{known - 1}, the target's tokens, got {mask_id}")
    count = LAYERS[shape.method] if shape.layers is None else shape.layers
    config = BlockConfig(
        method=shape.method,
        layers=layers_like(anatomy.text, count, max(known, logit_width(target))),
        block_size=BLOCKS[shape.method] if shape.block_size is None else shape.block_size,
        mask_id=mask_id,
        taps=tuple(taps),
        target_size=anatomy.hidden_size,
        from_anchor=shape.method == "dspark",
        apart=shape.method == "dflare",
        markov=shape.markov,
        markov_rank=shape.markov_rank if shape.method == "dspark" else 0,
        confidence="markov" if shape.method == "dspark" and shape.confidence else None,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        head = HEADS[shape.method](config, ends, logit_width(target))
        for module in head.modules():
            if isinstance(module, nn.Linear):
                # As large as trained ones: with smaller ones the mask's own embedding drowns what layers add to it.
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for module in head.modules():
            if isinstance(module, MarkovHead):
                # The head begins as one without it.
                nn.init.zeros_(module.markov_w2.weight)
    return head.float().to(target.device)


def known_head(path: str, target: PreTrainedModel, method: Method) -> DFlash:
    """A head on disk, in float32, on the target's device.

    Raises:
        InputError: There is none, or it is another one, or of another target, or has an output layer of its own.
    """
    ends = find_embedding_and_head(target, Anatomy.of(target))
    head = read_block(path, lambda: ends, logit_width(target))
    if head.method != method:
        raise InputError(f"the head in {path} is a {head.method} head; use outrider train {head.method}")
    if head.config.num_outputs is not None:
        raise InputError(
            f"the head in {path} has an output layer of its own, and only heads that use their target's can be trained "
            "further"
        )
    if head.config.num_embeddings is not None:
        head.embed_tokens.requires_grad_(False)
    return head.float().to(target.device)


def layers_like(text: PreTrainedConfig, num_layers: int, vocab_size: int) -> PreTrainedConfig:
    """The config of decoder layers that are as wide as a target's.

    Args:
        text: The target's text config.
        vocab_size: Rows of the target's embedding.
    """
    heads = getattr(text, "num_attention_heads", None) or max(1, text.hidden_size // 64)
    inner = getattr(text, "intermediate_size", None)
    rotary: dict[str, Any] = next(iter(rotary_parameters(text)), {})
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=inner if isinstance(inner, int) else 4 * text.hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-6,
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 1 << 15,
        rope_parameters={"rope_type": "default", "rope_theta": float(rotary.get("rope_theta") or 10000.0)},
        tie_word_embeddings=False,
    )


def unknown_token(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """A token that can stand for an unknown one: the tokenizer's mask, else one behind its last, else its padding or
    its unknown token, else token 0.
    """
    if tokenizer is None:
        return 0
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    behind = max(tokenizer.get_vocab().values()) + 1
    if behind < target.get_input_embeddings().weight.shape[0]:
        return behind
    return next((int(i) for i in (tokenizer.pad_token_id, tokenizer.unk_token_id) if i is not None), 0)
