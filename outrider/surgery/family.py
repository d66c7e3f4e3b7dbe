"""Shapes of about equal numbers of parameters: from wide and shallow to narrow and deep."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.surgery.shape import ModelShape, config_of, num_parameters, shape_of

NEAR = 0.15
"""How far the number of parameters of a shape may be from the wanted one, relatively."""
WIDTHS = 64
"""About how many widths are considered."""
MULTIPLE = 16
"""Widths are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class Sized:
    """A shape and its number of parameters."""

    shape: ModelShape
    num_parameters: int


def same_size(config: PreTrainedConfig, parameters: int, layers: Sequence[int]) -> list[Sized]:
    """For each number of layers the shape that has about so many parameters and fits into the target.

    Heads and neurons keep their proportion to the width, as far as heads can be shared. Embeddings count too.
    A number of layers for which no width comes near is left out.

    Raises:
        InputError: No shape comes near, or a number of layers is not one of 1 to the target's.
    """
    before = shape_of(config)
    if wrong := [n for n in layers if not 1 <= n <= before.layers]:
        raise InputError(f"layers must be in 1..{before.layers}, what the target has, got {wrong[0]}")
    sized_shapes = [_nearest(config, parameters, n) for n in layers]
    near = [sized for sized in sized_shapes if abs(sized.num_parameters - parameters) <= NEAR * parameters]
    if not near:
        counts = ", ".join(f"{sized.shape}: {sized.num_parameters:,}" for sized in sized_shapes)
        raise InputError(
            f"no shape has about {parameters:,} parameters and fits into the target; the nearest are {counts}"
        )
    return near


def _nearest(config: PreTrainedConfig, parameters: int, layers: int) -> Sized:
    """The shape with so many layers whose number of parameters is nearest; more width is always more parameters."""
    before = shape_of(config)
    step = max(MULTIPLE, before.width // WIDTHS // MULTIPLE * MULTIPLE)
    widths = [*(width for width in range(step, before.width, step) if _heads(before, width)), before.width]
    sized = {}

    def count(place: int) -> int:
        if place not in sized:
            shape = _shape(before, layers, widths[place])
            sized[place] = Sized(shape=shape, num_parameters=num_parameters(config_of(config, shape)))
        return sized[place].num_parameters

    low, high = 0, len(widths) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(middle) < parameters else (low, middle)
    best = min((low, high), key=lambda place: abs(count(place) - parameters))
    return sized[best]


def _shape(before: ModelShape, layers: int, width: int) -> ModelShape:
    """The shape of a width, in the target's proportions."""
    share = width / before.width
    groups, size = before.key_value_heads, before.heads // before.key_value_heads
    heads = min(_heads(before, width), key=lambda n: abs(n - share * before.heads))
    return ModelShape(
        layers=layers,
        width=width,
        heads=heads,
        key_value_heads=groups if heads % groups == 0 else heads // size,
        feed_forward=max(8, round(share * before.feed_forward / 8) * 8),
    )


def _heads(before: ModelShape, width: int) -> list[int]:
    """The numbers of heads that share keys and values as the target's do, and divide a width, as transformers asks."""
    groups, size = before.key_value_heads, before.heads // before.key_value_heads
    return [n for n in range(1, before.heads + 1) if (n % groups == 0 or n % size == 0) and width % n == 0]
