"""Fixed length: the same number of tokens at every step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outrider.core.option import CheckedOptions, option
from outrider.core.types import Step
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class FixedLength(CheckedOptions):
    """Draft `num_speculative_tokens` deep, or as deep as there is room.

    References:
        Leviathan et al. 2023, where it is called gamma. https://arxiv.org/abs/2211.17192
    """

    constant: ClassVar[bool] = True
    known_ahead: ClassVar[bool] = True
    lossy = None

    num_speculative_tokens: int = option(5, least=1, note=" (drafter none drafts nothing)")

    def open(self) -> None:
        return None

    def limit(self, state: object) -> int:
        return self.num_speculative_tokens

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> None:
        return None
