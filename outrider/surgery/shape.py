"""The shape of a model: depth, width, heads and feed-forward neurons; and a config of another shape."""

import copy
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from outrider.core.types import InputError


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model.

    Attributes:
        layers: Decoder layers.
        width: Coordinates of the residual stream.
        heads: Attention heads that ask.
        key_value_heads: Attention heads that answer; a divisor of `heads`.
        feed_forward: Neurons of each layer.

    Example:
        >>> print(ModelShape(layers=2, width=192, heads=3, key_value_heads=1, feed_forward=768))
        2 layers x 192, 3 heads on 1, 768 neurons
    """

    layers: int
    width: int
    heads: int
    key_value_heads: int
    feed_forward: int

    def __str__(self) -> str:
        depth = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        return f"{depth} x {self.width}, {heads} on {self.key_value_heads}, {self.feed_forward} neurons"


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """The shape that a config describes. Raises InputError if it does not say all of it."""
    text = config.get_text_config(decoder=True)
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
    sizes = {name: getattr(text, name, None) for name in names}
    missing = [name for name, value in sizes.items() if not isinstance(value, int)]
    if missing:
        raise InputError(f"the config of {config.model_type} does not say {', '.join(missing)}; its shape is not known")
    heads = int(text.num_attention_heads)
    return ModelShape(
        layers=int(text.num_hidden_layers),
        width=int(text.hidden_size),
        heads=heads,
        key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        feed_forward=int(text.intermediate_size),
    )


def smaller_shape(
    before: ModelShape,
    *,
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    feed_forward: int | None = None,
) -> ModelShape:
    """A shape with some sizes lowered; None keeps a size.

    Heads that share keys and values stay equally many: fewer heads on the same keys and values, or fewer such groups,
    whole ones.

    Raises:
        InputError: A size is below 1 or above the one before, or so many heads cannot share keys and values.

    Example:
        >>> big = ModelShape(layers=12, width=320, heads=8, key_value_heads=2, feed_forward=896)
        >>> print(smaller_shape(big, layers=2, heads=6))
        2 layers x 320, 6 heads on 2, 896 neurons
        >>> smaller_shape(big, heads=1)
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: heads must be a multiple of 2 or of 4 (2 groups of 4 share keys and values),
        got 1
    """
    wanted = {"layers": layers, "width": width, "heads": heads, "feed_forward": feed_forward}
    for name, value in wanted.items():
        if value is not None and not 1 <= value <= getattr(before, name):
            raise InputError(f"{name} must be in 1..{getattr(before, name)}, what the target has, got {value}")
    kept = before.heads if heads is None else heads
    groups, size = before.key_value_heads, before.heads // before.key_value_heads
    if kept % groups and kept % size:
        raise InputError(
            f"heads must be a multiple of {groups} or of {size} ({groups} groups of {size} share keys and values), "
            f"got {kept}"
        )
    return ModelShape(
        layers=before.layers if layers is None else layers,
        width=before.width if width is None else width,
        heads=kept,
        key_value_heads=groups if kept % groups == 0 else kept // size,
        feed_forward=before.feed_forward if feed_forward is None else feed_forward,
    )


def config_of(config: PreTrainedConfig, shape: ModelShape, kept_layers: list[int] | None = None) -> PreTrainedConfig:
    """A config of another shape. The size of a head stays; lists with an entry per layer keep those of the kept layers.

    Args:
        kept_layers: The old layers that are kept; by default the first ones.
    """
    fresh = copy.deepcopy(config)
    text = fresh.get_text_config(decoder=True)
    before = shape_of(config)
    layers = list(range(shape.layers)) if kept_layers is None else kept_layers
    lists = [n for n, v in text.to_dict().items() if isinstance(v, list) and len(v) == before.layers]
    for name in lists:
        if isinstance(old := getattr(text, name, None), list):
            setattr(text, name, [old[i] for i in layers])
    text.head_dim = getattr(text, "head_dim", None) or before.width // before.heads
    text.num_hidden_layers, text.hidden_size, text.intermediate_size = shape.layers, shape.width, shape.feed_forward
    text.num_attention_heads = shape.heads
    if getattr(text, "num_key_value_heads", None) is not None:
        text.num_key_value_heads = shape.key_value_heads
    return fresh


def num_parameters(config: PreTrainedConfig) -> int:
    """Number of weights of a model of a config, counted without making them; tied weights count once."""
    kept = torch.random.get_rng_state()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    torch.random.set_rng_state(kept)
    return sum(weight.numel() for weight in model.parameters())
