"""A model's forward compiled ahead of time by torch: a library on disk, which later processes open at once.

Relied on in torch (read and run in 2.13):

- `torch.export.export` with `Dim(min=1)` makes one graph for all sizes, 1 included, while `backed_size_oblivious` is
  set;
- `torch._inductor.aoti_compile_and_package` writes a zip file with a library, in which the weights lie as the kernels
  want them; `freezing` makes weights constants, and `max_autotune_gemm` with the backend `CPP` writes matrix products
  in C++, without trying which kernels are fastest. There are none for float64. In bfloat16 they use matrix units (AMX)
  but not the instructions of AVX-512; without the option products are oneDNN's, which use both;
- `torch._C._aoti.AOTIModelContainerRunnerCpu(library, 1).run(tensors)` takes all inputs in one list, writes into the
  caches among them in place, and returns the outputs in one list. It is private.
"""

import functools
import hashlib
import json
import logging
import shutil
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider import remembered
from outrider.lm.anatomy import Anatomy
from outrider.lm.attention import MaskBuilder
from outrider.lm.batch import upload
from outrider.lm.fingerprint import shape_of, weights_of
from outrider.lm.grouped import group
from outrider.lm.slotted import Inputs, Outputs
from outrider.lm.taps import attach
from outrider.lm.twin import twin
from outrider.lm.window import Window
from outrider.types import InputError

LIBRARY, KEY = "forward.so", "key.json"
SOURCES = ("attention.py", "grouped.py", "package.py", "taps.py", "window.py")
"""The files of this folder that decide what a library computes."""
MANY = 1 << 20
"""More rows, columns or positions than any forward has."""
ROWS, WIDTH, VIEW, CAPACITY = 3, 5, 192, 256
"""Sizes of the forward that the graph is made from."""

log = logging.getLogger("outrider")


