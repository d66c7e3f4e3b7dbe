"""Where the pair that ships with the package lies."""

from pathlib import Path

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_TARGET = ASSETS / "target"
EMBEDDED_DRAFT = ASSETS / "draft"
