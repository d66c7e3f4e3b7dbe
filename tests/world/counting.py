"""A model that counts the keys that its forwards read."""

from collections.abc import Sequence

import numpy as np

from outrider.lm.model import LanguageModel
from outrider.lm.slots.inputs import Inputs, Outputs
from tests.world.zoo import VOCAB


class CountingModel(LanguageModel):
    """A model that counts the keys that its forwards read, and notes their shapes: rows, columns and keys."""

    num_keys = 0
    shapes: set[tuple[int, int, int]]

    def _forward(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        rows = self.cache.bucket(inputs.rows) if inputs.places is not None else len(inputs.positions)
        self.num_keys += rows * inputs.window.view
        if inputs.places is not None:
            self.shapes = getattr(self, "shapes", set()) | {(rows, inputs.positions.shape[1], inputs.window.view)}
        return super()._forward(inputs, taps)


def whole(lm: LanguageModel) -> LanguageModel:
    """The model with one forward for all rows, always."""
    lm._price = None
    return lm


def texts(lengths: Sequence[int]) -> list[list[int]]:
    dice = np.random.default_rng(0)
    return [dice.integers(3, VOCAB, size=length).tolist() for length in lengths]
