"""The facts about a model that slots and masks need, read from its config and its modules once.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23):

- `config.get_text_config(decoder=True)` is the config of the part that generates text;
- `config._attn_implementation` names the attention in use: "sdpa", "eager", "flex_attention", or None in a bare config;
- `layer_types` in a text config names the kind of every layer; a model whose text config has it takes a dict of masks;
- `sliding_window`: a query at position t sees keys at positions above t - window; a model without layer types has such
  layers if its decoder's module imports `create_sliding_window_causal_mask` (for chunks: `create_chunked_causal_mask`);
- `attention_chunk_size`: a query sees keys of its own chunk of positions only (Llama 4);
- `_is_stateful` marks classes with recurrent layers;
- decoder layers stand in one `nn.ModuleList` below `model.get_decoder()` or `model.base_model`.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""The layer types whose masks are known here."""
RECURRENT_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba")
"""The layer types that keep a state; in a `hybrid` layer, attention stands beside it."""
NO_ATTENTION = ("linear_attention", "conv", "mamba", "moe", "mlp")
"""The layer types of hybrid models that keep no keys and values."""
STEPWISE = ("mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma")
"""Models that forget their state when it is continued by more than one token (their scans take no initial state)."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """How far a kind of layer looks back, in positions; all None looks back to the beginning.

    Attributes:
        window: A query at t sees positions above t - window.
        chunk: A query at t sees positions of chunk t // chunk only.
    """

    window: int | None = None
    chunk: int | None = None


Spans = Span | Mapping[str, Span | None]
"""One span for all attention layers, or one per layer type where the model takes a dict of masks; None needs none."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """A context beyond which a model does something that cannot be steered from outside.

    Attributes:
        tokens: The longest context without it.
        reason: What the model does beyond.
    """

    tokens: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """A model, as far as slots and masks need to know it.

    Attributes:
        config: The whole config.
        text: The config of the part that generates text.
        kind: The model's class; None where transformers knows no causal language model for the config.
        attention: The attention implementation in use; None in a config that has not chosen.
        num_layers: Decoder layers; 0 where the config does not say.
        hidden_size: Width of the residual stream; 0 where the config does not say.
        recurrent: Whether any layer keeps a state that is a fold over the text.
        stepwise: Whether a recurrent model is known to continue its state rightly by one token at a time only.
        clamps: Whether recurrent layers limit their time steps, which transformers forgets where one token continues a
            state; only a model tells.
        spans: How far attention layers look back; None where the model has none. Only a model tells: of a bare config
            without layer types this is not known, and every layer is taken to look back to the beginning.
        limits: Contexts beyond which the model cannot be steered.
        num_processes: Processes that the weights are spread over.
        layers: The decoder layers in order; None of a config, and where they do not stand in one list or run more than
            once.

    Example:
        >>> from transformers import LlamaConfig, Mamba2Config
        >>> Anatomy.of(Mamba2Config()).recurrent, Anatomy.of(LlamaConfig()).longest_context
        (True, 2048)
    """

    config: PreTrainedConfig
    text: PreTrainedConfig
    kind: type[PreTrainedModel] | None
    attention: str | None
    num_layers: int
    hidden_size: int
    recurrent: bool
    stepwise: bool
    clamps: bool
    spans: Spans | None
    limits: tuple[Limit, ...]
    num_processes: int
    layers: nn.ModuleList | None

    @classmethod
    def of(cls, model_or_config: PreTrainedModel | PreTrainedConfig) -> "Anatomy":
        """The anatomy of a model, or of a config as far as a config shows it."""
        model = model_or_config if isinstance(model_or_config, PreTrainedModel) else None
        config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
        kind = type(model) if model is not None else _causal_class(config)
        text = config.get_text_config(decoder=True)
        num_layers = getattr(text, "num_hidden_layers", 0)
        recurrent = _is_recurrent(text, kind)
        return cls(
            config=config,
            text=text,
            kind=kind,
            attention=text._attn_implementation,
            num_layers=num_layers,
            hidden_size=getattr(text, "hidden_size", 0),
            recurrent=recurrent,
            stepwise=text.model_type in STEPWISE,
            clamps=model is not None and _clamps(model),
            spans=_shared_spans(text) if recurrent else _spans(text, model),
            limits=tuple(_limits(text)),
            num_processes=1 if model is None else _num_processes(model),
            layers=None if model is None else _decoder_layers(model, num_layers),
        )

    @property
    def name(self) -> str:
        """transformers' name for this type of model."""
        return str(self.config.model_type)

    @property
    def text_name(self) -> str:
        """transformers' name for the type of the part that generates text."""
        return str(self.text.model_type)

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The kind of every layer; empty where the config does not say."""
        return tuple(getattr(self.text, "layer_types", None) or ())

    @property
    def flex(self) -> bool:
        """Whether text layers attend by `flex_attention`."""
        return self.attention == "flex_attention"

    @property
    def context_limit(self) -> int | None:
        """The longest context in which the model can be steered from outside; None: any."""
        return min((limit.tokens for limit in self.limits), default=None)

    @property
    def longest_context(self) -> int | None:
        """The longest context that the model was made for and that can be steered from outside; None: any."""
        declared = getattr(self.text, "max_position_embeddings", None)
        # A number below 1 can only mean that there is no limit.
        return min((n for n in (declared, self.context_limit) if n is not None and n >= 1), default=None)


def rotary_parameters(text: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rotary settings of a text config, one per layer type where they differ."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, dict)]
    settings = nested or [parameters]
    original = getattr(text, "original_max_position_embeddings", None) or getattr(text, "max_position_embeddings", None)
    return [{"original_max_position_embeddings": original, **p} for p in settings]


def rotary_type(parameters: dict[str, Any]) -> object:
    """The scheme that rotary settings name."""
    return parameters.get("rope_type", parameters.get("type"))


def opener(config: PreTrainedConfig) -> type[AutoModelForCausalLM] | type[AutoModelForImageTextToText]:
    """The class of transformers that opens such a model: the one for images and texts where the first does not."""
    texts, images = AutoModelForCausalLM, AutoModelForImageTextToText
    return images if type(config) not in texts._model_mapping and type(config) in images._model_mapping else texts


def _causal_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    model_class = opener(config)._model_mapping.get(type(config), None)
    return model_class[0] if isinstance(model_class, tuple) else model_class


def _num_processes(model: PreTrainedModel) -> int:
    return max(
        (weight.device_mesh.size() for weight in model.parameters() if hasattr(weight, "device_mesh")), default=1
    )


def _is_recurrent(text: PreTrainedConfig, kind: type[PreTrainedModel] | None) -> bool:
    types = getattr(text, "layer_types", None) or ()
    return bool(getattr(kind, "_is_stateful", False)) or any(t in RECURRENT_TYPES for t in types)


def _clamps(model: PreTrainedModel) -> bool:
    limits = [getattr(module, "time_step_limit", None) for module in model.modules()]
    return any(limit is not None and tuple(limit) != (0.0, float("inf")) for limit in limits)


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> nn.ModuleList | None:
    for module in chain(model.get_decoder().modules(), model.base_model.modules()):
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    return None


def _spans(text: PreTrainedConfig, model: PreTrainedModel | None) -> Spans:
    """One span per layer type where the model takes a dict of masks, else the one that all layers share.

    A window or a chunk that stands in a config whose model never asks for such a mask is ignored, as the model does.
    """
    window, chunk = getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)
    if hasattr(text, "layer_types"):
        kinds = {
            "full_attention": Span(),
            "sliding_attention": Span(window=window),
            "chunked_attention": Span(chunk=chunk),
        }
        return {kind: kinds[kind] for kind in dict.fromkeys(text.layer_types or ()) if kind in kinds}
    asked = {} if model is None else vars(sys.modules[type(model.get_decoder()).__module__])
    if window is not None and "create_sliding_window_causal_mask" in asked:
        return Span(window=window)
    if chunk is not None and "create_chunked_causal_mask" in asked:
        return Span(chunk=chunk)
    return Span()


def _shared_spans(text: PreTrainedConfig) -> Spans | None:
    """The span that all attention layers of a hybrid model share; None where it has no attention.

    Hybrids take one 4-D mask for all attention layers as it is, and then give their recurrent layers none. Those with
    two kinds of attention take a dict, in which recurrent layers have no mask.
    """
    window = getattr(text, "sliding_window", None)
    if not hasattr(text, "layer_types"):
        # RecurrentGemma in older transformers: all its attention looks back by the window.
        return Span(window=window)
    kinds = {t for t in text.layer_types or () if t not in NO_ATTENTION}
    if not kinds:
        return None
    if {"sliding_attention", "full_attention"} <= kinds:
        recurrent: dict[str, Span | None] = dict.fromkeys(t for t in text.layer_types if t in NO_ATTENTION)
        return recurrent | {"full_attention": Span(), "sliding_attention": Span(window=window)}
    return Span(window=window if "sliding_attention" in kinds else None)


def _limits(text: PreTrainedConfig) -> list[Limit]:
    """longrope embeds ALL positions anew once a text is longer than the original context. Llama 4 scales queries by
    positions that it does not take from `position_ids` but counts from the length of a cache that all rows share; the
    scale is 1 until `floor_scale`.
    """
    limits = [
        Limit(tokens=p["original_max_position_embeddings"], reason="embeds cached tokens anew (longrope)")
        for p in rotary_parameters(text)
        if rotary_type(p) == "longrope"
    ]
    if getattr(text, "attn_temperature_tuning", False):
        reason = "scales queries by the length of the cache (attn_temperature_tuning)"
        limits.append(Limit(tokens=text.floor_scale - 1, reason=reason))
    return limits
