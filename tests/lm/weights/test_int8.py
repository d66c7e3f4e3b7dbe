"""Products of states that are rounded to 8 bits are those of the rounded numbers, and every build has the same bits."""

import ctypes
import hashlib
import platform

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.host.native import native
from outrider.lm.weights import operators
from outrider.lm.weights.blocks import GROUP, KINDS, BlockWeight
from outrider.lm.weights.linear import BlockLinear, Int8Linear
from outrider.lm.weights.operators import block_linear, int8_linear, native_linear, plain_linear, rounded, rounds
from outrider.lm.weights.plain import RoundedLinear, _plain
from tests.lm.weights.test_emulated import HEADER
from tests.lm.weights.test_linear import COMPILED, error, matrix, states, threads  # noqa: F401

CASTS = True
ROUNDED = [kind for kind in KINDS if rounds(kind)]
KIND_NAMES = pytest.mark.parametrize("kind", ROUNDED)
EMULATED = (
    "-w",
    "-mno-avx512f",
    "-include",
    str(HEADER),
    f"-DEMULATED=0x{hashlib.sha256(HEADER.read_bytes()).hexdigest()[:8]}",
)
BUILDS = {"AVX-512": (*EMULATED, "-DWITH_AVX512_BF16"), "plain": ("-mno-avx2",)}


def products(given: Tensor, weights: list[BlockWeight], dtype: torch.dtype = torch.float32) -> Tensor:
    """Outputs of the kernels for rounded states."""
    kinds, sizes = [weight.number for weight in weights], [weight.out_features for weight in weights]
    return native_linear(given, [weight.data for weight in weights], kinds, sizes, None, dtype, "int8_linear")


def naive(given: Tensor, weight: BlockWeight) -> Tensor:
    """The product of states, each group rounded to whole numbers up to 127, with plain weights, in float64."""
    groups = given.float().numpy().reshape(len(given), -1, GROUP)
    most = np.abs(groups).max(2, keepdims=True)
    codes = np.rint(groups * (np.float32(127) / most))
    assert np.abs(codes).max() == 127
    near = codes.astype(np.float64) * (most / np.float32(127))
    exact = torch.from_numpy(near.reshape(given.shape)) @ weight.dequantised(torch.float32).double().T
    return torch.as_tensor(exact)


