"""Our own operators inside compiled libraries, which call them as C functions, without torch's dispatcher.

Relied on in torch (read and run in 2.13): for an operator in `aot_inductor.custom_ops_to_c_shims` a library calls the
function `aoti_torch_cpu_NAME` that is declared there, and looks it up among the names that libraries of the process
have made visible. `shims.cpp` has these functions. They use the functions of `aoti_torch/c/shim.h`.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.host.native import native
from outrider.lm.forwards import attend, gated, kept
from outrider.lm.weights import operators

SOURCE = Path(__file__).with_suffix(".cpp")
SOURCES = (operators.SOURCE, attend.SOURCE, gated.SOURCE, SOURCE)
"""The C++ files that compute the operators."""
_TENSOR, _LIST = "AtenTensorHandle", "const AtenTensorHandle*, int64_t"
_INTS = "const int64_t*, int64_t"
_PRODUCT = f"{_TENSOR}, {_LIST}, {_INTS}, {_INTS}, {_TENSOR}*, {_TENSOR}*"
SHIMS: Mapping[torch._ops.OpOverload, str] = {
    torch.ops.outrider.block_linear.default: f"aoti_torch_cpu_block_linear({_PRODUCT})",
    torch.ops.outrider.int8_linear.default: f"aoti_torch_cpu_int8_linear({_PRODUCT})",
    torch.ops.outrider.block_rows.default: (
        f"aoti_torch_cpu_block_rows({_TENSOR}, {_TENSOR}, int64_t, int64_t, int64_t, int32_t, {_TENSOR}*)"
    ),
    torch.ops.outrider.attend.default: (
        f"aoti_torch_cpu_attend({_TENSOR}, {_TENSOR}, {_TENSOR}, {_TENSOR}*, double, {_TENSOR}*)"
    ),
    torch.ops.outrider.gated.default: f"aoti_torch_cpu_gated({_TENSOR}, int32_t, {_TENSOR}*)",
    kept.OPERATOR: f"aoti_torch_cpu_kept({_TENSOR}, {_TENSOR}*)",
}
"""The operators, and their functions as C++ declares them."""
PRODUCTS = (torch.ops.outrider.block_linear.default, torch.ops.outrider.int8_linear.default)
"""Those that multiply with matrices."""
NAMES = frozenset(operator.name() for operator in SHIMS)
DECLARATIONS = {operator: [f"AOTITorchError {shim}"] for operator, shim in SHIMS.items()}
"""For the compiler."""


def called_by(library: Path) -> bool:
    """Whether a compiled library calls any of the operators.

    Raises:
        OSError: It cannot be read.
    """
    content = library.read_bytes()
    return any(shim.partition("(")[0].encode() in content for shim in SHIMS.values())


@functools.cache
def load() -> bool:
    """Make the functions visible to libraries that are opened later. False where they cannot be built."""
    *kernels, last = SOURCES
    flags = (f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch_cpu")
    return all(native(kernel) is not None for kernel in kernels) and native(last, *flags) is not None
