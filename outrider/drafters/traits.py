"""The traits of a drafter: what its class says of itself, before any weights are loaded."""

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Drafter, Rows


@dataclass(frozen=True, kw_only=True)
class Traits:
    """The traits of one drafter; `Drafter` says what each of them means.

    Attributes:
        reads_hidden_states: Whether it has taps.
        exports: The other engines that run it.

    Example:
        >>> from outrider.drafters.ngram import NgramDrafter
        >>> Traits.of(NgramDrafter).rows
        'point'
    """

    rows: Rows
    context_pure: bool
    reads_hidden_states: bool
    keeps_cache: bool
    trainer: str | None
    exports: tuple[str, ...]

    @classmethod
    def of(cls, kind: Any) -> "Traits":
        """The traits of a kind of drafters.

        Args:
            kind: A class of drafters, an unbound drafter's, or the spec of a head. The traits of an unbound drafter are
                those of the class that its `bind` returns, by its annotation; of several, the first.

        Raises:
            TypeError: It is none of these.
        """
        spec = _spec(kind)
        drafter = _drafter(kind)
        trainer = drafter.trainer if spec is None else None if spec.options is None else spec.name
        return cls(
            rows=drafter.rows,
            context_pure=drafter.context_pure,
            reads_hidden_states=drafter.taps is not Drafter.taps,
            keeps_cache=drafter.keeps_cache,
            trainer=trainer,
            exports=exports_of(kind).engines,
        )


def exports_of(kind: Any) -> Exports:
    """Which other engines run a kind of drafters; `Traits.of` says what a kind is."""
    spec = _spec(kind)
    exports: Exports = _drafter(kind).exports if spec is None else spec.exports
    return exports


def _spec(kind: Any) -> Any:
    """The spec of a head; None for other drafters."""
    return kind if hasattr(kind, "published") else None


def _drafter(kind: Any) -> Any:
    """The class of drafters of a kind."""
    spec = _spec(kind)
    if spec is not None:
        return spec.drafter
    return kind if Drafter in kind.__mro__ else _bound(kind)


def _bound(make: type) -> type:
    """The class that `bind` returns; of several, the first."""
    bind = getattr(make, "bind", None)
    returned = get_type_hints(bind).get("return") if bind is not None else None
    kind = next(iter(get_args(returned)), returned)
    if not isinstance(kind, type) or Drafter not in kind.__mro__:
        raise TypeError(
            f"{make.__name__} must derive from Drafter, or its `bind` must be annotated to return such a class"
        )
    return kind
