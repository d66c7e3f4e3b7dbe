"""Which compiled libraries stay on disk, and which of those that lie there are opened."""

import ast
import importlib
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch.utils import cpp_extension

from outrider.core import files
from outrider.core.types import InputError
from outrider.host import remembered
from outrider.lm.fingerprint import fingerprint
from outrider.lm.forwards import libraries
from outrider.lm.forwards.libraries import KEY, LIBRARY, Library, delete_unused
from outrider.lm.model import LanguageModel
from tests.world.compiling import needs_compiler
from tests.world.full_disk import small_files
from tests.world.models import llama

DAY = 86400


def test_torch_may_lie_below_a_folder_with_a_space_in_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = f"{tmp_path}/my dir é/lib"
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", own)
    with libraries._scratch():
        options = CppTorchDeviceOptions(vec_isa=pick_vec_isa(), device_type="cpu")
        command = CppBuilder(name="any", sources=["any.cpp"], BuildOption=options).get_command_line()
    assert f"-L{own}" in shlex.split(command)
    assert own == cpp_extension.TORCH_LIB_PATH


@dataclass(frozen=True, kw_only=True)
class Layer(Library):
    """A linear layer as a library."""

    layer: nn.Module

    @property
    def name(self) -> str:
        return "layer"

    @property
    def num_layers(self) -> int:
        return 1

    @property
    def parts(self) -> list[nn.Module]:
        return [self.layer]

    @property
    def shape(self) -> str:
        return "4 to 4"

    @property
    def weights(self) -> str | None:
        return fingerprint(self.layer)

    @property
    def choices(self) -> Mapping[str, Any]:
        return {}

    def traced(self) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
        return self.layer, (torch.ones(3, 4),), ({0: torch.export.Dim("rows", min=1, max=99)},)


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer(layer=nn.Linear(4, 4))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the library of the layer, made anew in place of a damaged one, while the umask is 0."""
    place = tmp_path_factory.mktemp("made") / "cache"
    before = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OUTRIDER_CACHE", str(place))
            remembered.write("costs", {}, {})
            damaged = layer().folder
            damaged.mkdir(parents=True)
            (damaged / LIBRARY).write_bytes(b"\x7fELF")
            (damaged / KEY).write_text("{}")
            for place_above in damaged.parents[:2]:
                place_above.chmod(0o700)
            assert layer().open() is not None
    finally:
        os.umask(before)
    return place


@pytest.fixture
def kept(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the layer's library, in a cache folder of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    shutil.copytree(made, tmp_path / "cache")
    return layer().folder


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda place: os.truncate(place / LIBRARY, 5000),
    "empty": lambda place: os.truncate(place / LIBRARY, 0),
    "a bit flipped": lambda place: flip(place / LIBRARY),
    "not there": lambda place: (place / LIBRARY).unlink(),
    "a pipe": lambda place: pipe(place / LIBRARY),
    "a folder": lambda place: folder(place / LIBRARY),
    "a link to a device": lambda place: [(place / LIBRARY).unlink(), (place / LIBRARY).symlink_to("/dev/zero")],
    "key not there": lambda place: (place / KEY).unlink(),
    "key a pipe": lambda place: pipe(place / KEY),
    "key of another": lambda place: (place / KEY).write_text((place / KEY).read_text().replace("machine", "engine")),
    "key deep": lambda place: (place / KEY).write_text("[" * 100_000),
    "a pipe in place of the folder": lambda place: [shutil.rmtree(place), os.mkfifo(place)],
    "a link to nowhere": lambda place: [shutil.rmtree(place), place.symlink_to(place / "loop")],
}
FOREIGN: dict[str, Callable[[Path], object]] = {
    "others may write the library": lambda place: (place / LIBRARY).chmod(0o602),
    "the group may write the library": lambda place: (place / LIBRARY).chmod(0o620),
    "others may write the key": lambda place: (place / KEY).chmod(0o602),
    "others may write its folder": lambda place: place.chmod(0o702),
    "others may write the cache folder": lambda place: place.parent.parent.parent.chmod(0o777),
    "another's library": lambda place: os.chown(place / LIBRARY, 12345, -1),
    "another's cache folder": lambda place: os.chown(place.parent.parent.parent, 12345, -1),
}


@needs_compiler
def test_a_library_made_under_any_umask_is_opened_again(kept):
    states, library = torch.randn(5, 4), layer()
    assert library.exists()
    assert torch.allclose(library.opened().run([states])[0], library.layer(states), atol=1e-6)
    assert {path.stat().st_mode & 0o077 for path in [*kept.iterdir(), *kept.parents[:3]]} == {0}


@needs_compiler
def test_a_library_that_is_opened_may_use_matrix_units(kept, monkeypatch):
    asked, ask = list[bool](), torch.cpu._init_amx
    monkeypatch.setattr(torch.cpu, "_init_amx", lambda: asked.append(ask()))
    assert layer().opened() is not None
    assert asked == [ask()]


@needs_compiler
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_never_opened_and_that_is_said(kept, damage, caplog):
    DAMAGES[damage](kept)
    assert layer().opened() is None
    assert not layer().exists()
    said = [record.getMessage() for record in caplog.records]
    assert said == [] if not kept.is_dir() else "is damaged; `outrider prepare` makes it anew" in said[0]
    assert len(said) < 2


@needs_compiler
@pytest.mark.parametrize("change", FOREIGN)
def test_a_library_that_others_can_have_written_is_never_opened_and_that_is_said(kept, change, caplog):
    if "another's" in change and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    FOREIGN[change](kept)
    assert layer().opened() is None
    [said] = [record.getMessage() for record in caplog.records]
    assert "belongs to another user" in said or "chmod go-w" in said


@needs_compiler
@pytest.mark.parametrize("damage", ["cut off", "a pipe in place of the folder", "a link to nowhere"])
def test_a_new_library_takes_the_place_of_whatever_lies_there(kept, damage):
    shutil.copytree(kept, kept.with_name(".fresh"))
    DAMAGES[damage](kept)
    layer()._keep(kept.with_name(".fresh"))
    assert layer().opened() is not None
    assert list(kept.parent.iterdir()) == [kept]


def test_no_library_is_made_where_others_may_write(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=rf"other users may write to {tmp_path} \(chmod go-w.*set OUTRIDER_CACHE"):
        layer().make()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_everybody_may_write_and_nobody_may_rename_in_is_as_good_as_any(tmp_path):
    tmp_path.chmod(0o1777)
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o600)
    assert files.distrusted(tmp_path / "file") is None


@pytest.mark.parametrize("place", ["/dev/null", "file", "file/below"])
def test_a_cache_that_is_no_folder_is_a_sentence(tmp_path, monkeypatch, place):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / place))
    assert not layer().exists()
    with pytest.raises(InputError, match="which cannot be written: Not a directory; set OUTRIDER_CACHE"):
        layer().make()
    assert (tmp_path / "file").read_text() == "mine"


def test_what_cannot_be_written_while_compiling_is_a_sentence_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    message = r"the forward of layer cannot be compiled ahead of time: .*File too large"
    with small_files(1000), pytest.raises(InputError, match=message):
        layer().make()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert [path.name for path in layer().folder.parent.iterdir()] == []


def test_a_changed_dependency_of_any_depth_gives_another_key(tmp_path, monkeypatch):
    package = tmp_path / "twofold_layers"
    (package / "inner").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "inner" / "__init__.py").write_text("")
    (package / "layers.py").write_text(
        "from torch import nn\n\nfrom .inner import factor\n\nclass Twice(nn.Linear):\n"
        "    def forward(self, states):\n        return factor.FACTOR * super().forward(states)\n"
    )
    (package / "inner" / "factor.py").write_text("def _():\n    import twofold_layers.late\n\nFACTOR = 2\n")
    (package / "late.py").write_text("")
    (package / "other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    twice = importlib.import_module("twofold_layers.layers").Twice(4, 4)
    found = [Layer(layer=twice).folder]
    for file in ("layers.py", "inner/factor.py", "late.py"):
        with (package / file).open("a") as source:
            source.write("# Changed.\n")
        importlib.invalidate_caches()
        libraries._imports.cache_clear()
        found.append(Layer(layer=twice).folder)
    assert len(set(found)) == 4
    (package / "other.py").write_text("# Changed.\n")
    assert Layer(layer=twice).folder == found[-1]
    for name in [name for name in sys.modules if name.startswith("twofold_layers")]:
        del sys.modules[name]


def test_imports_within_any_statement_are_found():
    source = """
