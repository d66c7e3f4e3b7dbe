"""New weights for a drafter that is served: a client sends them, and the drafter is loaded anew."""

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from outrider.catalog import is_place
from outrider.core.inputs import InputError
from outrider.drafters.protocol import Drafter

WEIGHTS = "model.safetensors"
"""The file that a client sends."""
NOT_COPIED = ("*.safetensors", "*.bin", "*.pt", "*.index.json", "training", ".*")
"""What of a drafter's folder the new weights replace, or nobody reads."""


@dataclass(frozen=True, kw_only=True)
class Renewal:
    """Loads drafters anew from their own folder and the weights that a client sent.

    Attributes:
        specs: Each drafter as the server was told it, by name, such as `eagle3:path=head`.
        load: Makes a drafter of such a text.
    """

    specs: Mapping[str, str]
    load: Callable[[str], Drafter]

    def folder(self, name: str) -> Path:
        """The folder that a drafter was loaded from. Raises InputError if it has none on this machine."""
        path = place_of(self.specs[name])
        if path is None or not Path(path).is_dir():
            raise InputError(
                f"drafter {name!r} has no folder on the server, so it takes no weights; start the server with a "
                "drafter in a local folder"
            )
        return Path(path)

    def most_bytes(self, name: str) -> int:
        """The longest file of weights that is read: twice what the drafter has, for another dtype."""
        kept = sum(file.stat().st_size for file in self.folder(name).glob("*") if file.is_file())
        return 2 * kept + 1_000_000

    def renewed(self, name: str, weights: Path) -> Drafter:
        """The drafter with other weights. The files it was loaded from do not change.

        Args:
            weights: A file of safetensors, with the names of the drafter's own. It is moved.

        Raises:
            InputError: The weights do not fit the drafter.
        """
        old = self.folder(name)
        with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
            place = Path(scratch) / old.name
            shutil.copytree(old, place, ignore=shutil.ignore_patterns(*NOT_COPIED))
            shutil.move(weights, place / WEIGHTS)
            return self.load(moved(self.specs[name], str(place)))


def place_of(spec: str) -> str | None:
    """The path of a drafter's text; None if it names none.

    Example:
        >>> place_of("eagle3:path=my/head,dtype=float32"), place_of("my/head"), place_of("suffix")
        ('my/head', 'my/head', None)
    """
    fields = spec.partition(":")[2].split(",")
    paths = [value for key, _, value in (field.partition("=") for field in fields) if key == "path"]
    return paths[0] if paths else spec if is_place(spec) else None


def moved(spec: str, path: str) -> str:
    """The text of a drafter with another path.

    Example:
        >>> moved("eagle3:path=my/head,dtype=float32", "other")
        'eagle3:path=other,dtype=float32'
    """
    old = place_of(spec)
    return path if spec == old else spec.replace(f"path={old}", f"path={path}", 1)
