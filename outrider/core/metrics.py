"""One function per metric. Its docstring is its definition. Metrics of outputs are computed from Steps."""

from collections.abc import Sequence

from outrider.core.types import Step


def block_efficiency(steps: Sequence[Step]) -> float:
    """Emitted tokens over steps: accepted tokens and the recovered or bonus token, none after the end of the output. 0
    without steps.
    """
    return sum(len(s.tokens) for s in steps) / len(steps) if steps else 0.0


def num_draft_tokens(steps: Sequence[Step]) -> int:
    """Number of draft tokens."""
    return sum(s.num_draft_tokens for s in steps)


def num_accepted_tokens(steps: Sequence[Step]) -> int:
    """Number of accepted draft tokens."""
    return sum(s.num_accepted_tokens for s in steps)


def acceptance_rate(steps: Sequence[Step]) -> float:
    """Accepted over drafted tokens; 0 if nothing was drafted."""
    return num_accepted_tokens(steps) / max(1, num_draft_tokens(steps))


def accepted_per_position(steps: Sequence[Step]) -> list[int]:
    """How often the draft token at depth 1, 2, ... was accepted (unconditional; vLLM's counter per position)."""
    deepest = max((s.num_accepted_tokens for s in steps), default=0)
    return [sum(s.num_accepted_tokens > i for s in steps) for i in range(deepest)]


def conditional_acceptance(steps: Sequence[Step]) -> list[float]:
    """Share of chain steps that accept depth i, among those that drafted it and accepted everything before it."""
    return conditional_rates([(s.num_draft_tokens, s.num_accepted_tokens) for s in steps])


def conditional_rates(counts: Sequence[tuple[int, int]]) -> list[float]:
    """The same of drafted and accepted tokens of each step.

    Example:
        >>> conditional_rates([(2, 0), (2, 1), (1, 1)])
        [0.6666666666666666, 0.0]
    """
    rates = []
    for i in range(max((drafted for drafted, _ in counts), default=0)):
        tested = [accepted > i for drafted, accepted in counts if drafted > i and accepted >= i]
        if not tested:
            break
        rates.append(sum(tested) / len(tested))
    return rates


def efficiency(speedup: float, block: float, v: float, c: float, num_draft_calls: float) -> float:
    """Speedup over what bare forwards would give: speedup / (block_efficiency / (v + c x draft calls)).

    Args:
        v: Bare target forward of the draft's size over a bare target forward of one token.
        c: Bare drafter forward over a bare target forward of one token.
    """
    return speedup / (block / (v + c * num_draft_calls))
