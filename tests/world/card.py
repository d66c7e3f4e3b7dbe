"""A GPU for tests on machines without one: tensors that say that they are on `cuda:0` while their data are on the CPU.

Control flow and values are real. Mixed devices raise, and operations, uploads, synchronisations and bytes that go to
the host are counted:

    with gpu() as card:
        model = llama().to(DEVICE)
        engine = outrider.load(model, drafter="ngram", forward="eager")
        engine.add([5, 6, 7, 5, 6], max_new_tokens=50)
        engine.step()
        counts = card.count(engine.step)
    assert counts.synchronisations <= 1, counts

A failing assertion prints the counts with the lines of the package that caused them. Everything is made and run within
`gpu()`. Counts are of operations, not of kernels: one operation may start several kernels.

What it cannot show: times; inference mode (it is `no_grad` here); other threads, because a dispatch mode belongs to one
thread, so PEARL is not covered; code that is compiled; graphs of CUDA.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tests import shapes
from tests.world.package import PACKAGE

DEVICE = torch.device("cuda:0")
MEMORY = 2**37
"""Bytes of memory that the GPU says it has free."""
STARTS_NOTHING = {
    "_reshape_alias",
    "_unsafe_view",
    "empty",
    "empty_like",
    "empty_strided",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
}
"""Operations that start no kernel; views start none either."""
WAITS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
}
"""Operations that wait until a GPU has finished: the sizes of their results, or the results, are needed on the host."""
COPIES = {"_to_copy", "copy_"}
TAKES_ANY_INDEX = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Operations that upload an index that is on the CPU."""


@dataclass(kw_only=True)
class Counts:
    """What some code asked of the GPU.

    Attributes:
        operations: Operations outside models.
        in_models: Operations inside models: a method of a module is running.
        uploads: Copies from the host to the GPU.
        blocking_uploads: Uploads that wait for the GPU; they are among the synchronisations too.
        synchronisations: How often the host waited for the GPU.
        host_bytes: Bytes copied to the host.
        largest_copy: Numbers in the largest copy to the host.
        places: How often each kind of event was caused by each line of the package, with its callers. Operations
            inside models have no place.
    """

    operations: int = 0
    in_models: int = 0
    uploads: int = 0
    blocking_uploads: int = 0
    synchronisations: int = 0
    host_bytes: int = 0
    largest_copy: int = 0
    places: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        numbers = {name: value for name, value in vars(self).items() if name != "places"}
        return "\n".join([str(numbers), *(f"{count:5} {place}" for place, count in self.places.most_common())])

    __repr__ = __str__

    def note(self, event: str) -> None:
        """Count an event at the line that caused it."""
        self.places[f"{event} {_place()}"] += 1

    def operation(self, name: str) -> None:
        """Count an operation that starts a kernel."""
        if _in_model():
            self.in_models += 1
        else:
            self.operations += 1
            self.note(name)

    def upload(self, *, blocking: bool) -> None:
        """Count a copy to the GPU."""
        self.uploads += 1
        self.blocking_uploads += blocking
        self.synchronisations += blocking
        self.note("blocking upload" if blocking else "upload")

    def wait(self, event: str, copied: Tensor | None = None) -> None:
        """Count a synchronisation, and what it copies to the host."""
        self.synchronisations += 1
        if copied is not None:
            self.host_bytes += copied.nbytes
            self.largest_copy = max(self.largest_copy, copied.numel())
        self.note(f"synchronisation by {event}")


class Uncounted(Counts):
    """Counts of what nobody counts: reading the stack at each operation takes longer than the operation."""

    def operation(self, name: str) -> None:
        """Nothing."""

    def upload(self, *, blocking: bool) -> None:
        """Nothing."""

    def wait(self, event: str, copied: Tensor | None = None) -> None:
        """Nothing."""


