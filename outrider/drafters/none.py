"""No drafter: every step is a plain one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from outrider.core.types import Frontier, Guess, Running
from outrider.drafters.exports import Exports
from outrider.drafters.token_only import TokenOnly


@dataclass(frozen=True, kw_only=True)
class NoDrafter(TokenOnly):
    """Never proposes a token, so the engine decodes plainly."""

    exports: ClassVar[Exports] = Exports(transformers=None, has_files=False)

    @property
    def max_depth(self) -> int:
        return 0

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess:
        return Guess(tokens=np.full(len(states), -1))

    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess:
        return Guess(tokens=np.full(len(frontier.nodes), -1))
