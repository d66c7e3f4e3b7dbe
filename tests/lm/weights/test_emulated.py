"""The kernels for AVX-512 and AMX, run on any processor with their instructions in plain C++."""

import ctypes
import hashlib
import platform
from pathlib import Path

import pytest
import torch

from outrider.host.native import native
from outrider.lm.weights import operators
from outrider.lm.weights.blocks import KINDS
from tests.lm.weights.test_linear import check_states_that_are_no_numbers, error, matrix, products, states

CASTS = True
HEADER = Path(__file__).with_name("emulated.h")
DEFINED = {"AVX-512": ("-DWITH_AVX512_BF16",), "AMX": ("-DWITH_AVX512_BF16", "-DWITH_AMX")}

pytestmark = pytest.mark.skipif(
    operators._kernels() is None or platform.machine() != "x86_64", reason="no C++ compiler for this processor's kin"
)


@pytest.fixture(params=DEFINED, autouse=True)
def instructions(request, monkeypatch) -> ctypes.CDLL:
    """The library of other processors takes the place of this one's."""
    known = f"-DEMULATED=0x{hashlib.sha256(HEADER.read_bytes()).hexdigest()[:8]}"
    # Without the instructions themselves, so that one that is missing in the header is noticed everywhere. With -O1 the
    # compiler is done in half the time.
    flags = ("-O1", "-w", "-mno-avx512f", "-include", str(HEADER), known, *DEFINED[request.param])
    library = native(operators.SOURCE, *flags)
    assert library is not None
    declared = operators._declared(library)
    monkeypatch.setattr(operators, "_kernels", lambda: declared)
    return declared


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact_up_to_summation(kind: str) -> None:
    for rows, blocks, out in ((1, 1, 16), (2, 9, 33), (17, 3, 5), (5, 10, 20)):
        features = KINDS[kind].weights * blocks
        weight, given = matrix(kind, out, features), states(rows, features)
        exact = given.double() @ weight.dequantised(torch.float32).double().T
        assert error(products(given, [weight]), exact) < 1e-6, (rows, out, features)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_a_row_depend_on_nothing_beside_it(kind: str) -> None:
    weights, given = [matrix(kind, 20, 512), matrix("Q4_K", 18, 512)], states(70, 512)
    whole = products(given, weights)
    threads = torch.get_num_threads()
    try:
        for number, rows in ((1, 1), (2, 3), (1, 8), (2, 13), (1, 16), (2, 17), (1, 64)):
            torch.set_num_threads(number)
            some = products(given[70 - rows :], weights)
            assert (some != whole[70 - rows :]).sum() == 0, (number, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_no_number_makes_outputs_that_are_none(kind: str) -> None:
    check_states_that_are_no_numbers(kind)
