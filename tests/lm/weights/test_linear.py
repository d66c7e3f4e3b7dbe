"""Products with packed weights are those of the numbers in the file, and a row's bits do not depend on other rows."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.lm.weights.blocks import KINDS, BlockWeight
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear, Int8Linear
from outrider.lm.weights.operators import _kernels, block_linear, native_linear, plain_linear
from tests.lm.weights.test_blocks import file_bytes

CASTS = True
COMPILED = pytest.mark.skipif(_kernels() is None, reason="no C++ compiler")
KIND_NAMES = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """The number of threads after a test is that before it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def matrix(kind: str, rows: int, features: int, seed: int = 0) -> BlockWeight:
    return BlockWeight.of_gguf(file_bytes(kind, rows, features, seed), kind)


def states(rows: int, features: int, dtype: torch.dtype = torch.bfloat16, seed: int = 1) -> Tensor:
    """States with a few large entries and many small ones, as language models have them."""
    random = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, features, generator=random) ** 3).to(dtype)


def error(output: Tensor, exact: Tensor) -> float:
    return ((output.double() - exact).norm() / exact.norm()).item()


def products(given: Tensor, weights: list[BlockWeight], dtype: torch.dtype = torch.float32) -> Tensor:
    """Outputs of the kernels."""
    sizes = [weight.out_features for weight in weights]
    kinds = [weight.number for weight in weights]
    return native_linear(given, [weight.data for weight in weights], kinds, sizes, None, dtype)


def check_states_that_are_no_numbers(kind: str) -> None:
    """Their own outputs are none, and all others numbers."""
    given = states(4, 256)
    given[1, 40], given[2, 200] = float("nan"), float("inf")
    output = products(given, [matrix(kind, 20, 256)])
    assert output[[0, 3]].isfinite().all()
    assert not output[1].isfinite().any()
    assert not output[2].isfinite().any()


@COMPILED
@KIND_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1, 4])
def test_kernels_are_exact_up_to_summation(kind: str, dtype: torch.dtype, spread: int) -> None:
    random = np.random.default_rng(2)
    for _ in range(12):
        rows, out = int(random.integers(1, 21)), int(random.integers(1, 51))
        features = KINDS[kind].weights * int(random.integers(1, 9))
        weight, given = matrix(kind, out, features), (states(rows, features) ** spread).to(dtype)
        exact = given.double() @ weight.dequantised(torch.float32).double().T
        assert error(products(given, [weight]), exact) < 1e-6, (rows, out, features)


@COMPILED
@KIND_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_nothing_beside_it(kind: str, dtype: torch.dtype) -> None:
    weights, given = [matrix(kind, 203, 768), matrix("Q4_K", 50, 768)], states(70, 768, dtype)
    whole = products(given, weights)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 5, 8, 13, 16, 64):
            first = (17 * rows) % (70 - rows)
            some = products(given[first : first + rows], weights)
            assert (some != whole[first : first + rows]).sum() == 0, (threads, rows)
    assert (products(given, weights[:1]) != whole[:, :203]).sum() == 0


@COMPILED
@KIND_NAMES
def test_a_state_that_is_no_number_makes_outputs_that_are_none(kind: str) -> None:
    check_states_that_are_no_numbers(kind)


@COMPILED
@KIND_NAMES
@pytest.mark.parametrize("size", [1e-26, 1e30])
def test_very_small_and_very_large_states_are_multiplied(kind: str, size: float) -> None:
    weight, given = matrix(kind, 20, 256), (states(3, 256) * size).to(torch.bfloat16)
    exact = given.double() @ weight.dequantised(torch.float32).double().T
    assert ((products(given, [weight]).double() - exact).abs() <= 1e-5 * exact.abs().max()).all()


@KIND_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_file(kind: str, dtype: torch.dtype) -> None:
    random = np.random.default_rng(2)
    for _ in range(12):
        rows, out = int(random.integers(1, 21)), int(random.integers(1, 51))
        features = KINDS[kind].weights * int(random.integers(1, 9))
        weight, given = matrix(kind, out, features), states(rows, features, dtype)
        exact = given.double() @ weight.dequantised(torch.float32).double().T
        output = block_linear(given, [weight], None)
        assert output.dtype == dtype
        if dtype == torch.float32:
            assert error(output, exact) < 1e-6, (rows, out, features)
        else:
            # Rounding to bfloat16 hides the last bits: nearly every output is the exact one, rounded.
            rounded = exact.to(torch.bfloat16)
            assert (output != rounded).float().mean() < 0.01 + 1 / output.numel(), (rows, out, features)
            assert error(output, exact) < 3e-3


