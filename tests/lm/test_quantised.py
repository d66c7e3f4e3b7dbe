"""Models with integer weights, as quantisers leave them: other modules in place of linear layers."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import outrider
from outrider.lm.hf.open import as_lm, logit_width
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import VOCAB, tiny

GREEDY = outrider.Sampling(temperature=0.0, seed=0)


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a scale per row, which has no floating `weight`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("packed", (linear.weight / scale).round().to(torch.int8).T.contiguous())
        self.register_buffer("scale", scale.T.contiguous())
        self.bias = linear.bias

    def forward(self, hidden: Float[Tensor, "*batch features"]) -> Float[Tensor, "*batch out"]:
        product = hidden @ (self.packed.to(hidden.dtype) * self.scale)
        return product if self.bias is None else product + self.bias


def quantised(model: nn.Module) -> nn.Module:
    """The model with int8 linear layers, the head too; integers come first among its parameters."""
    with torch.no_grad():
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, Int8Linear(child))
    return model


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3_5"])
def test_greedy_output_over_integer_weights_is_the_models_own(name: str) -> None:
    model = quantised(tiny(name) if name != "qwen3_5" else tiny_recurrent(name))
    assert any(buffer.dtype == torch.int8 for buffer in model.buffers())
    assert not isinstance(model.get_output_embeddings(), nn.Linear)
    assert logit_width(model) == VOCAB
    lm = as_lm(model, max_slots=1)
    assert lm.dtype == torch.float64
    engine = outrider.load(model, drafter="ngram:prompt_lookup_min=1", length="fixed:5", max_slots=2)
    prompts = [[5, 6, 7, 5, 6], [9, 3]]
    made = engine.generate(prompts, max_new_tokens=12, sampling=GREEDY, ignore_eos=True)
    for prompt, output in zip(prompts, made, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output.tokens]), use_cache=False).logits[0]
        assert output.tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert sum(output.num_accepted_tokens for output in made) < sum(output.num_draft_tokens for output in made)