@COMPILED
@KIND_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_rounded_states_up_to_summation(kind: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(2)
    for rows in range(1, 18):
        out, features = int(random.integers(1, 51)), KINDS[kind].weights * int(random.integers(1, 9))
        weight, given = matrix(kind, out, features, rows), states(rows, features, dtype, rows)
        assert error(products(given, [weight]), naive(given, weight)) < 1e-6, (rows, out, features)
        plain = plain_linear(given.float(), [weight.data], [weight.number], [out], None, int8=True)
        assert error(plain, naive(given, weight)) < 1e-6


@COMPILED
@KIND_NAMES
def test_rounding_changes_products_by_less_than_a_hundredth(kind: str) -> None:
    given = torch.randn(5, 2048, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight = matrix(kind, 300, 2048)
    exact = given.double() @ weight.dequantised(torch.float32).double().T
    assert 1e-3 < error(products(given, [weight]), exact) < 1e-2


@COMPILED
@KIND_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_nothing_beside_it(kind: str, dtype: torch.dtype) -> None:
    weights, given = [matrix(kind, 203, 768), matrix("BF16", 21, 768), matrix("Q4_K", 50, 768)], states(70, 768, dtype)
    whole = products(given, weights)
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        for rows in (1, 2, 3, 5, 8, 13, 16, 64):
            first = (17 * rows) % (70 - rows)
            some = products(given[first : first + rows], weights)
            assert (some != whole[first : first + rows]).sum() == 0, (number, rows)
    assert (products(given, weights[:1]) != whole[:, :203]).sum() == 0


@COMPILED
@pytest.mark.skipif(platform.machine() != "x86_64", reason="another processor's kin")
@pytest.mark.parametrize("build", BUILDS)
def test_every_build_gives_the_same_bits(build: str, monkeypatch) -> None:
    library = native(operators.SOURCE, *BUILDS[build])
    assert library is not None
    other: ctypes.CDLL = operators._declared(library)
    for kind in ROUNDED:
        for rows, blocks, out in ((1, 1, 16), (2, 9, 33), (17, 3, 5), (5, 10, 20)):
            weight, given = matrix(kind, out, KINDS[kind].weights * blocks), states(rows, KINDS[kind].weights * blocks)
            own = products(given, [weight])
            with monkeypatch.context() as patch:
                patch.setattr(operators, "_kernels", lambda: other)
                assert torch.equal(products(given, [weight]), own), (kind, rows, blocks, out)


@COMPILED
@KIND_NAMES
def test_a_state_that_is_no_number_makes_outputs_that_are_none(kind: str) -> None:
    given = states(4, 256)
    given[1, 40], given[2, 200] = float("nan"), float("inf")
    output = products(given, [matrix(kind, 20, 256)])
    assert output[[0, 3]].isfinite().all()
    assert not output[[1, 2]].isfinite().any()
    assert not rounded(given)[1, 32:64].isfinite().any()


@COMPILED
@KIND_NAMES
def test_very_small_and_very_large_states_are_multiplied_and_groups_of_zeros_are_zeros(kind: str) -> None:
    weight, given = matrix(kind, 20, 512), states(3, 512)
    for size in (1e-26, 1e30):
        assert (
            error(
                products((given * size).to(torch.bfloat16), [weight]), naive((given * size).to(torch.bfloat16), weight)
            )
            < 1e-6
        )
    for size in (0, 1e-38, 1e-31):
        assert torch.equal(products(given.float().clamp(-5, 5) * size, [weight]), torch.zeros(3, 20))
        assert torch.equal(rounded(given.float().clamp(-5, 5) * size), torch.zeros(3, 512))


@COMPILED
def test_weights_of_bfloat16_multiply_states_that_are_not_rounded() -> None:
    weights, given = [matrix("Q4_0", 40, 64), matrix("BF16", 20, 64), matrix("Q8_0", 7, 64)], states(3, 64)
    output = int8_linear(given, weights, None)
    assert torch.equal(output[:, 40:60], block_linear(given, weights[1:2], None))
    parts = [int8_linear(given, [weight], None) for weight in weights]
    assert torch.equal(output, torch.cat(parts, dim=1))
    assert not torch.equal(parts[0], block_linear(given, weights[:1], None))
    blocks, kinds = [weight.data for weight in weights], [weight.number for weight in weights]
    plain = plain_linear(given, blocks, kinds, [40, 20, 7], torch.ones(67), int8=True)
    assert error(plain, int8_linear(given, weights, torch.ones(67)).double()) < 1e-2


def test_a_layer_that_rounds_is_the_plain_layer_of_rounded_states() -> None:
    layer, given = Int8Linear(matrix("Q5_1", 40, 96), torch.ones(40)), states(5, 96)
    plain = _plain(layer, torch.nn.Parameter(layer.blocks.dequantised(torch.float32), requires_grad=False))
    assert isinstance(plain, RoundedLinear)
    with torch.no_grad():
        assert error(plain(given.float()), layer(given.float()).double()) < 1e-6
    assert layer(given.half()).dtype == torch.float16
    assert str(layer) != str(BlockLinear(layer.blocks, layer.bias))
    with torch.no_grad():
        assert error(plain.cut([3, 1])(given.float()), plain(given.float())[:, [3, 1]].double()) < 1e-6


def test_a_layer_that_rounds_can_be_exported() -> None:
    layer, length = Int8Linear(matrix("Q4_K", 40, 256), torch.ones(40)), torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(layer, (states(6, 256),), dynamic_shapes=({0: length},), strict=False)
    assert torch.equal(exported.module()(states(3, 256)), layer(states(3, 256)))