@dataclass(frozen=True, kw_only=True)
class Package:
    """What one library computes: a model's forward, with the hidden states that are tapped.

    Attributes:
        model: The model.
        builder: Makes its masks.
        storages: The slot cache's storages, of any size.
        entries: For each layer that keeps keys and values, the indices of their tensors in the storages.
        taps: The hidden states that the forward returns behind the logits.
    """

    model: PreTrainedModel
    builder: MaskBuilder
    storages: Sequence[Tensor]
    entries: Mapping[int, tuple[int, int]]
    taps: tuple[int, ...] = ()

    @property
    def folder(self) -> Path:
        """Where the library lies or will lie."""
        return self._shelf / hashlib.sha256(self._key.encode()).hexdigest()[:32]

    def exists(self) -> bool:
        """Whether the library lies there, of these very weights, machine and versions."""
        try:
            # Reading all weights takes a while, so look first whether any library of such a model is there.
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
            # A damaged library is made anew.
            with suppress(RuntimeError):
                return torch._C._aoti.AOTIModelContainerRunnerCpu(str(self.folder / LIBRARY), 1)
        return torch._C._aoti.AOTIModelContainerRunnerCpu(str(self.make() / LIBRARY), 1)

    def make(self) -> Path:
        """Make the library. It takes about a minute for a dozen layers. Returns its folder.

        Raises:
            InputError: The model cannot be exported or compiled, or the folder cannot be written.
        """
        name, layers = Anatomy.of(self.model).name, len(self.entries)
        log.warning(
            "compiling the forward of %s (%d layers) for this machine; this takes a minute or more, once", name, layers
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
            self._compile(fresh)
            (fresh / KEY).write_text(self._key, encoding="utf-8")
            shutil.rmtree(self.folder, ignore_errors=True)
            return fresh.rename(self.folder)
        except Exception as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(
                f"the forward of {name} cannot be compiled ahead of time: {reason}; choose another forward"
            ) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    @functools.cached_property
    def _shelf(self) -> Path:
        """Where the libraries of models of this shape lie."""
        return remembered.folder() / "forwards" / f"{Anatomy.of(self.model).name}-{shape_of(self.model)[:8]}"

    @functools.cached_property
    def _key(self) -> str:
        """Everything that the library depends on, as JSON."""
        here = Path(__file__).parent
        weights = weights_of(self.model)
        if weights is None:
            raise InputError("the weights of this model cannot all be read, so its forward cannot be compiled")
        key = {
            "model": shape_of(self.model),
            "weights": weights,
            "machine": remembered.machine(self.model.device),
            "taps": self.taps,
            "entries": sorted(self.entries.items()),
            "spans": repr(self.builder.spans),
            "source": {name: hashlib.sha256((here / name).read_bytes()).hexdigest() for name in SOURCES},
        }
        return json.dumps(key, sort_keys=True, indent=1)

    @torch.no_grad()
    def _compile(self, folder: Path) -> None:
        """Write the library into a folder."""
        # Slow to import, and rarely needed.
        import torch._inductor as inductor
        import torch._inductor.config as settings
        from torch.fx.experimental import _config as shapes

        inputs, sizes = self._example()
        archive = folder / "forward.pt2"
        with shapes.patch(backed_size_oblivious=True), settings.patch(_options(self.model.dtype)):  # type: ignore[attr-defined]
            exported = torch.export.export(_Traced(self), inputs, dynamic_shapes=sizes, strict=False)
            inductor.aoti_compile_and_package(exported, package_path=str(archive))
        with zipfile.ZipFile(archive) as held:
            library = next(name for name in held.namelist() if name.endswith(".so"))
            with held.open(library) as source, (folder / LIBRARY).open("wb") as target:
                shutil.copyfileobj(source, target)
        archive.unlink()

    def _example(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Inputs of a forward, and the sizes in them that vary."""
        from torch.export import Dim

        rows, width, columns, view, capacity = (
            Dim(name, min=1, max=MANY) for name in ("rows", "width", "columns", "view", "capacity")
        )
        positions = torch.arange(WIDTH).expand(ROWS, -1).contiguous()
        masks = flat(self.builder.masks(None, positions, VIEW))
        storages = [s.new_zeros(ROWS, CAPACITY, *s.shape[2:]) for s in self.storages]
        nodes = {0: rows, 1: width}
        return (
            # Three tensors: the exporter would take one tensor for one input.
            (positions, positions.clone(), positions.clone(), torch.arange(WIDTH - 1), masks, storages),
            (nodes, nodes, nodes, {0: columns}, [{0: rows, 2: width, 3: view}] * len(masks),
             [{0: rows, 1: capacity}] * len(storages)),
        )  # fmt: skip


class PackagedForward:
    """Runs a model's libraries, one for each choice of taps. One that is not there yet is made when it is needed.

    Attributes:
        num_forwards: Forwards made so far.

    Args:
        package: The model's package without taps. Its weights must not change afterwards.
    """

    def __init__(self, package: Package) -> None:
        self.num_forwards = 0
        self._package = package
        self._runners: dict[tuple[int, ...], Any] = {}

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        batch, wanted = inputs.batch, tuple(dict.fromkeys(taps))
        if wanted not in self._runners:
            self.prepare(wanted)
        device = inputs.positions.device
        # The output layer computes one column at least.
        columns = inputs.columns if len(inputs.columns) else np.zeros(1, dtype=np.int64)
        logits, *seen = self._runners[wanted].run(
            [
                batch.tokens(device).contiguous(),
                inputs.positions,
                inputs.window.places.view(inputs.positions.shape),
                *upload([columns], device),
                *flat(inputs.masks),
                *inputs.window.storages,
            ]
        )
        self.num_forwards += 1
        return Outputs(logits=logits, columns=columns, taps=dict(zip(wanted, seen, strict=True)))

    def prepare(self, taps: Sequence[int] = ()) -> None:
        """Make what is missing, and open it."""
        wanted = tuple(dict.fromkeys(taps))
        self._runners[wanted] = replace(self._package, taps=wanted).open()


class _Traced(nn.Module):
    """A model's forward as a function of tensors alone."""

    def __init__(self, package: Package) -> None:
        super().__init__()
        self.model, self._package = twin(package.model), package
        group(self.model)
        seen: dict[int, Tensor] = {}
        attach(Anatomy.of(self.model).layers, package.taps, seen)
        # The exporter takes a dict that is an attribute for a part of the model's state.
        self._seen = seen.__getitem__
        self.model.eval()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        places: Tensor,
        columns: Tensor,
        masks: Sequence[Tensor],
        storages: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        package = self._package
        window = Window(package.entries, storages, places.reshape(-1), masks[0].shape[-1])
        logits = self.model(
            input_ids=tokens,
            attention_mask=_shaped(package.builder.spans, masks),
            position_ids=positions,
            past_key_values=window,
            use_cache=True,
            logits_to_keep=columns,
        ).logits
        return logits, *map(self._seen, package.taps)


def flat(masks: object) -> list[Tensor]:
    """The tensors among a model's masks."""
    if isinstance(masks, Tensor):
        return [masks]
    assert isinstance(masks, Mapping)
    return [mask for mask in masks.values() if mask is not None]


def _shaped(spans: object, masks: Sequence[Tensor]) -> object:
    """Masks as the model takes them, from a flat list."""
    if not isinstance(spans, Mapping):
        return masks[0]
    left = iter(masks)
    return {kind: None if span is None else next(left) for kind, span in spans.items()}


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
