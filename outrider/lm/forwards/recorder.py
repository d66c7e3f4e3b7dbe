"""Recording the operations of a function once and replaying them without its Python: CUDA graphs on a GPU.

Relied on in torch (read in 2.13): `torch.cuda.graph` with a pool that several graphs share. Each graph may write over
the outputs of the others, so an output is valid until any graph of the pool is replayed.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

WARM_UPS = 2
"""How often a function runs before it is recorded: the first calls choose kernels and take workspaces."""
_ONE_AT_A_TIME = threading.Lock()
"""Recording begins by waiting for the whole GPU, which is not allowed while another thread records."""
Function = Callable[[], Sequence[Tensor]]
"""Computes its outputs from tensors that it holds."""


@runtime_checkable
class Recording(Protocol):
    """The operations of one function.

    Attributes:
        outputs: What the function returned. Each replay overwrites them, and they are valid until the next replay of
            any recording of the same recorder.
    """

    @property
    def outputs(self) -> Sequence[Tensor]: ...

    def replay(self) -> None:
        """Run the operations on what their tensors hold now."""
        ...


@runtime_checkable
class Recorder(Protocol):
    """Records functions."""

    def record(self, run: Function, inputs: Sequence[Tensor]) -> Recording:
        """Record what a function does. It runs several times meanwhile.

        A replay reads and writes the memory that the recorded operations did. So the function may use only tensors that
        stay where they are, and must not decide anything by what they hold.

        Args:
            run: The function.
            inputs: The tensors that are filled before each replay.

        Raises:
            RuntimeError: The function does something that cannot be recorded.
        """
        ...


class CudaRecorder:
    """Records CUDA graphs, which share one pool of memory.

    The graphs of two recorders may run at the same time; those of one may not. Memory that another thread allocates
    meanwhile does no harm.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def record(self, run: Function, inputs: Sequence[Tensor]) -> "CudaRecording":
        current, graph = torch.cuda.current_stream(self._stream.device), torch.cuda.CUDAGraph()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                run()
        current.wait_stream(self._stream)
        with (
            _ONE_AT_A_TIME,
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = run()
        return CudaRecording(graph, run, outputs)


class CudaRecording:
    """A CUDA graph.

    Args:
        graph: The graph.
        run: The function that it was recorded from; the tensors that it holds must stay.
        outputs: What it returned.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, run: Function, outputs: Sequence[Tensor]) -> None:
        self.outputs = outputs
        self._graph, self._run = graph, run

    def replay(self) -> None:
        """Run the operations on the current stream."""
        self._graph.replay()


RECORDERS: Mapping[str, Callable[[torch.device], Recorder]] = {"cuda": CudaRecorder}
"""What records functions, by the type of the device."""
