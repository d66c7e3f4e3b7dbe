"""What ships with Outrider, and what takes turns."""

from dataclasses import dataclass

from outrider.embedded import EMBEDDED_TARGET

ASSETS = EMBEDDED_TARGET.parent


@dataclass(frozen=True, kw_only=True)
class Process:
    """One of the processes, which take turns."""

    name: str