class Card(Tensor):
    """A tensor that says that it is on the GPU. To torch's dispatcher it is on the meta device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Card":
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner = inner
        return made

    device = property(lambda self: DEVICE)
    is_cuda = property(lambda self: True)
    is_cpu = is_meta = property(lambda self: False)
    # Read at every check of shapes; torch would ask `__torch_function__` each time.
    dtype = property(lambda self: self.inner.dtype)
    shape = property(lambda self: self.inner.shape)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Card({self.inner})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("numpy", "__array__"):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "tolist":
            _working().counts.wait("tolist", args[0].inner)
            return args[0].inner.tolist()
        if name in ("data_ptr", "untyped_storage"):
            return getattr(args[0].inner, name)()
        if name == "new_tensor":
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, "device": DEVICE} | (kwargs or {}))
        if name in ("__getitem__", "__setitem__"):
            args = (args[0], _index(args[1]), *args[2:])
        if name == "__deepcopy__":
            copied = Card(args[0].inner.clone())
            return nn.Parameter(copied, requires_grad=False) if isinstance(args[0], nn.Parameter) else copied
        card = _working()
        card.depth += 1
        try:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        finally:
            card.depth -= 1

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _working().run(func, args, kwargs or {})


shapes.ARRAYS.add(Card)


class Gpu(TorchDispatchMode):
    """Runs operations on the data of cards, and counts them.

    Attributes:
        counts: What is counted now.
        depth: How many functions of torch with cards are running, one within the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counts = Uncounted()
        self.depth = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch need not keep its compiler away from each operation."""
        return False

    def count(self, function: Callable[[], object]) -> Counts:
        """What a function asks of the GPU."""
        before, self.counts = self.counts, Counts()
        try:
            function()
            return self.counts
        finally:
            self.counts = before

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        flat = [*_leaves(args), *_leaves(kwargs.values())]
        cards = [a for a in flat if isinstance(a, Card)]
        device = _device(flat, kwargs)
        name = func._schema.name.partition("::")[2]
        here = bool(cards)
        if device is not None:
            # To torch's dispatcher cards are on the meta device, and so is what a function of theirs makes beside them.
            # Models that are read from disk are first made there too.
            here = device.type == "cuda" or (device.type == "meta" and (here or self.depth > 0 or name == "_to_copy"))
        if not (cards or here):
            return func(*args, **kwargs)
        if name == "record_stream":
            return None
        if name == "_to_copy" and cards and here and kwargs.get("dtype") in (None, cards[0].dtype):
            # To torch's dispatcher the tensor is elsewhere; on a GPU it would be where it shall be.
            return cards[0]
        plain = [a for a in flat if isinstance(a, Tensor) and not isinstance(a, Card)]
        if any(tensor.is_meta for tensor in plain):
            raise RuntimeError(f"{func} got a tensor without data: it was made on the GPU beside the dispatcher")
        if name in COPIES:
            self._copy(name, args, kwargs, here)
        else:
            self._check(func, name, plain)
            self._start(func, name, flat, cards)
        given = {id(card.inner): card for card in cards}
        made = func(*map(_unwrapped, args), **{key: _unwrapped(value) for key, value in kwargs.items()})
        return _wrapped(made, given) if here else made

    def _check(self, func: Any, name: str, plain: Sequence[Tensor]) -> None:
        """Raise where devices are mixed. A number on the CPU may go with tensors on a GPU, and an index is uploaded."""
        for tensor in plain:
            if tensor.dim() == 0:
                continue
            if name not in TAKES_ANY_INDEX:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {func} got a tensor of shape "
                    f"{tuple(tensor.shape)} on the CPU beside tensors on {DEVICE}, at {_place()}"
                )
            self.counts.upload(blocking=True)

    def _copy(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], here: bool) -> None:
        """Count a copy within the GPU, to it or from it."""
        target, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
        to_card = isinstance(target, Card) if name == "copy_" else here
        if not isinstance(source, Card):
            soon = kwargs.get("non_blocking", name == "copy_" and len(args) > 2 and args[2])
            self.counts.upload(blocking=not soon)
        elif not to_card:
            self.counts.wait(name, source.inner)
        else:
            self.counts.operation(name)

    def _start(self, func: Any, name: str, flat: Sequence[Any], cards: Sequence[Card]) -> None:
        """Count an operation that is no copy."""
        if name in WAITS and cards:
            self.counts.wait(name, cards[0].inner if name == "_local_scalar_dense" else None)
        elif name in TAKES_ANY_INDEX and any(card.dtype == torch.bool for card in cards[1:]):
            self.counts.wait(f"{name} by a mask")
        if name not in STARTS_NOTHING and name != "_local_scalar_dense" and not func.is_view:
            self.counts.operation(name)


_WORKING: list[Gpu] = []


def _working() -> Gpu:
    if not _WORKING:
        raise RuntimeError("a tensor on the card is used outside gpu()")
    return _WORKING[-1]


@contextmanager
def gpu() -> Iterator[Gpu]:
    """Plug in the GPU, for this thread."""
    card, tensor, as_tensor = Gpu(), torch.tensor, torch.as_tensor

    def uploaded(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Constructors of tensors leave out the dispatcher; a GPU's tensor is made on the CPU and copied."""

        def made(data: object, *, device: object = None, **more: Any) -> Tensor:
            if device is None or torch.device(device).type == "cpu":
                return make(data, device=device, **more)
            return make(data, **more).to(device)

        return made

    def enter(context: Any) -> None:
        context.grad = torch.is_grad_enabled()
        torch.set_grad_enabled(context.grad and not context.mode)

    def leave(context: Any, *error: object) -> None:
        torch.set_grad_enabled(context.grad)

    # It remembers which functions make tensors, for ever, and must know the real ones.
    _device_constructors()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", uploaded(tensor))
        patch.setattr(torch, "as_tensor", uploaded(as_tensor))
        # In inference mode the dispatcher sees operations before they are taken apart into simple ones.
        patch.setattr(torch.inference_mode, "__enter__", enter)
        patch.setattr(torch.inference_mode, "__exit__", leave)
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "synchronize", lambda device=None: card.counts.wait("synchronize"))
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (MEMORY, MEMORY))
        patch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
        patch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
        patch.setattr(torch.cuda, "get_device_name", lambda device=None: "card")
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        # transformers allocates memory on a device before it reads weights there.
        patch.setattr("outrider.lm.hf.open.straight_to", lambda device: None)
        _WORKING.append(card)
        try:
            with torch.no_grad(), card:
                yield card
        finally:
            _WORKING.pop()


