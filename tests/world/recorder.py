"""Recording without a GPU: a replay calls the function again, and raises where a CUDA graph would compute another
thing.

A graph repeats operations with the same numbers on the same memory. So the twin notes each operation with its plain
arguments, and where the tensors lie that the function did not make itself, and compares that at every replay. It writes
nonsense into the inputs behind each replay, so that nobody forgets to fill one, and into the outputs of all recordings
before the next one, so that nobody reads them late.

    @pytest.fixture
    def replaying(monkeypatch):
        monkeypatch.setitem(RECORDERS, "cpu", CheckedRecorder)
"""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from outrider.lm.forwards.recorder import Function

WAITS = ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "equal", "_unique2", "bincount")
"""Operations that wait for a GPU, which a graph cannot do. In inference mode, some are not split into smaller ones."""
FROM_HOST = ("lift_fresh",)
"""Operations that make a tensor of numbers of the host, which may be gone when a graph is replayed."""
NONSENSE = -(2**31)


class CheckedRecorder:
    """Stands for `CudaRecorder`.

    Attributes:
        num_recorded: Functions recorded so far, by all recorders.
        num_replays: Replays so far, by all recorders.
    """

    num_recorded = num_replays = 0

    def __init__(self, device: torch.device) -> None:
        self._outputs: list[Tensor] = []

    def record(self, run: Function, inputs: Sequence[Tensor]) -> "CheckedRecording":
        with _Trace() as trace:
            found = run()
        outputs = [output.clone() for output in found]
        CheckedRecorder.num_recorded += 1
        self._outputs += outputs
        return CheckedRecording(self, run, list(inputs), outputs, trace)

    def spoil_outputs(self) -> None:
        """The memory of all outputs belongs to the next replay."""
        for output in self._outputs:
            spoil(output)


class CheckedRecording:
    """Stands for `CudaRecording`."""

    def __init__(
        self, recorder: CheckedRecorder, run: Function, inputs: list[Tensor], outputs: list[Tensor], trace: "_Trace"
    ) -> None:
        self._recorder, self._run, self._inputs, self.outputs, self._trace = recorder, run, inputs, outputs, trace

    def replay(self) -> None:
        self._recorder.spoil_outputs()
        with _Trace() as trace:
            found = self._run()
        for number, (then, now) in enumerate(zip_longest(self._trace.calls, trace.calls)):
            assert then == now, f"operation {number} was recorded as {then} and would have to be {now}"
        for output, value in zip(self.outputs, found, strict=True):
            output.copy_(value)
        for tensor in self._inputs:
            spoil(tensor)
        CheckedRecorder.num_replays += 1


def spoil(tensor: Tensor) -> None:
    """Overwrite a tensor with what no computation survives."""
    if tensor.dtype == torch.bool:
        tensor.zero_()
    else:
        tensor.fill_(torch.nan if tensor.is_floating_point() else NONSENSE)


class _Trace(TorchDispatchMode):
    """Notes the operations within its body.

    Attributes:
        calls: For each operation its name, its plain arguments, and for each tensor where it lies if it comes from
            outside, otherwise nothing but its shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []
        # What was seen stays alive, so that no two tensors have one address.
        self._inner: dict[int, Tensor] = {}
        self._outer: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in (*WAITS, *FROM_HOST):
            raise RuntimeError(f"operation {name} is not permitted while a graph is recorded\nand more lines")
        given = tree_flatten((args, kwargs or {}))[0]
        self.calls.append((name, *(self._place(x) if isinstance(x, Tensor) else repr(x) for x in given)))
        found = func(*args, **(kwargs or {}))
        for made in tree_flatten(found)[0]:
            if isinstance(made, Tensor) and (at := _address(made)) not in self._outer:
                self._inner[at] = made
        return found

    def _place(self, tensor: Tensor) -> object:
        form = (str(tensor.dtype), tuple(tensor.shape), tensor.stride())
        if (at := _address(tensor)) in self._inner:
            return form
        self._outer[at] = tensor
        return (at, tensor.storage_offset(), *form)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
