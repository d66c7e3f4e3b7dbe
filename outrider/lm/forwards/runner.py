"""Runs a library that torch has compiled ahead of time, while other threads of Python go on.

torch's own class for this (`torch._C._aoti.AOTIModelContainerRunnerCpu`) holds Python's lock through the whole forward,
so a server could not read a request, or write a token, until it ended. Libraries have a C interface, which does the
same; a call through `ctypes` gives the lock away.

A library lets go of a tensor as soon as it has read it. Where only Python holds the tensor then, torch takes the lock
to say so, and waits for whoever has it: half a millisecond in a server of eight streams. So each tensor is held a
second time until the forward has ended.

The library has no constants of its own. It is given tensors whose memory is mapped, and does not copy them.

Relied on in torch (read and run in 2.13): `AOTInductorModelContainer...` of `aoti_runtime/interface.h`,
`aoti_torch_create_tensor_from_blob_v2` and other functions of `aoti_torch/c/shim.h`, which the library is linked with,
and `unsafe_alloc_void_ptrs_from_tensors` and `alloc_tensors_by_stealing_from_void_ptrs` of `torch._C._aoti`;
`torch.cpu._init_amx`, which does nothing where there are no such units.
"""

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from outrider.host.meanwhile import hand_over
from outrider.lm.forwards.constants import Constant, MappedConstants

Pointers = ctypes.Array[ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_capsule_of = ctypes.pythonapi.PyCapsule_New
_capsule_of.restype, _capsule_of.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Runner:
    """A library that is open. One forward runs at a time; others wait.

    Args:
        library: Its file.
        constants: Its constants.

    Raises:
        RuntimeError: It cannot be opened.
    """

    def __init__(self, library: Path, constants: MappedConstants) -> None:
        # Linux lets a process use matrix units (AMX) after it has asked for them, and kills it before.
        torch.cpu._init_amx()
        try:
            self._library = ctypes.CDLL(str(library))
            self._run = self._library.AOTInductorModelContainerRun
            create = self._library.AOTInductorModelContainerCreateWithDevice
            use = self._library.AOTInductorModelContainerUpdateUserManagedConstantBufferPairs
        except (OSError, AttributeError) as error:
            raise RuntimeError(str(error)) from error
        self._handle, count = ctypes.c_void_p(), ctypes.c_size_t()
        self._check(create(ctypes.byref(self._handle), ctypes.c_size_t(1), b"cpu", None))
        tensors: list[ctypes.c_void_p] = []
        # At the end of the process another thread may still run it.
        weakref.finalize(self, _close, self._library, self._handle, tensors, constants).atexit = False
        dtypes = self._dtypes()
        for each in constants.constants:
            tensors.append(self._tensor(each, constants.address(each), dtypes[each.name]))
        names = [each.name.encode() for each in constants.constants]
        pairs = (_Pair * len(names))(*[_Pair(name, tensor) for name, tensor in zip(names, tensors, strict=True)])
        self._check(use(self._handle, pairs, ctypes.c_size_t(len(pairs)), False, True))
        self._check(self._library.AOTInductorModelContainerGetNumOutputs(self._handle, ctypes.byref(count)))
        self._num_outputs = count.value
        self._check(self._library.AOTInductorModelContainerGetNumInputs(self._handle, ctypes.byref(count)))
        self._num_inputs = count.value

    def _dtypes(self) -> dict[str, ctypes.c_int32]:
        """The type of each constant, as torch's C interface numbers them."""
        library, count, dtypes = self._library, ctypes.c_size_t(), {}
        self._check(library.AOTInductorModelContainerGetNumConstants(self._handle, ctypes.byref(count)))
        for number in map(ctypes.c_size_t, range(count.value)):
            name, dtype = ctypes.c_char_p(), ctypes.c_int32()
            self._check(library.AOTInductorModelContainerGetConstantName(self._handle, number, ctypes.byref(name)))
            self._check(library.AOTInductorModelContainerGetConstantDtype(self._handle, number, ctypes.byref(dtype)))
            dtypes[(name.value or b"").decode()] = dtype
        return dtypes

    def _tensor(self, constant: Constant, address: int, dtype: ctypes.c_int32) -> ctypes.c_void_p:
        """A tensor for the library around the memory of a constant."""
        library, tensor, opaque = self._library, ctypes.c_void_p(), bytes.fromhex(constant.opaque)
        sizes, strides = ((ctypes.c_int64 * len(each))(*each) for each in (constant.shape, constant.stride))
        self._check(
            library.aoti_torch_create_tensor_from_blob_v2(
                ctypes.c_void_p(address),
                ctypes.c_int64(len(constant.shape)),
                sizes,
                strides,
                ctypes.c_int64(constant.offset),
                dtype,
                ctypes.c_int32(library.aoti_torch_device_type_cpu()),
                ctypes.c_int32(-1),
                ctypes.byref(tensor),
                ctypes.c_int32(library.aoti_torch_layout__mkldnn() if opaque else library.aoti_torch_layout_strided()),
                opaque,
                ctypes.c_int64(len(opaque)),
            )
        )
        return tensor

    def run(self, inputs: list[Tensor]) -> list[Tensor]:
        """The outputs. What the function writes into is written into.

        Raises:
            RuntimeError: The library says why.
        """
        if len(inputs) != self._num_inputs:
            # The library would end the process.
            raise RuntimeError(f"the library reads {self._num_inputs} tensors, got {len(inputs)}")
        input_pointers = _pointers(torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs))
        held = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(inputs)
        output_pointers: Pointers = (ctypes.c_void_p * self._num_outputs)()
        sizes = (ctypes.c_size_t(len(input_pointers)), ctypes.c_size_t(len(output_pointers)))
        hand_over()
        try:
            self._check(self._run(self._handle, input_pointers, sizes[0], output_pointers, sizes[1], None, None))
        finally:
            torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(held)
        capsules = [_capsule_of(pointer, None, None) for pointer in output_pointers]
        outputs: list[Tensor] = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(capsules)
        return outputs

    def _check(self, status: int) -> None:
        """Raise RuntimeError for a call that failed."""
        if status:
            message, tell = ctypes.c_char_p(), getattr(self._library, "AOTInductorGetLastError", None)
            if tell is not None:
                tell(ctypes.byref(message))
            raise RuntimeError((message.value or b"a compiled forward failed").decode(errors="replace"))


class _Pair(ctypes.Structure):
    """The name of a constant, and its tensor."""

    _fields_ = (("name", ctypes.c_char_p), ("tensor", ctypes.c_void_p))


def _close(
    library: ctypes.CDLL, handle: ctypes.c_void_p, tensors: Sequence[ctypes.c_void_p], constants: MappedConstants
) -> None:
    """Let a library go, then the tensors that it read, then their memory."""
    library.AOTInductorModelContainerDelete(handle)
    for tensor in tensors:
        library.aoti_torch_delete_tensor_object(tensor)
    del constants


def _pointers(capsules: Sequence[object]) -> Pointers:
    """What some capsules point to."""
    return (ctypes.c_void_p * len(capsules))(*[_pointer_of(capsule, None) for capsule in capsules])
