"""What the catalog says of a method."""

from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from typing import Any, Literal

Family = Literal["drafter", "tree", "verifier", "length", "decoding"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method.

    Attributes:
        home: Where its class or its spec is, as in `outrider.heads.eagle:SPEC`. It is imported when it is needed.
        summary: What it does, in one line.
        source: The paper, with its address.
        bound: Classes of what it becomes with a target, written as `home` is.
    """

    family: Family
    name: str
    home: str
    summary: str
    source: str
    bound: tuple[str, ...] = ()

    @cached_property
    def kind(self) -> Any:
        """The class, or the spec of a head."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)

    @property
    def make(self) -> type:
        """The class whose fields are the method's configuration."""
        method: type = getattr(self.kind, "trained", self.kind)
        return method

    def build(self, **fields: Any) -> object:
        """The method with a configuration."""
        return self.kind.at(**fields) if hasattr(self.kind, "at") else self.kind(**fields)

    @property
    def guarantee(self) -> Literal["exact law", "lossy"]:
        """Its guarantee with default fields, in combinations that the refusal matrix allows."""
        return "lossy" if getattr(self.kind, "lossy", None) is True else "exact law"


LEVIATHAN = "Leviathan et al. 2023, https://arxiv.org/abs/2211.17192"
"""Where speculative decoding was first published."""
