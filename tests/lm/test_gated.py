"""Gates of halves of a product: what they say, of which bits, and where a graph calls them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.lm.forwards import gated as gates
from outrider.lm.forwards.gated import fuse_gates, gated
from outrider.lm.forwards.shims import PRODUCTS
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.operators import block_linear
from tests.lm.weights.test_blocks import file_bytes
from tests.world.compiling import needs_compiler

SIZE = 32


def by_definition(joined: Tensor, gelu: bool) -> Tensor:
    a, b = joined.double().chunk(2, -1)
    return (F.gelu(a, approximate="tanh") if gelu else F.silu(a)) * b


@needs_compiler
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-6), (torch.bfloat16, 2.0**-8)])
@pytest.mark.parametrize("width", [1, 16, 37, 1100])
def test_a_gate_is_what_its_definition_says(dtype, tolerance, width, gelu):
    assert gates._kernel() is not None
    joined = (4 * torch.randn(3, 2, 2 * width, generator=torch.Generator().manual_seed(width))).to(dtype)
    found, right = gated(joined, gelu), by_definition(joined, gelu)
    assert (found.dtype, found.shape) == (dtype, right.shape)
    assert ((found.double() - right).abs() <= tolerance * right.abs() + 1e-7).all()


@needs_compiler
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_at_the_ends_are_kept(dtype, gelu):
    x = torch.tensor([float("nan"), float("inf"), 1e30, 90.0, 0.0, -0.0, -90.0, -1e30])
    found = gated(torch.cat([x, torch.ones(8)])[None].to(dtype), gelu)[0].float()
    assert found[0].isnan()
    assert torch.equal(found[1:6], x[1:6].to(dtype).float())
    assert (found[6:].abs() < 1e-6).all()


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_a_row_depend_on_that_row_alone(dtype):
    width = 9000
    joined, threads = (4 * torch.randn(8, 2 * width)).to(dtype), torch.get_num_threads()
    alone = torch.cat([gated(row[None], gelu=False) for row in joined])
    differing = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        differing += [int((gated(joined[:rows], gelu=False) != alone[:rows]).sum()) for rows in (1, 2, 5, 8)]
    torch.set_num_threads(threads)
    assert set(differing) == {0}


def test_without_a_compiler_torch_computes_it(monkeypatch):
    monkeypatch.setattr(gates, "_kernel", lambda: None)
    joined = torch.randn(2, 12)
    assert torch.allclose(gated(joined, gelu=True).double(), by_definition(joined, gelu=True), atol=1e-6)


class Layer(nn.Module):
    """One product, and what `formula` makes of its parts."""

    def __init__(self, formula, sizes=(SIZE, SIZE)) -> None:
        super().__init__()
        self.formula, self.sizes = formula, list(sizes)
        for i, size in enumerate(sizes):
            weight = BlockWeight.of_gguf(file_bytes("Q8_0", size, 32, seed=i), "Q8_0")
            self.register_buffer(f"data{i}", weight.data)

    def forward(self, states: Tensor) -> Tensor:
        weights = [
            BlockWeight(kind="Q8_0", out_features=size, in_features=32, data=getattr(self, f"data{i}"))
            for i, size in enumerate(self.sizes)
        ]
        parts = block_linear(states, weights, None).split(self.sizes, -1)
        return self.formula(*(part.clone(memory_format=torch.contiguous_format) for part in parts))


GATES = {
    "silu": lambda a, b: F.silu(a) * b,
    "silu behind": lambda a, b: b * F.silu(a),
    "gelu": lambda a, b: F.gelu(a, approximate="tanh") * b,
}
OTHERS = {
    "the second half": lambda a, b: F.silu(b) * a,
    "gelu by erf": lambda a, b: F.gelu(a) * b,
    "relu": lambda a, b: F.relu(a) * b,
    "read twice": lambda a, b: (lambda active: active * b + active.sum())(F.silu(a)),
    "itself": lambda a, b: F.silu(a) * a + b,
}


def exported(layer: nn.Module) -> tuple[torch.fx.GraphModule, Tensor]:
    states = torch.randn(3, 32)
    return torch.export.export(layer, (states,), strict=False).module(), states


@pytest.mark.parametrize("name", GATES)
def test_a_graph_calls_it_behind_a_product_of_both_halves(name):
    graph, states = exported(Layer(GATES[name]))
    before = graph(states)
    assert fuse_gates(graph, PRODUCTS) == 1
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.ops.outrider.gated.default in called
    assert not {torch.ops.aten.clone.default, torch.ops.aten.split_with_sizes.default}.intersection(called)
    assert torch.allclose(graph(states), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_such_gate_stays(name):
    graph, states = exported(Layer(OTHERS[name]))
    before = graph(states)
    assert fuse_gates(graph, PRODUCTS) == 0
    assert torch.equal(graph(states), before)


def test_parts_of_other_sizes_and_other_products_stay():
    graph, _ = exported(Layer(GATES["silu"], sizes=(1, SIZE)))
    assert fuse_gates(graph, PRODUCTS) == 0
    graph, _ = exported(Layer(GATES["silu"]))
    assert fuse_gates(graph, ()) == 0