@contextmanager
def unplugged() -> Iterator[None]:
    """Within this context operations are those of a machine without the GPU, and take as long."""
    with _disable_current_modes():
        yield


def _device(flat: Sequence[Any], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that an operation names."""
    named = kwargs.get("device")
    return next((a for a in flat if isinstance(a, torch.device)), None) if named is None else torch.device(named)


def _leaves(values: Iterable[Any]) -> Iterator[Any]:
    """The values, and the parts of those that are lists."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from value
        else:
            yield value


def _index(index: object) -> object:
    """An index with tensors in place of lists and arrays, which torch makes on the GPU beside the dispatcher."""
    if isinstance(index, tuple):
        return tuple(_index(part) for part in index)
    return torch.tensor(index) if isinstance(index, list | np.ndarray) else index


def _unwrapped(value: Any) -> Any:
    if isinstance(value, Card):
        return value.inner
    if isinstance(value, list | tuple):
        return type(value)(map(_unwrapped, value))
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrapped(value: Any, given: Mapping[int, Card]) -> Any:
    """Results as cards; what was given in comes back as it is."""
    if isinstance(value, list | tuple):
        return type(value)(_wrapped(part, given) for part in value)
    if not isinstance(value, Tensor):
        return value
    return given[id(value)] if id(value) in given else Card(value)


def _frames() -> Iterator[FrameType]:
    """What is running, the innermost first, up to the function that is counted."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not Gpu.count.__code__:
        yield frame
        frame = frame.f_back


def _in_model() -> bool:
    """Whether a method of a module is running."""
    methods = (frame for frame in _frames() if frame.f_code.co_varnames[:1] == ("self",))
    return any(isinstance(frame.f_locals.get("self"), nn.Module) for frame in methods)


def _place(most: int = 3) -> str:
    """The line of the package that is running, and the lines that called it."""
    lines = (
        f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        for frame in _frames()
        if frame.f_code.co_filename.startswith(PACKAGE)
    )
    return " < ".join(islice(lines, most)) or "elsewhere"
