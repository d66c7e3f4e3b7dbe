"""What heads share that go on with features of their own (EAGLE and its variants)."""

import copy
import math
from collections.abc import Callable, Mapping
from reprlib import repr as short
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.core.types import InputError
from outrider.heads.doubt import Doubt
from outrider.heads.parts.layers import Rotary
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.checkpoint import MOST_COUNT, size
from outrider.lm.hf.open import reason_of

KNOWN = ("llama", "qwen3", "qwen2", "mistral", "mixtral")
"""The types of decoder layers that heads are made of. A head of a Mixtral has a plain layer, without experts."""
FAR = 1 << 20
"""A position far behind any context, at which rotary settings are tried."""
LEFT_OUT = ("t2d",)
"""Tensors of checkpoints that drafting does not read."""


def layer_config(config: Mapping[str, Any], path: str) -> PreTrainedConfig:
    """The config of a head's layers, with the defaults of its `model_type`.

    Raises:
        InputError: The type is not known, transformers refuses the config, or a size makes no sense.
    """
    kind = str(config.get("model_type") or "llama")
    if kind not in KNOWN:
        raise InputError(
            f"the head in {path} is made of layers of the type {short(kind)}; known are {', '.join(KNOWN)}"
        )
    return made_config(kind, config, path)


def made_config(kind: str, fields: Mapping[str, Any], path: str, *, least_vocab: int = 1) -> PreTrainedConfig:
    """The config of layers of a type.

    Args:
        least_vocab: Fewest tokens that it must name.

    Raises:
        InputError: transformers refuses the config, or a size makes no sense.
    """
    left = {name: value for name, value in fields.items() if name not in ("model_type", "architectures", "auto_map")}
    try:
        config = AutoConfig.for_model(kind, **left)
    except Exception as error:
        raise InputError(f"the config of the head in {path} is refused by transformers: {reason_of(error)}") from error
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = {name: getattr(config, name, None) for name in (*names, "num_hidden_layers", "vocab_size", "head_dim")}
    width, _, heads, shared = (size(sizes, name, path) for name in names)
    size(sizes, "num_hidden_layers", path, most=MOST_COUNT)
    size(sizes, "vocab_size", path, least=least_vocab)
    dim = size(sizes, "head_dim", path, default=width // heads)
    if heads % shared or dim % 2:
        raise InputError(
            f"the config of {path} has {heads} attention heads of width {dim} for {shared} key heads; the first number "
            "must be a multiple of the last, and the width even"
        )
    eps: Any = getattr(config, "rms_norm_eps", None)
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        raise InputError(f"rms_norm_eps in the config of {path} must be a number >= 0, got {short(eps)}")
    _check_rotary(config, dim, path)
    return config


def _check_rotary(config: PreTrainedConfig, dim: int, path: str) -> None:
    """Raise InputError if the rotary settings of a config cannot be used."""
    settings = getattr(config, "rope_parameters", None)
    kind = settings.get("rope_type", "default") if isinstance(settings, Mapping) else "default"
    if not isinstance(kind, str) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise InputError(
            f"the config of {path} has the rope_type {short(kind)}; known are default, {', '.join(ROPE_INIT_FUNCTIONS)}"
        )
    try:
        turned = Rotary(config)(torch.zeros(1, 2, 1), torch.tensor([[0, FAR]]))
    except Exception as error:
        raise InputError(f"the rotary settings in the config of {path} cannot be used: {reason_of(error)}") from error
    if turned.shape[-1] != dim or not turned.isfinite().all():
        raise InputError(
            f"the rotary settings in the config of {path} turn {turned.shape[-1]} of {dim} numbers of a head, or make "
            "values that are not numbers; get the config that belongs to the head"
        )


def usual_layer(anatomy: Anatomy, *, vocab_size: int, intermediate_size: int | None = None) -> LlamaConfig:
    """The config of one Llama layer as wide as a target's.

    Args:
        intermediate_size: Width of its feed-forward; None: the target's.
    """
    text, size = anatomy.text, anatomy.hidden_size
    heads = int(text.num_attention_heads)
    inner = intermediate_size or getattr(text, "intermediate_size", None)
    rope = getattr(text, "rope_parameters", None) or {}
    theta = rope.get("rope_theta", 10000.0) if "rope_theta" in rope else 10000.0
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size,
        intermediate_size=inner if isinstance(inner, int) else 4 * size,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or size // heads,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=anatomy.longest_context or 1 << 15,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        tie_word_embeddings=False,
    )


def rotary_base(config: PreTrainedConfig) -> float | None:
    """The base of the rotary positions of a config; None where it has none, or one per layer type."""
    rope: Any = getattr(config, "rope_parameters", None) or {}
    theta = rope.get("rope_theta")
    return float(theta) if isinstance(theta, int | float) else None


def rotary_doubts(head: Any, config: PreTrainedConfig, target: PreTrainedConfig | None) -> list[Doubt]:
    """The doubt whether a head has the target's rotary positions; none where it has them.

    Args:
        head: Has a module `rotary`.
        config: The config of its layers.
        target: The target's text config.
    """
    ours, theirs = rotary_base(config), None if target is None else rotary_base(target)
    if target is None or theirs is None or ours == theirs:
        return []
    other = copy.deepcopy(config)
    other.rope_parameters = {"rope_type": "default", "rope_theta": theirs}
    return [
        Doubt(
            about="rotary base",
            means=f"its rotary base is {ours:g} and the target's is {theirs:g}" if ours else "it has no rotary base",
            advice=f"write rope_theta {theirs:g} into its config",
            changes=[(head, "rotary", Rotary(other))],
        )
    ]


def described(config: PreTrainedConfig) -> dict[str, Any]:
    """A layer config for a JSON file that versions 4 and 5 of transformers read."""
    fields = {name: value for name, value in config.to_dict().items() if value is not None}
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        fields.pop(name, None)
    rope = fields.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default":
        fields |= {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": None}
    return {**fields, "model_type": config.model_type}


def qkv_bias_of(tensors: Mapping[str, Tensor]) -> bool | None:
    """Whether queries, keys and values alone have biases, as `Attention` takes it."""
    biased = any(name.endswith("self_attn.q_proj.bias") for name in tensors)
    return None if any(name.endswith("self_attn.o_proj.bias") for name in tensors) else biased


def without_copies(
    tensors: dict[str, Tensor], embed: Callable[[Int[Tensor, " n"]], Float[Tensor, "n dim"]], device: torch.device
) -> dict[str, Tensor]:
    """The tensors without an embedding that is the target's, so that it is not in memory twice.

    Args:
        embed: The target's embedding.
        device: Where it is.
    """
    table = tensors.get("embed_tokens.weight")
    if table is None or table.dim() != 2:
        return tensors
    for begin in range(0, len(table), 4096):
        rows = table[begin : begin + 4096]
        try:
            theirs = embed(torch.arange(begin, begin + len(rows), device=device))
        except (IndexError, RuntimeError):
            return tensors
        if theirs.shape != rows.shape or not torch.equal(theirs.to("cpu", rows.dtype), rows):
            return tensors
    return {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
