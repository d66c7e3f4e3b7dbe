"""What a head is told in training. Each field is an option of its command, and the field's words are the help."""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from outrider.core.inputs import InputError

SIZE, LOSS = "size", "loss"
"""The kinds of options that belong to the identity of a run."""


def size(
    default: Any = MISSING, *, least: float | None = None, above: float | None = None, among: Sequence[Any] = ()
) -> Any:
    """A field that a checkpoint fixes. It is refused together with `init_from`.

    Args:
        least: The smallest value.
        above: What the value is above.
        among: All values; none: any.
    """
    return field(default=default, metadata={"kind": SIZE, "least": least, "above": above, "among": among})


def loss(
    default: Any = MISSING, *, least: float | None = None, above: float | None = None, among: Sequence[Any] = ()
) -> Any:
    """A field that says what is learnt. A head on disk may learn with another value. Arguments are those of `size`."""
    return field(default=default, metadata={"kind": LOSS, "least": least, "above": above, "among": among})


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """What every head can be told.

    Attributes:
        init_from: A head of this kind to train further: a directory or a hub id. Its sizes stay.
        divergence: The loss: fkl, rkl, jsd:beta=0.5, tvd, nla, lk; ce learns the texts and not the target's rows.
        slot_balanced: Let every draft token have the same total weight before --decay or --gamma, however many places
            of the texts it has. Texts are short of places for deep draft tokens.

    Raises:
        InputError: A value is not allowed.
    """

    _set_options: ClassVar[frozenset[str]] = frozenset()
    """The names of the options that were given, by instance."""

    init_from: str | None = loss(None)
    divergence: str = loss("fkl")
    slot_balanced: bool = loss(False)

    def __new__(cls, **options: Any) -> Any:
        new = object.__new__(cls)
        object.__setattr__(new, "_set_options", frozenset(options))
        return new

    def __post_init__(self) -> None:
        for each in fields(self):
            value, metadata = getattr(self, each.name), each.metadata
            if value is None or "kind" not in metadata:
                continue
            if metadata["least"] is not None and not (value >= metadata["least"] and math.isfinite(value)):
                raise InputError(f"{each.name} must be >= {metadata['least']}, got {value}")
            if metadata["above"] is not None and not (value > metadata["above"] and math.isfinite(value)):
                raise InputError(f"{each.name} must be > {metadata['above']}, got {value}")
            if metadata["among"] and value not in metadata["among"]:
                raise InputError(f"{each.name} must be one of {', '.join(map(str, metadata['among']))}, got {value!r}")

    def check(self) -> None:
        """Raise InputError if an option was given that the head on disk fixes."""
        fixed = [
            each.name for each in fields(self) if each.metadata.get("kind") == SIZE and each.name in self._set_options
        ]
        if self.init_from is not None and fixed:
            raise InputError(
                f"{', '.join(fixed)}: the head in {self.init_from} says it; leave it out, or leave out init_from to "
                "train a new head"
            )

    def identity(self) -> dict[str, Any]:
        """The options that a run must keep when it goes on, as values of JSON."""
        values = dataclasses.asdict(self)
        kept = {each.name for each in fields(self) if "kind" in each.metadata}
        return {
            name: list(value) if isinstance(value, tuple) else value for name, value in values.items() if name in kept
        }
