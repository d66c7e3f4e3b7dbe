"""The folder of the package's own code, by which tests tell its frames: a clone may lie in a folder of any name."""

from pathlib import Path

import outrider

PACKAGE = f"{Path(outrider.__file__).parent}/"
"""With the separator at its end, so that the path of an own file begins with it and no other path does."""