import a
if a:
    import b
elif (lambda: 3)():
    import c
else:
    for _ in a:
        import d
    else:
        from e import f
class G:
    async def h(self):
        with self:
            try:
                import i
            except ImportError:
                import j
            else:
                while 1:
                    import k
            finally:
                match self:
                    case 1:
                        import l
"""
    tree, imports = ast.parse(source), (ast.Import, ast.ImportFrom)
    everywhere = {node.lineno for node in ast.walk(tree) if isinstance(node, imports)}
    assert len(everywhere) == source.count("import ") == 9
    assert {node.lineno for node in libraries._statements(tree) if isinstance(node, imports)} == everywhere


def test_the_key_of_a_model_covers_every_file_that_is_traced():
    forwards = {f"forwards.{name}" for name in ("compilable", "grouped", "libraries", "merged", "package", "twin")}
    others = {"hf.anatomy", "hf.taps", "hf.weights", "slots.batch", "slots.masks", "slots.window"}
    assert {f"outrider.lm.{name}" for name in forwards | others} <= set(LanguageModel(llama()).package.sources)


def library(shelf: Path, name: str, days: float) -> Path:
    """A library that was last opened so many days ago."""
    place = shelf / name
    place.mkdir(parents=True)
    (place / KEY).write_text("{}")
    for path in (place / KEY, place):
        os.utime(path, (time.time() - days * DAY,) * 2)
    return place


def test_libraries_that_nobody_opens_and_what_was_cut_off_are_deleted(tmp_path):
    old, used = library(tmp_path / "llama-1", "a", 31), library(tmp_path / "llama-1", "b", 29)
    other = library(tmp_path / "gemma-2", "c", 400)
    left, running = tmp_path / "llama-1" / ".left", tmp_path / "llama-1" / ".running"
    for place, days in ((left, 2.0), (running, 0.1)):
        place.mkdir()
        os.utime(place, (time.time() - days * DAY,) * 2)
    (tmp_path / "note").write_text("mine")
    delete_unused(tmp_path)
    assert [path.exists() for path in (old, used, other, left, running)] == [False, True, False, False, True]
    assert (tmp_path / "note").exists()
    delete_unused(tmp_path / "nowhere")
