"""What all tests share: shapes checked at run time, one thread (models are tiny), no network, a cache folder of
their own, draft lengths that no clock chooses, float64 on request."""

import functools
import gc
import getpass
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["OMP_NUM_THREADS"] = "1"  # For the processes that tests start.

from tests import shapes

shapes.check("outrider", "recipes.inquiry")

import pytest  # noqa: E402 (the hook must come first)
import torch  # noqa: E402
import typer  # noqa: E402
from torch import Tensor  # noqa: E402

from tests import clocks  # noqa: E402
from tests.world.dice_draws import make_fewer  # noqa: E402

clocks.stop()
torch.set_num_threads(1)
# A process of a user makes the commands once, and so does a process of tests.
typer.main.get_command = functools.cache(typer.main.get_command)
_CACHE = tempfile.TemporaryDirectory(prefix="outrider-")
os.environ["OUTRIDER_CACHE"] = _CACHE.name
# Building C++ takes longer than any test of it. The names of what is built say all that it depends on.
_BUILT = Path(tempfile.gettempdir()) / f"outrider-native-{getpass.getuser()}"
_BUILT.mkdir(mode=0o700, exist_ok=True)
(Path(_CACHE.name) / "native").symlink_to(_BUILT)

_LOOKED = [0]
"""How often all objects were looked through when they were frozen last."""
_LOW = (torch.float32, torch.float16, torch.bfloat16)


def pytest_collection_finish() -> None:
    """What was imported stays, so that no collection of garbage looks through it again."""
    gc.freeze()


def pytest_runtest_setup() -> None:
    """Shapes of the first calls in this test are checked."""
    shapes.begin_test()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """The same for what a file of tests has imported, if all objects were looked through since the last time."""
    yield
    if (nextitem is None or nextitem.path != item.path) and gc.get_stats()[2]["collections"] > _LOOKED[0]:
        gc.collect()
        gc.freeze()
        _LOOKED[0] = gc.get_stats()[2]["collections"]


@pytest.fixture
def float64_stays_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cast within the test takes a float64 tensor, or a whole number, to a lower floating type: transformers
    casts to float32 in norms, softmaxes, rotary tables and routers, and loads the weights of some routers in it.
    """
    to, kind, softmax, tensor_softmax = Tensor.to, Tensor.type, torch.nn.functional.softmax, Tensor.softmax
    linear, matmul = torch.nn.functional.linear, Tensor.__matmul__

    def wide(tensor: Tensor, dtype: object) -> object:
        keeps = tensor.dtype == torch.float64 or not tensor.is_floating_point()
        return torch.float64 if isinstance(dtype, torch.dtype) and dtype in _LOW and keeps else dtype

    def patched_to(self: Tensor, *args: object, **named: object) -> Tensor:
        args = tuple(wide(self, a) for a in args)
        named = {k: wide(self, v) for k, v in named.items()}
        return to(self, *args, **named)

    def patched_type(self: Tensor, *args: object, **named: object) -> object:
        return kind(self, *[wide(self, a) for a in args], **named)

    def patched_softmax(tensor: Tensor, *args: object, dtype: object = None, **named: object) -> Tensor:
        return softmax(tensor, *args, dtype=wide(tensor, dtype), **named)

    def patched_tensor_softmax(self: Tensor, *args: object, dtype: object = None, **named: object) -> Tensor:
        return tensor_softmax(self, *args, dtype=wide(self, dtype), **named)

    def patched_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(inputs, to(weight, torch.float64) if inputs.dtype == torch.float64 else weight, bias)

    def patched_matmul(self: Tensor, other: Tensor) -> Tensor:
        # Tables of rotary positions are float32, and whole numbers became float64.
        both = torch.promote_types(self.dtype, other.dtype)
        return matmul(to(self, both), to(other, both))

    monkeypatch.setattr(Tensor, "__matmul__", patched_matmul)
    monkeypatch.setattr(Tensor, "to", patched_to)
    monkeypatch.setattr(Tensor, "float", lambda self: patched_to(self, torch.float32))
    monkeypatch.setattr(Tensor, "type", patched_type)
    monkeypatch.setattr(torch.nn.functional, "softmax", patched_softmax)
    monkeypatch.setattr(torch.nn.functional, "linear", patched_linear)
    monkeypatch.setattr(Tensor, "softmax", patched_tensor_softmax)


@pytest.fixture
def clocked() -> Iterator[None]:
    """Draft lengths follow the clock, as users have it."""
    with clocks.running():
        yield


@pytest.fixture
def fewer_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The law of the dice is tested with fewer draws, where a test is about something else."""
    make_fewer(monkeypatch)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Weights that a test draws are the same in every run and in any order."""
    torch.manual_seed(0)
