"""Heuristic length: longer after a step where everything was accepted, shorter after any other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from outrider.core.option import check, option
from outrider.core.types import InputError, Step
from outrider.trees.protocol import Level


@dataclass(frozen=True, kw_only=True)
class HeuristicLength:
    """Start at `num_speculative_tokens`; add `grow` after full acceptance, subtract `shrink` otherwise.

    The length of a step depends on earlier steps alone, so the law is kept. A request's state is its next length.

    References:
        Gante 2023, assisted generation; transformers' `num_assistant_tokens_schedule="heuristic"`.
        https://huggingface.co/blog/assisted-generation
    """

    constant: ClassVar[bool] = False
    known_ahead: ClassVar[bool] = True
    lossy = None

    num_speculative_tokens: int = 5
    grow: int = option(2, least=0)
    shrink: int = option(1, least=0)
    most: int = 20

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= self.most:
            raise InputError(
                f"num_speculative_tokens must be between 1 and most={self.most}, got {self.num_speculative_tokens}"
            )
        check(self)

    def open(self) -> int:
        return self.num_speculative_tokens

    def limit(self, state: object) -> int:
        return int(state)  # type: ignore[call-overload]

    def reach(self, states: Sequence[object], level: Level) -> None:
        return None

    def update(self, state: object, step: Step) -> int:
        length = self.limit(state)
        if step.num_draft_tokens == 0:
            return length
        if step.num_accepted_tokens == step.num_draft_tokens:
            return min(length + self.grow, self.most)
        return max(length - self.shrink, 1)
