"""Float64 all the way: transformers casts to float32 in norms, softmaxes, rotary tables and routers."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

_LOW = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def float64_stays_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within these tests no cast takes a float64 tensor, or a whole number, to a lower floating type."""
    to, kind, softmax, tensor_softmax = Tensor.to, Tensor.type, torch.nn.functional.softmax, Tensor.softmax

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

    monkeypatch.setattr(Tensor, "to", patched_to)
    monkeypatch.setattr(Tensor, "float", lambda self: patched_to(self, torch.float32))
    monkeypatch.setattr(Tensor, "type", patched_type)
    monkeypatch.setattr(torch.nn.functional, "softmax", patched_softmax)
    monkeypatch.setattr(Tensor, "softmax", patched_tensor_softmax)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny products are far slower on many threads than on one, most of all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
