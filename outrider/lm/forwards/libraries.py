"""A function of tensors compiled ahead of time by torch: a library on disk, which later processes open at once.

Relied on in torch (read and run in 2.13):

- `torch.export.export` with `Dim(min=1)` makes one graph for all sizes, 1 included, while `backed_size_oblivious` is
  set;
- `torch._inductor.aot_compile` with `aot_inductor.package` makes a library in the folder `TORCHINDUCTOR_CACHE_DIR`, and
  returns the paths of what it wrote. (`aoti_compile_and_package` makes a zip file of them, and ends the process where
  the disk is full.) `freezing` makes weights constants, laid out as the kernels want them; see `constants`.
  `max_autotune_gemm` with the backend `CPP` writes matrix products in C++, without trying which kernels are fastest.
  There are none for float64. In bfloat16 they use matrix units (AMX) but not the instructions of AVX-512; without the
  option products are oneDNN's, which use both;
- with `dynamic_threads` a parallel loop has as many threads as OpenMP would take, and a matrix product is cut into
  `threads` parts, whatever number of threads shares them;
- a library calls operators that others have registered with torch only as C functions, which ours have; see `shims`.
  The compiler lists those that it would call otherwise in a file `*.wrapper.json`.
- with one thread and without `dynamic_threads`, generated code has no parallel loops.
"""

import ast
import errno
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shlex
import shutil
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version
from torch import nn

from outrider.core import files
from outrider.core.types import InputError
from outrider.host import remembered
from outrider.host.hashed import hashes_of
from outrider.lm.forwards import shims
from outrider.lm.forwards.constants import INDEX, STORE, MappedConstants, as_index, keep, read, tensors_of
from outrider.lm.forwards.gated import fuse_gates
from outrider.lm.forwards.runner import Runner

LIBRARY, KEY = "forward.so", "key.json"
CALLED, SOURCE, BLOB = ".wrapper.json", ".wrapper.cpp", ".blob"
WITHOUT_A_COMPILER = "it calls functions in C++, which need a compiler to be built here"
MANY = 1 << 20
"""More rows, columns or positions than any forward has."""
QUOTES = Version("2.14")
"""The first torch that quotes the paths of its own libraries in a compiler's command."""
UNUSED, ABANDONED = 30 * 86400, 86400
"""Seconds until what nobody opens is deleted: a library, and what a compilation that was cut off has left."""

OWN = {"aten", "prim", "prims", "mkldnn", "onednn", "quantized", "inductor", "higher_order"}
"""Namespaces of torch's operators. What others have registered is found before anything is compiled."""
PRODUCTS = {"aten::linear", "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"}
"""Operators whose products the compiler computes, or torch."""
SERIAL = {"cpp.threads": 1, "cpp.dynamic_threads": False}
"""Options of a graph whose products are our operators, which have threads of their own. To wake threads up for anything
else takes longer than computing it, and a reduction that threads share would depend on their number."""
VERSIONED = {"torch", "transformers", *sys.stdlib_module_names}
"""Packages whose versions are in a library's key, so that their source need not be."""

