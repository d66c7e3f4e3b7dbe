"""The ways in which a model's forwards can run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from outrider.core.inputs import unknown

Forward = Literal["eager", "packed", "compiled", "replayed"]
FORWARDS: tuple[Forward, ...] = get_args(Forward)
"""All kinds of forward, the plainest first."""
BLOCK = 6
"""Tokens of the block that is timed beside one token: a draft of five, and the token before it."""


@dataclass(frozen=True, kw_only=True)
class ForwardChoice:
    """How the forwards of a model run, and why.

    Attributes:
        forward: The kind of forward.
        pad_to: Fewest columns of a forward.
        narrow: Most tokens of a compiled forward; larger ones run eager. None: any number.
        milliseconds: For each kind that was measured, the time of one token and that of a block of `BLOCK`.
        busy: Whether other processes took the cores while it was measured, so that another kind may be faster.
        reason: Why no other kind is possible, as the end of a sentence; None where the choice was free.

    Example:
        >>> print(ForwardChoice(forward="packed", pad_to=2, milliseconds={"eager": (9.0, 9.5), "packed": (6.0, 6.25)}))
        packed: 6.0 ms for a token, 6.2 ms for 6; eager: 9.0 ms for a token, 9.5 ms for 6
    """

    forward: Forward
    pad_to: int
    narrow: int | None = None
    milliseconds: Mapping[Forward, tuple[float, float]] = field(default_factory=dict)
    busy: bool = False
    reason: str | None = None

    def __str__(self) -> str:
        pairs = sorted(self.milliseconds.items(), key=lambda pair: pair[0] != self.forward)
        times = [f"{name}: {one:.1f} ms for a token, {block:.1f} ms for {BLOCK}" for name, (one, block) in pairs]
        if self.narrow is not None:
            times.append(f"forwards of more than {self.narrow} tokens run eager")
        if self.busy:
            times.append("measured while other processes took the cores")
        plain = self.forward if self.reason is None else f"{self.forward}, because {self.reason}"
        return "; ".join(times) or plain


def as_forward(name: str | None) -> Forward | None:
    """The kind of forward that a name stands for; None stays None. Raises InputError for an unknown name."""
    if name is not None and name not in FORWARDS:
        raise unknown("forward", name, FORWARDS)
    return name
