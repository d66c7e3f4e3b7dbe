"""Linear layers that read the same input become one product that says the same, and no others do."""

import pytest
import torch
from torch import Tensor, nn

from outrider.lm.forwards import merged
from outrider.lm.forwards.merged import as_blocks, merge
from outrider.lm.forwards.twin import twin
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.linear import BlockLinear
from tests.lm.weights.test_blocks import file_bytes
from tests.world.models import llama


def products(model: nn.Module, run) -> int:
    """The matrix products of a forward."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(model)
    return sum(event.count for event in profile.key_averages() if event.key == "aten::linear")


def test_a_model_says_the_same_with_four_products_a_layer_instead_of_seven():
    plain = llama()
    weights = {name: weight.clone() for name, weight in plain.state_dict().items()}
    fused, tokens = twin(plain), torch.tensor([[3, 1, 4, 1, 5]])

    def run(model: nn.Module) -> Tensor:
        return model(input_ids=tokens, use_cache=False).logits

    with torch.no_grad():
        before = products(plain, run)
        merge(fused, lambda: run(fused))
        assert torch.allclose(run(fused), run(plain), atol=1e-5)
        assert before - products(fused, run) == 2 * 3
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.state_dict().items())
    assert sum(isinstance(part, merged._First) for part in plain.modules()) == 0


class Mixed(nn.Module):
    """Layers that read one input, some of which must stay alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 5)
        self.bare = nn.Linear(4, 2, bias=False)
        self.twice = nn.Linear(4, 4)
        self.other = nn.Linear(4, 6)

    def forward(self, states: Tensor) -> list[Tensor]:
        again = self.twice(self.twice(states))
        return [self.a(states), self.bare(states), self.b(states), again, self.other(again)]


def test_layers_that_differ_or_run_twice_or_read_something_else_stay_alone():
    torch.manual_seed(0)
    model, states = Mixed(), torch.randn(2, 3, 4)
    before = model(states)
    merge(model, lambda: model(states))
    kinds = {name: type(part).__name__ for name, part in model.named_children()}
    assert kinds == {"a": "_First", "b": "_Other", "bare": "Linear", "twice": "Linear", "other": "Linear"}
    for ours, theirs in zip(model(states), before, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
        assert ours.is_contiguous()


class Packed(nn.Module):
    """Layers with packed weights of several kinds that read one input, beside a plain one."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        for name, kind, size in (("a", "Q4_0", 20), ("b", "Q8_0", 7), ("c", "Q4_K", 16)):
            weight = BlockWeight.of_gguf(file_bytes(kind, size, 256), kind)
            setattr(self, name, BlockLinear(weight, torch.randn(size) if bias else None))
        self.plain = nn.Linear(256, 3, bias)

    def forward(self, states: Tensor) -> list[Tensor]:
        return [self.a(states), self.plain(states), self.b(states), self.c(states)]


@pytest.mark.parametrize("bias", [False, True])
def test_packed_layers_of_several_kinds_share_a_product_and_keep_their_weights_where_they_are(bias: bool) -> None:
    torch.manual_seed(0)
    model, states = Packed(bias), torch.randn(2, 3, 256)
    before, places = model(states), [layer.data.data_ptr() for layer in (model.a, model.b, model.c)]
    merge(model, lambda: model(states))
    kinds = {name: type(part).__name__ for name, part in model.named_children()}
    assert kinds == {"a": "_First", "b": "_Other", "c": "_Other", "plain": "Linear"}
    assert [data.data_ptr() for name, data in model.a.named_buffers() if name.endswith("data")] == places
    assert all(map(torch.equal, model(states), before))


def test_plain_layers_in_bfloat16_compute_from_blocks_and_the_bits_of_a_row_are_its_own() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(64, 40), "narrow": nn.Linear(48, 3), "wide": nn.Linear(64, 5).float()})
    model["inner"], states = nn.ModuleDict({"tied": model["a"]}), torch.randn(7, 64).bfloat16()
    model["a"].bfloat16(), model["narrow"].bfloat16()
    before = model["a"].float()(states.float())
    model["a"].bfloat16()
    as_blocks(model)
    assert [type(model[name]).__name__ for name in ("a", "narrow", "wide")] == ["BlockLinear", "Linear", "Linear"]
    assert model["inner"]["tied"] is model["a"]
    rows = model["a"](states)
    assert torch.allclose(rows.float(), before, atol=0.02)
    assert all(torch.equal(model["a"](row[None])[0], outputs) for row, outputs in zip(states, rows, strict=True))
