"""How many tokens compiled forwards are best for, from times that are given."""

import pytest

from outrider.lm.forwards import choice
from outrider.lm.forwards.choice import BLOCK, CONTEXT, WIDE
from outrider.lm.model import LanguageModel


class Timed(LanguageModel):
    """Stands for a model whose forwards take given milliseconds, for a block and for many tokens."""

    widest: int | None = None

    def __init__(self, eager: tuple[float, float], compiled: tuple[float, float], max_context: int = 999) -> None:
        # Nothing else of a model is there.
        self.times = {"eager": eager, "compiled": compiled}
        self.forward, self._most = "eager", max_context

    @property
    def max_context(self) -> int:
        return self._most

    def run_by(self, forward: str) -> None:
        self.forward = forward


@pytest.mark.parametrize(
    ("eager", "compiled", "bound"),
    [
        ((10, 16), (4, 12), None),
        ((10, 16), (4, 16), None),
        ((10, 16), (4, 18), BLOCK + (WIDE - BLOCK) * 6 // 8),
        ((4, 16), (4, 18), BLOCK),
        ((4, 16), (5, 18), BLOCK),
    ],
)
def test_compiled_forwards_end_where_eager_ones_are_as_fast(monkeypatch, eager, compiled, bound) -> None:
    monkeypatch.setattr(choice, "_milliseconds", lambda lm, width: lm.times[lm.forward][(BLOCK, WIDE).index(width)])
    assert choice._narrow(Timed(eager, compiled)) == bound


def test_a_short_context_has_no_forward_of_many_tokens() -> None:
    assert choice._narrow(Timed((1, 1), (0, 9), max_context=CONTEXT + WIDE - 1)) is None


def test_compiled_forwards_that_copy_the_weights_of_experts_never_take_many_tokens(monkeypatch) -> None:
    monkeypatch.setattr(choice, "_milliseconds", lambda lm, width: lm.times[lm.forward][(BLOCK, WIDE).index(width)])
    with_experts = Timed((10, 16), (4, 12))
    with_experts.widest = 16
    assert choice._narrow(with_experts) == 16
