"""What the catalog says of a method."""

from dataclasses import dataclass
from typing import Literal

Family = Literal["drafter", "tree", "verifier", "length", "decoding"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method.

    Attributes:
        make: Its class; the fields of this dataclass are the method's configuration.
        summary: What it does, in one line.
        source: The paper, with its address.
    """

    family: Family
    name: str
    make: type
    summary: str
    source: str

    @property
    def guarantee(self) -> Literal["exact law", "lossy"]:
        """Its guarantee with default fields, in combinations that the refusal matrix allows."""
        return "lossy" if getattr(self.make, "lossy", None) is True else "exact law"


LEVIATHAN = "Leviathan et al. 2023, https://arxiv.org/abs/2211.17192"
"""Where speculative decoding was first published."""