log = logging.getLogger("outrider")
warn_once = functools.cache(log.warning)


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
    def parts(self) -> Sequence[nn.Module]:
        """The modules whose code is compiled, and whose tensors are its weights, on a CPU. The first one computes."""

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
    def choices(self) -> Mapping[str, Any]:
        """What else the library depends on, as values of JSON."""

    @abstractmethod
    def traced(self) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
        """The function as a module, inputs, and for each input which of its sizes vary."""

    @property
    def sources(self) -> Mapping[str, Path]:
        """The modules of source that decide what is computed, and their files: those of the classes of all parts, that
        of this library, and what they import.
        """
        kinds = {kind for whole in self.parts for part in whole.modules() for kind in type(part).__mro__}
        return sources(kind.__module__ for kind in {*kinds, *type(self).__mro__})

    @property
    def folder(self) -> Path:
        """Where the library lies or will lie."""
        return self._shelf / hashlib.sha256(json.dumps(self._key, sort_keys=True).encode()).hexdigest()[:32]

    def exists(self) -> bool:
        """Whether the library lies there, of these very weights, machine and versions, whole, and written by nobody
        else. If it lies there and is not usable, the log says why, once.
        """
        try:
            # Reading all weights takes a while, so look first whether any library of such a shape is there.
            if not any(self._shelf.iterdir()):
                return False
            if not self.folder.is_dir():
                if (reason := self._unlike()) is not None:
                    warn_once("the compiled forward of %s is not used: %s", self.name, reason)
                return False
        except (OSError, InputError):
            return False
        if (reason := self._flaw()) is not None:
            warn_once("the compiled forward of %s is not used: %s", self.name, reason)
        return reason is None

    def opened(self) -> Runner | None:
        """What runs the library; None if it is not usable. Nothing is compiled."""
        if not self.exists():
            return None
        with suppress(OSError):
            (self.folder / KEY).touch()
        try:
            return self._runner()
        except (RuntimeError, OSError, ValueError, KeyError) as error:
            warn_once("the compiled forward of %s is not used: torch cannot open %s", self.name, self.folder)
            log.debug("%s", error)
            return None

    def open(self) -> Runner:
        """What runs the library, which is made first if it is not usable.

        Raises:
            InputError: It cannot be made.
        """
        runner = self.opened()
        if runner is None:
            self.make()
            runner = self._runner()
        return runner

    def _runner(self) -> Runner:
        """What runs the library that lies there."""
        constants = MappedConstants(read(self.folder / INDEX), self._store, tensors_of(self.parts))
        return Runner(self.folder / LIBRARY, constants)

    def make(self) -> Path:
        """Make the library. It takes about a minute for a dozen layers. Returns its folder.

        Libraries of any model that nobody has opened for a month are deleted.

        Raises:
            InputError: It cannot be exported or compiled, or the folder cannot be written.
        """
        try:
            files.make_folder(self._shelf)
            fresh = Path(tempfile.mkdtemp(dir=self._shelf, prefix="."))
        except OSError as error:
            raise InputError(
                f"compiled forwards are kept in {self._shelf}, which cannot be written: {error.strerror}; set "
                "OUTRIDER_CACHE to another folder, or choose forward=eager"
            ) from error
        try:
            if (reason := files.distrusted(fresh)) is not None:
                raise InputError(
                    f"compiled forwards are kept in {self._shelf}, but {reason}; set OUTRIDER_CACHE to a folder of "
                    "your own, or choose forward=eager"
                )
            layers = f"{self.num_layers} layer{'s' * (self.num_layers != 1)}"
            log.warning(
                "compiling the forward of %s (%s) for this machine; this takes a minute or more, once",
                self.name,
                layers,
            )
            delete_unused(self._shelf.parent)
            self._compile(fresh)
            self._keep(fresh)
            return self.folder
        except InputError:
            raise
        except Exception as error:
            full = os.strerror(errno.ENOSPC)
            if full in str(error):
                raise InputError(
                    f"there is no room for the compiled forward of {self.name}: {full}; make room in {self._shelf} and "
                    f"{tempfile.gettempdir()}, set OUTRIDER_CACHE and TMPDIR to other folders, or choose forward=eager"
                ) from error
            reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise InputError(
                f"the forward of {self.name} cannot be compiled ahead of time: {reason}; choose another forward"
            ) from error
        finally:
            shutil.rmtree(fresh, ignore_errors=True)

    def _keep(self, fresh: Path) -> None:
        """Put a folder with a new library in its place, as a whole."""
        for name in (LIBRARY, INDEX):
            (fresh / name).chmod(0o600)
        files.replace(fresh / KEY, self._record(fresh), mode=0o600)
        try:
            # What lies there is damaged, or no folder at all.
            files.put(fresh, self.folder)
        except OSError:
            # Another process may have made the same one meanwhile.
            if not self.exists():
                raise

    def _flaw(self) -> str | None:
        """Why the library that lies there is not usable; None if it is."""
        try:
            for name in (KEY, LIBRARY, INDEX):
                if (reason := files.distrusted(self.folder / name)) is not None:
                    return reason
            if files.read(self.folder / KEY) == self._record(self.folder):
                without = shims.called_by(self.folder / LIBRARY) and not shims.load()
                return WITHOUT_A_COMPILER if without else None
        except (OSError, ValueError):
            pass
        return f"{self.folder} is damaged; `outrider prepare` makes it anew"

    def _unlike(self) -> str | None:
        """What is different where a library of the same weights was made, if there is one, and none for here."""
        wanted = json.loads(json.dumps(self._key))
        for place in sorted(self._shelf.glob(f"*/{KEY}")):
            try:
                key = json.loads(files.read(place))["key"]
                different = [name for name in wanted if key[name] != wanted[name]]
                if not set(different) <= {"machine", "source", "kernels"}:
                    continue
                changed = [name for name in wanted["machine"] if key["machine"].get(name) != wanted["machine"][name]]
                there = key["machine"].get("versions", {})
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue
            here = wanted["machine"]["versions"]
            other = [
                f"{name} {there.get(name)} instead of {here[name]}" for name in here if there.get(name) != here[name]
            ]
            how = f"with {' and '.join(other)}" if other else f"on a machine with another {' and '.join(changed)}"
            difference = how if changed else "from other source of the model or of Outrider"
            return f"it was made {difference}; `outrider prepare` makes one that fits, once"
        return None

    def _record(self, folder: Path) -> bytes:
        """What lies beside a library: its key, and the hashes of its files."""
        constants = sorted({each.file for each in read(folder / INDEX) if each.file})
        paths = [folder / LIBRARY, folder / INDEX, *(self._store / name for name in constants)]
        for path in paths[2:]:
            if (reason := files.distrusted(path)) is not None:
                raise ValueError(reason)
        library, index, *contents = hashes_of(paths)
        if contents != constants:
            raise ValueError(f"a constant in {self._store} is not what its name says")
        return json.dumps({"key": self._key, "library": library, "index": index}, sort_keys=True, indent=1).encode()

    @property
    def _store(self) -> Path:
        """Where the constants of all libraries lie."""
        return self._shelf.parent / STORE

    @functools.cached_property
    def _shelf(self) -> Path:
        """Where the libraries of this shape lie, without symbolic links."""
        return Path(os.path.realpath(remembered.folder() / "forwards" / f"{self.name}-{self.shape[:8]}"))

    @functools.cached_property
    def _key(self) -> Mapping[str, Any]:
        """Everything that the library depends on, as values of JSON."""
        weights = self.weights
        if weights is None:
            raise InputError(f"the weights of {self.name} cannot all be read, so its forward cannot be compiled")
        return {
            "shape": self.shape,
            "weights": weights,
            # A library serves every number of threads.
            "machine": {k: v for k, v in remembered.machine(torch.device("cpu")).items() if k != "threads"},
            "source": {name: _digest(file) for name, file in self.sources.items()},
            "kernels": {file.name: _digest(file) for file in shims.SOURCES},
            **self.choices,
        }

    @torch.no_grad()
    def _compile(self, folder: Path) -> None:
        """Write the library into a folder."""
        # Slow to import, and rarely needed.
        import torch._inductor as inductor
        import torch._inductor.config as settings
        from torch.fx.experimental import _config as shapes

        options = _options(next(self.parts[0].parameters()).dtype)
        with _scratch(), shapes.patch(backed_size_oblivious=True), settings.patch(options):  # type: ignore[attr-defined]
            module, inputs, sizes = self.traced()
            exported = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=False)
            _refuse(foreign(exported) - shims.NAMES)
            if foreign(exported) & shims.NAMES and not shims.load():
                raise RuntimeError(WITHOUT_A_COMPILER)
            graph: Any = exported.module(check_guards=False)
            fuse_gates(graph, shims.PRODUCTS)
            with settings.patch(SERIAL if _products_are_ours(exported) else {}):
                written: Any = inductor.aot_compile(graph, *exported.example_inputs)
            paths = [Path(path) for path in written if isinstance(path, str)]
            source = next(path for path in paths if path.name.endswith(SOURCE)).read_text(encoding="utf-8")
            blob = next(path for path in paths if path.suffix == BLOB)
            constants = keep(source, blob, self._store, tensors_of(self.parts))
            files.replace(folder / INDEX, as_index(constants), mode=0o600)
            calls = [json.loads(path.read_bytes()) for path in paths if path.name.endswith(CALLED)]
            _refuse({each["node"]["target"] for call in calls for each in call.get("nodes", ())})
            shutil.copyfile(next(path for path in paths if path.suffix == ".so"), folder / LIBRARY)


