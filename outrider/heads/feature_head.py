"""What heads share that go on with features of their own (EAGLE and its kin)."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outrider.core.types import InputError
from outrider.heads.files import MOST_COUNT, size
from outrider.heads.layers import Rotary
from outrider.lm.head import KVCache
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.open import reason_of

KNOWN = ("llama", "qwen3", "qwen2", "mistral", "mixtral")
"""The types of decoder layers that heads are made of. A head of a Mixtral has a plain layer, without experts."""
FAR = 1 << 20
"""A position far behind any context, at which rotary settings are tried."""
LEFT_OUT = ("t2d",)
"""Tensors of checkpoints that drafting does not read."""


class FeatureHead(nn.Module):
    r"""Reads pairs of a token and a feature, and outputs a feature for the next pair.

    The pair at $t$ is $(x_{t+1}, g_t)$. `fuse` makes $g_t$ from the target's hidden states; behind the target's last
    position it is `next_feature` of what the head output at the pair before. `logits` guesses $x_{t+2}$ from what the
    head outputs at $t$.

    Attributes:
        config: The sizes of its layers.
        ends: The target's embedding, final norm and output layer.
        feature_size: Width of the features.
        vocab_size: Width of the logits.
        embed_tokens: Its own embedding; None takes the target's.
        layers: Its decoder layers.
        specialists: The decoder layers of further specialists, which replace `layers` in later draft steps (PosS).
        stride: Draft steps of each specialist but the last.

    Args:
        own_embedding: Whether it has an embedding of its own.
    """

    layers: nn.ModuleList

    def __init__(
        self, config: PreTrainedConfig, ends: EmbeddingAndHead, *, vocab_size: int, own_embedding: bool
    ) -> None:
        super().__init__()
        if (act := getattr(config, "hidden_act", "silu")) not in ("silu", "swish"):
            raise InputError(f"heads with the activation {act!r} are not known; known is silu")
        self.config, self.ends = config, ends
        self.feature_size, self.vocab_size = config.hidden_size, vocab_size
        self.rotary = Rotary(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if own_embedding else None
        self.specialists, self.stride = nn.ModuleList(), 1

    @abstractmethod
    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        """Features from the tapped states of the target, side by side."""

    @abstractmethod
    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        """What is output at each pair."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        """Logits of the next token."""

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The feature that a draft token is read with, from what was output before it; by default the same."""
        return head_output

    def digest(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        cache: KVCache,
    ) -> None:
        """Store the keys and values of pairs whose outputs nobody needs. The head has one layer."""
        raise NotImplementedError(f"{type(self).__name__} cannot have specialists")

    def specialise(self, count: int, stride: int) -> None:
        """Become `count` specialists, whose layers are copies of these.

        Raises:
            InputError: A number is too small, or there are several layers.
        """
        if count < 1 or stride < 1:
            raise InputError(f"specialists and their draft steps must be >= 1, got {count} and {stride}")
        if len(self.layers) != 1:
            raise InputError(f"a head with specialists has one layer, and this one has {len(self.layers)}")
        self.specialists = nn.ModuleList(copy.deepcopy(self.layers) for _ in range(count - 1))
        self.stride = stride

    def specialist(self, step: int) -> int:
        """The number of the specialist of a draft step. Both are counted from 0."""
        return min(step // self.stride, len(self.specialists))

    def reader(self, number: int) -> "FeatureHead":
        """This head with the layers of a specialist. All else is shared with it."""
        if number == 0:
            return self
        twin = copy.copy(self)
        twin._modules = {**self._modules, "layers": self.specialists[number - 1]}
        return twin

    def target_logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """Logits by the target's output layer, in the target's dtype."""
        return self.ends.logits(hidden)

    def embed(self, tokens: Int[Tensor, "rows width"], like: Float[Tensor, "..."]) -> Float[Tensor, "rows width dim"]:
        """Embeddings of tokens, in the dtype and on the device of another tensor."""
        if self.embed_tokens is not None:
            found: Tensor = self.embed_tokens(tokens)
            return found
        return self.ends.embed(tokens).to(like.device, like.dtype)


def layer_config(given: Mapping[str, Any], path: str) -> PreTrainedConfig:
    """The config of a head's layers, with the defaults of its `model_type`.

    Raises:
        InputError: The type is not known, transformers refuses the config, or a size makes no sense.
    """
    kind = str(given.get("model_type") or "llama")
    if kind not in KNOWN:
        raise InputError(f"the head in {path} is made of layers of the type {kind!r}; known are {', '.join(KNOWN)}")
    return made_config(kind, given, path)


def made_config(kind: str, given: Mapping[str, Any], path: str, *, least_vocab: int = 1) -> PreTrainedConfig:
    """The config of layers of a type.

    Args:
        least_vocab: Fewest tokens that it must name.

    Raises:
        InputError: transformers refuses the config, or a size makes no sense.
    """
    left = {name: value for name, value in given.items() if name not in ("model_type", "architectures", "auto_map")}
    try:
        config = AutoConfig.for_model(kind, **left)
    except Exception as error:
        raise InputError(f"the config of the head in {path} is refused by transformers: {reason_of(error)}") from error
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    found = {name: getattr(config, name, None) for name in (*names, "num_hidden_layers", "vocab_size", "head_dim")}
    width, _, heads, shared = (size(found, name, path) for name in names)
    size(found, "num_hidden_layers", path, most=MOST_COUNT)
    size(found, "vocab_size", path, least=least_vocab)
    dim = size(found, "head_dim", path, default=width // heads)
    if heads % shared or dim % 2:
        raise InputError(
            f"the config of {path} has {heads} attention heads of width {dim} for {shared} key heads; the first number "
            "must be a multiple of the last, and the width even"
        )
    eps = getattr(config, "rms_norm_eps", None)
    if type(eps) not in (int, float) or not 0 <= eps < math.inf:
        raise InputError(f"rms_norm_eps in the config of {path} must be a number >= 0, got {eps!r}")
    _check_rotary(config, dim, path)
    return config


def _check_rotary(config: PreTrainedConfig, dim: int, path: str) -> None:
    """Raise InputError if the rotary settings of a config cannot be used."""
    settings = getattr(config, "rope_parameters", None)
    kind = settings.get("rope_type", "default") if isinstance(settings, Mapping) else "default"
    if not isinstance(kind, str) or kind not in ("default", *ROPE_INIT_FUNCTIONS):
        raise InputError(
            f"the config of {path} has the rope_type {kind!r}; known are default, {', '.join(ROPE_INIT_FUNCTIONS)}"
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


def described(config: PreTrainedConfig) -> dict[str, Any]:
    """A layer config for a JSON file that versions 4 and 5 of transformers read."""
    found = {name: value for name, value in config.to_dict().items() if value is not None}
    for name in ("_name_or_path", "transformers_version", "architectures", "dtype"):
        found.pop(name, None)
    rope = found.get("rope_parameters") or {}
    if rope.get("rope_type", "default") == "default":
        found |= {"rope_theta": rope.get("rope_theta", 10000.0), "rope_scaling": None}
    return {**found, "model_type": config.model_type}


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
    own = tensors.get("embed_tokens.weight")
    if own is None or own.dim() != 2:
        return tensors
    for begin in range(0, len(own), 4096):
        rows = own[begin : begin + 4096]
        try:
            theirs = embed(torch.arange(begin, begin + len(rows), device=device))
        except (IndexError, RuntimeError):
            return tensors
        if theirs.shape != rows.shape or not torch.equal(theirs.to("cpu", rows.dtype), rows):
            return tensors
    return {name: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"}
