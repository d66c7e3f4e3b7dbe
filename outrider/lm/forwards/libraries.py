"""A function of tensors compiled ahead of time by torch: a library on disk, which later processes open at once.

Relied on in torch (read and run in 2.13):

- `torch.export.export` with `Dim(min=1)` makes one graph for all sizes, 1 included, while `backed_size_oblivious` is
  set;
- `torch._inductor.aoti_compile_and_package` writes a zip file with a library, in which the weights lie as the kernels
  want them; `freezing` makes weights constants, and `max_autotune_gemm` with the backend `CPP` writes matrix products
  in C++, without trying which kernels are fastest. There are none for float64. In bfloat16 they use matrix units (AMX)
  but not the instructions of AVX-512; without the option products are oneDNN's, which use both;
- `torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1).run(tensors)` takes all inputs in one list, writes into those
  that the function writes into, and returns the outputs in one list. It is private. It cannot call operators that
  others have registered with torch; the archive lists those that the function calls in a file `*.wrapper.json`.
"""

import functools
import hashlib
import json
import logging
import shutil
import tempfile
import time
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.core.types import InputError
from outrider.host import remembered

LIBRARY, KEY = "forward.so", "key.json"
CALLED = ".wrapper.json"
MANY = 1 << 20
"""More rows, columns or positions than any forward has."""
UNUSED, ABANDONED = 30 * 86400, 86400
"""Seconds until what nobody opens is deleted: a library, and what a compilation that was cut off has left."""

log = logging.getLogger("outrider")


class Library(ABC):
    """What a library computes, and where it lies. A subclass says what is compiled."""

    @property
    @abstractmethod
    def name(self) -> str:
        """What is compiled, as a word."""

    @property
    @abstractmethod
    def num_layers(self) -> int:
        """Its layers."""

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """The module, on a CPU."""

    @property
    @abstractmethod
    def shape(self) -> str:
        """A hash of what it is without its weights."""

    @property
    @abstractmethod
    def weights(self) -> str | None:
        """A hash of its weights; None if they cannot all be read."""

    @property
    @abstractmethod
    def sources(self) -> Collection[Path]:
        """The files that decide what is computed, beside torch's and transformers'."""

    @property
    @abstractmethod
    def choices(self) -> Mapping[str, Any]:
        """What else the library depends on, as values of JSON."""

    @abstractmethod
    def traced(self) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
        """The function as a module, inputs, and for each input which of its sizes vary."""

    @property
    def folder(self) -> Path:
        """Where the library lies or will lie."""
        return self._shelf / hashlib.sha256(self._key.encode()).hexdigest()[:32]

    def exists(self) -> bool:
        """Whether the library lies there, of these very weights, machine and versions."""
        try:
            # Reading all weights takes a while, so look first whether any library of such a shape is there.
            if not any(self._shelf.iterdir()):
                return False
            return (self.folder / KEY).read_text(encoding="utf-8") == self._key and (self.folder / LIBRARY).is_file()
        except OSError:
            return False

    def open(self) -> Any:
        """What runs the library, which is made first if it is not there.

        Raises:
            InputError: It cannot be made.
        """
        if self.exists():
            with suppress(OSError):
                (self.folder / KEY).touch()
            # A damaged library is made anew.
            with suppress(RuntimeError):
                return torch._C._aoti.AOTIModelContainerRunnerCpu(str(self.folder / LIBRARY), 1)
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(self.make() / LIBRARY), 1)

    def make(self) -> Path:
        """Make the library. It takes about a minute for a dozen layers. Returns its folder.

        Libraries of any model that nobody has opened for a month are deleted.

        Raises:
            InputError: It cannot be exported or compiled, or the folder cannot be written.
        """
        layers = f"{self.num_layers} layer{'s' * (self.num_layers != 1)}"
        log.warning(
            "compiling the forward of %s (%s) for this machine; this takes a minute or more, once", self.name, layers
        )
        try:
            self._shelf.mkdir(parents=True, exist_ok=True)
            fresh = Path(tempfile.mkdtemp(dir=self._shelf, prefix="."))
        except OSError as error:
            raise InputError(
                f"compiled forwards are kept in {self._shelf}, which cannot be written: {error.strerror}; set "
                "OUTRIDER_CACHE to another folder, or choose forward=eager"
            ) from error
        try:
            delete_unused(self._shelf.parent)
            self._compile(fresh)
            (fresh / KEY).write_text(self._key, encoding="utf-8")
            shutil.rmtree(self.folder, ignore_errors=True)
            return fresh.rename(self.folder)
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(
                f"the forward of {self.name} cannot be compiled ahead of time: {reason}; choose another forward"
            ) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    @functools.cached_property
    def _shelf(self) -> Path:
        """Where the libraries of this shape lie."""
        return remembered.folder() / "forwards" / f"{self.name}-{self.shape[:8]}"

    @functools.cached_property
    def _key(self) -> str:
        """Everything that the library depends on, as JSON."""
        weights = self.weights
        if weights is None:
            raise InputError(f"the weights of {self.name} cannot all be read, so its forward cannot be compiled")
        key = {
            "shape": self.shape,
            "weights": weights,
            "machine": remembered.machine(torch.device("cpu")),
            "source": {
                path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in [*self.sources, Path(__file__)]
            },
            **self.choices,
        }
        return json.dumps(key, sort_keys=True, indent=1)

    @torch.no_grad()
    def _compile(self, folder: Path) -> None:
        """Write the library into a folder."""
        # Slow to import, and rarely needed.
        import torch._inductor as inductor
        import torch._inductor.config as settings
        from torch.fx.experimental import _config as shapes

        archive, dtype = folder / "forward.pt2", next(self.module.parameters()).dtype
        with shapes.patch(backed_size_oblivious=True), settings.patch(_options(dtype)):  # type: ignore[attr-defined]
            module, inputs, sizes = self.traced()
            exported = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=False)
            inductor.aoti_compile_and_package(exported, package_path=str(archive))
        with zipfile.ZipFile(archive) as held:
            calls = [json.loads(held.read(name)) for name in held.namelist() if name.endswith(CALLED)]
            if outside := sorted({each["node"]["target"] for found in calls for each in found.get("nodes", ())}):
                raise RuntimeError(f"it calls {', '.join(outside)}, which the compiler does not know")
            library = next(name for name in held.namelist() if name.endswith(".so"))
            with held.open(library) as source, (folder / LIBRARY).open("wb") as target:
                shutil.copyfileobj(source, target)
        archive.unlink()


def delete_unused(folder: Path) -> None:
    """Delete libraries that nobody has opened for a month, and what compilations that were cut off have left.

    Args:
        folder: Holds a folder of libraries for each shape of a model.
    """
    now = time.time()
    for pattern, most in ((f"*/*/{KEY}", UNUSED), ("*/.*/", ABANDONED)):
        for found in folder.glob(pattern):
            with suppress(OSError):
                if now - found.stat().st_mtime > most:
                    shutil.rmtree(found.parent if found.name == KEY else found, ignore_errors=True)


def _options(dtype: torch.dtype) -> dict[str, Any]:
    """How the compiler makes a library."""
    own = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
    return {"freezing": True, **(own if _own_products(dtype) else {})}


def _own_products(dtype: torch.dtype) -> bool:
    """Whether the compiler writes matrix products itself. oneDNN's know more instructions for bfloat16 than they do."""
    if dtype == torch.float64:
        return False
    bare = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return not (dtype == torch.bfloat16 and bare)
