"""What a head is told in training. Each field is an option of its command, and the field's words are the help."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Self

from outrider.core.inputs import InputError
from outrider.core.option import CheckedOptions, bounds_of, option

SIZE, LOSS = "size", "loss"
"""The kinds of options that belong to the identity of a run."""


def size(default: Any = MISSING, **bounds: Any) -> Any:
    """An option that a checkpoint fixes. It is refused together with `init_from`. Bounds are those of `option`."""
    return option(default, kind=SIZE, **bounds)


def loss(default: Any = MISSING, **bounds: Any) -> Any:
    """An option that says what is learnt. A head on disk may learn with another value."""
    return option(default, kind=LOSS, **bounds)


@dataclass(frozen=True, kw_only=True)
class HeadOptions(CheckedOptions):
    """What every head can be told.

    Attributes:
        init_from: A head of this kind to train further: a directory or a hub id. Its sizes stay.
        divergence: The loss: fkl, rkl, jsd:beta=0.5, tvd, nla, lk; ce learns the texts and not the target's rows.
        slot_balanced: Let every draft token have the same total weight before --decay or --gamma, however many places
            of the texts it has. Texts are short of places for deep draft tokens.

    Raises:
        InputError: A value is not allowed.
    """

    init_from: str | None = loss(None)
    divergence: str = loss("fkl")
    slot_balanced: bool = loss(False)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Self:
        """The options by name. Raises InputError if one is among them that the head on disk fixes."""
        chosen = cls(**options)
        chosen._refuse(options)
        return chosen

    def check(self) -> None:
        """Raise InputError if an option was given that the head on disk fixes."""
        self._refuse(self.changed())

    def changed(self) -> list[str]:
        """The options that are not at their defaults."""
        return [each.name for each in dataclasses.fields(self) if getattr(self, each.name) != each.default]

    def _refuse(self, names: Iterable[str]) -> None:
        """Raise InputError if one of these is fixed by the head on disk."""
        fixed = [name for name in names if name in self.of_kinds(SIZE)]
        if self.init_from is not None and fixed:
            raise InputError(
                f"{', '.join(fixed)}: the head in {self.init_from} says it; leave it out, or leave out init_from to "
                "train a new head"
            )

    def identity(self) -> dict[str, Any]:
        """The options that a run must keep when it goes on, as values of JSON."""
        kept = {name: getattr(self, name) for name in self.of_kinds(SIZE, LOSS)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in kept.items()}

    @classmethod
    def of_kinds(cls, *kinds: str) -> list[str]:
        """The names of the options of some kinds."""
        options: Any = cls
        return [name for name, bounds in bounds_of(options).items() if bounds.kind in kinds]
