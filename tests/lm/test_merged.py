"""Linear layers that read the same input become one product that says the same, and no others do."""

import torch
from torch import Tensor, nn

from outrider.lm.forwards import merged
from outrider.lm.forwards.merged import merge
from outrider.lm.forwards.twin import twin
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
