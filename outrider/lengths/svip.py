"""SVIP: stop drafting after a token that was drawn from an uncertain row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Int

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Step
from outrider.lengths.entropy import entropies
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class SvipLength(CheckedOptions):
    r"""Keep the token, then stop if the row that it was drawn from has $\sqrt{c H} > h$, with H its entropy in nats.

    Attributes:
        num_speculative_tokens: Longest draft.
        scale: c.
        threshold: h; with the defaults a row of more than 0.6 nats ends the draft.

    References:
        Zhang et al. 2024, SVIP. https://arxiv.org/abs/2411.18462
    """

    constant: ClassVar[bool] = False
    lossy = None

    num_speculative_tokens: int = option(40, least=1)
    scale: float = option(0.15, above=0)
    threshold: float = option(0.3, least=0, finite=False)

    def open(self) -> None:
        return None

    def limit(self, state: object) -> int:
        return self.num_speculative_tokens

    def reach(self, states: Sequence[object], level: Level) -> Int[np.ndarray, " n"]:
        unsure = np.sqrt(self.scale * entropies(level)) > self.threshold
        return np.where(unsure, 1, self.num_speculative_tokens)

    def update(self, state: object, step: Step) -> None:
        return None