def delete_unused(folder: Path) -> None:
    """Delete libraries that nobody has opened for a month, constants that no library has, and what compilations that
    were cut off have left.

    Args:
        folder: Holds a folder of libraries for each shape of a model.
    """
    now = time.time()
    for pattern, most in ((f"*/*/{KEY}", UNUSED), ("*/.*/", ABANDONED)):
        for path in folder.glob(pattern):
            with suppress(OSError):
                if now - path.stat().st_mtime > most:
                    shutil.rmtree(path.parent if path.name == KEY else path, ignore_errors=True)
    used = set()
    for index in folder.glob(f"*/*/{INDEX}"):
        with suppress(OSError, ValueError):
            used |= {each.file for each in read(index)}
    for path in (folder / STORE).glob("*"):
        with suppress(OSError):
            # The index of a library that is being made is not there yet.
            if path.name not in used and now - path.stat().st_mtime > ABANDONED:
                path.unlink()


def sources(modules: Iterable[str]) -> dict[str, Path]:
    """The files of modules of source, and of what they import from their own package, by their names in order.

    Modules of Python, torch and transformers are left out.
    """
    source_files: dict[str, Path] = {}
    left = [name for name in modules if name.partition(".")[0] not in VERSIONED]
    while left:
        name = left.pop()
        if name not in source_files and (file := _file(name)) is not None:
            source_files[name] = file
            left += _imports(name, file)
    return dict(sorted(source_files.items()))


