"""Where the models that ship with the package lie."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_TARGET = ASSETS / "target"
EMBEDDED_DRAFT = ASSETS / "draft"
EMBEDDED_HEAD = ASSETS / "head"
"""An EAGLE head of the target; see docs/laboratory/heads.md."""