@KIND_NAMES
def test_the_plain_product_is_that_of_the_weights(kind: str) -> None:
    weight, given = matrix(kind, 1030, 512), states(3, 512)
    exact = given.double() @ weight.dequantised(torch.float32).double().T
    output = plain_linear(given.float(), [weight.data], [weight.number], [1030], torch.ones(1030))
    assert error(output, exact + 1) < 1e-6


def test_a_bias_is_added_before_rounding() -> None:
    weight, given, bias = matrix("Q4_K", 20, 256), states(2, 256), torch.linspace(-3, 3, 20)
    exact = given.double() @ weight.dequantised(torch.float32).double().T + bias.double()
    assert (block_linear(given, [weight], bias) != exact.to(torch.bfloat16)).sum() <= 1
    half = bias.to(torch.bfloat16)
    assert torch.equal(block_linear(given, [weight], half), block_linear(given, [weight], half.float()))


def test_matrices_that_read_the_same_states_are_multiplied_together() -> None:
    weights = [matrix("Q4_K", 20, 512), matrix("Q6_K", 7, 512, 1), matrix("Q8_0", 33, 512, 2)]
    given = states(5, 512).unflatten(0, (1, 5))
    joined = block_linear(given, weights, None)
    assert joined.shape == (1, 5, 60)
    assert torch.equal(joined, torch.cat([block_linear(given, [weight], None) for weight in weights], dim=-1))


def test_states_may_have_strides_and_other_dtypes() -> None:
    weight, given = matrix("Q5_0", 20, 64), states(6, 128)
    assert torch.equal(block_linear(given[:, 64:], [weight], None), block_linear(given[:, 64:].clone(), [weight], None))
    half = block_linear(given[:, :64].half(), [weight], None)
    assert half.dtype == torch.float16
    assert torch.equal(half, block_linear(given[:, :64].half().float(), [weight], None).half())
    assert block_linear(given[:0, :64], [weight], None).shape == (0, 20)


@KIND_NAMES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding_are_exact(kind: str, dtype: torch.dtype) -> None:
    weight = matrix(kind, 50, 512)
    layer = BlockEmbedding(weight, dtype)
    # Rows that follow each other are unpacked together, up to the end of their panel.
    neighbours = torch.cat([torch.arange(3, 50), torch.arange(50), torch.arange(20, 9, -1), torch.tensor([15, 16, 18])])
    for ids in (torch.tensor([[49, 0], [17, 17], [16, 3]]), neighbours):
        assert torch.equal(layer(ids), weight.dequantised(dtype)[ids])
    assert layer(torch.tensor(4)).shape == (512,)


@KIND_NAMES
@pytest.mark.parametrize("layer", [BlockLinear, Int8Linear])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_cut_to_some_rows_has_the_bits_of_the_whole_one(
    kind: str, layer: type[BlockLinear], dtype: torch.dtype
) -> None:
    whole, rows = layer(matrix(kind, 200, 512), torch.linspace(-3, 3, 200)), [199, 0, 17, *range(40, 90, 3)]
    cut = whole.cut(rows)
    assert type(cut) is layer
    for count in (1, 7, 40):
        given = states(count, 512, dtype)
        assert torch.equal(cut(given), whole(given)[:, rows])


def test_tied_layers_share_their_panels() -> None:
    weight = matrix("Q8_0", 40, 64)
    embedding, head = BlockEmbedding(weight, torch.bfloat16), BlockLinear(weight)
    assert embedding.data.data_ptr() == head.data.data_ptr()
    assert head(embedding(torch.tensor([[1, 2, 3]]))).shape == (1, 3, 40)


def test_both_operators_can_be_exported() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            weight = matrix("Q4_K", 40, 256)
            self.embedding, self.head = BlockEmbedding(weight, torch.bfloat16), BlockLinear(weight, torch.ones(40))

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    model, length = Tied(), torch.export.Dim("length", min=2, max=64)
    exported = torch.export.export(model, (torch.arange(6)[None],), dynamic_shapes=({1: length},), strict=False)
    ids = torch.tensor([[5, 39, 0, 1]])
    assert torch.equal(exported.module()(ids), model(ids))