@functools.cache
def _imports(module: str, file: Path) -> frozenset[str]:
    """What a module imports from its own package, anywhere in its source."""
    package = module.split(".")[0 : None if file.name == "__init__.py" else -1]
    imported = set()
    for node in _statements(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            # A name may be a module, or something within one.
            inner = {f"{base}.{alias.name}" for alias in node.names}
            modules = {name for name in inner if _within(name, module) and _file(name) is not None}
            imported |= modules if modules == inner else {*modules, base}
    return frozenset(name for name in imported if _within(name, module))


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements within a node of a syntax tree, at any depth. Expressions, most of the tree, are passed over."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        # The body of a lambda is an expression, no list.
        if isinstance(children := getattr(node, field, None), list):
            for child in children:
                yield child
                yield from _statements(child)


def _within(name: str, module: str) -> bool:
    """Whether two modules are of the same package."""
    return name.partition(".")[0] == module.partition(".")[0]


def _file(module: str) -> Path | None:
    """A module's file of source; None if it has none."""
    place = getattr(sys.modules.get(module), "__file__", None)
    if place is None:
        with suppress(ImportError, ValueError):
            place = getattr(importlib.util.find_spec(module), "origin", None)
    return Path(place) if place is not None and place.endswith(".py") else None


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


@contextmanager
def _scratch() -> Iterator[None]:
    """Let the compiler write into a folder that nobody else can write to. It runs what it has compiled, and the folder
    that it takes otherwise can be made by anybody: its name in /tmp is known. Meanwhile the path of torch's own
    libraries is quoted: before 2.14 torch writes it into the compiler's command as it is, and a space would end it.
    """
    from torch._inductor.utils import clear_caches
    from torch.utils import cpp_extension

    name = "TORCHINDUCTOR_CACHE_DIR"
    before, libraries = os.environ.get(name), cpp_extension.TORCH_LIB_PATH
    with tempfile.TemporaryDirectory(prefix="outrider-", ignore_cleanup_errors=True) as folder:
        clear_caches()
        os.environ[name] = folder
        cpp_extension.TORCH_LIB_PATH = libraries if Version(torch.__version__) >= QUOTES else shlex.quote(libraries)
        try:
            yield
        finally:
            cpp_extension.TORCH_LIB_PATH = libraries
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before
            clear_caches()


def _options(dtype: torch.dtype) -> dict[str, Any]:
    """How the compiler makes a library."""
    gemm_options = {"max_autotune_gemm": True, "max_autotune_gemm_backends": "CPP"}
    return {
        "freezing": True,
        "cpp.dynamic_threads": True,
        # Products in one part have no parallel loop.
        "cpp.threads": max(2, os.cpu_count() or 1),
        "aot_inductor.package": True,
        "aot_inductor.package_constants_on_disk_format": "binary_blob",
        "aot_inductor.custom_ops_to_c_shims": shims.DECLARATIONS,
        **(gemm_options if _own_products(dtype) else {}),
    }


def operators(exported: torch.export.ExportedProgram) -> set[torch._ops.OpOverload]:
    """The operators that an exported graph calls."""
    graphs = [module.graph for module in exported.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    targets = {node.target for graph in graphs for node in graph.nodes}
    return {each for each in targets if isinstance(each, torch._ops.OpOverload)}


def foreign(exported: torch.export.ExportedProgram) -> set[str]:
    """The operators of an exported graph that are not torch's own."""
    return {each.name() for each in operators(exported) if each.namespace not in OWN}


def _products_are_ours(exported: torch.export.ExportedProgram) -> bool:
    """Whether an exported graph computes its products by our operators, so that all else is small."""
    names = {each.name() for each in operators(exported)}
    return not names.isdisjoint(shims.NAMES) and names.isdisjoint(PRODUCTS)


def _refuse(unknown: set[str]) -> None:
    """Raise RuntimeError if there are operators that the compiler does not know."""
    if unknown:
        raise RuntimeError(f"it calls {', '.join(sorted(unknown))}, which the compiler does not know")


def _own_products(dtype: torch.dtype) -> bool:
    """Whether the compiler writes matrix products itself. oneDNN's know more instructions for bfloat16 than they do."""
    if dtype == torch.float64:
        return False
    bare = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    return not (dtype == torch.bfloat16 and bare)
