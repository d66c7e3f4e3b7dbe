"""Models with integer weights, as quantisers leave them: other modules in place of linear layers."""

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

import outrider
from outrider import InputError
from outrider.lm.fingerprint import weights_of
from outrider.lm.forwards.merged import merge
from outrider.lm.forwards.packed import PackedLinear, keeps_bits, packed
from outrider.lm.hf.open import logit_width
from outrider.lm.hf.weights import plain
from outrider.lm.open import as_lm
from outrider.proof.gate import key
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


class Unasked(nn.Linear):
    """A linear layer that loses its weights when it is asked for them, as bitsandbytes' layers lose digits."""

    def _save_to_state_dict(self, *given: object) -> None:
        self.weight.data.zero_()


def test_layers_are_never_asked_for_their_state_dict() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].mlp.up_proj
    layer.__class__ = Unasked
    before = layer.weight.clone()
    engine = outrider.load(model, drafter="ngram", length="goodput")
    assert key(engine, [[1]]) is None
    assert weights_of(model) is None
    assert torch.equal(layer.weight, before)


class Shown(Tensor):
    """A tensor of a quantiser's own type, with the dtype of the weights that it stands for."""


@pytest.mark.parametrize("change", ["type", "meta", "forward", "hook"])
def test_linear_layers_that_are_more_than_their_weight_are_neither_packed_nor_merged(change: str) -> None:
    model = nn.ModuleDict({"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}).bfloat16()
    layer, other = model["q"], model["k"]
    if change == "type":
        layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Shown), requires_grad=False)
    elif change == "meta":
        layer.weight = nn.Parameter(layer.weight.to("meta"))
    elif change == "forward":
        layer.forward = lambda states: states
    else:
        layer.register_forward_hook(lambda *given: None)
    assert (plain(layer), plain(other)) == (False, True)
    twin = packed(model)
    assert type(twin["q"]) is nn.Linear
    # Which CPU this is decides about the other layer.
    assert isinstance(twin["k"], PackedLinear) == keeps_bits(torch.device("cpu"), torch.bfloat16)
    if change in ("forward", "hook"):
        states = torch.ones(1, 4, dtype=torch.bfloat16)
        merge(model, lambda: [each(states) for each in model.values()])
        assert model["q"] is layer
        assert model["k"] is other


def test_packing_is_refused_where_no_layer_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lm.forwards.packed.keeps_bits", lambda device, dtype: True)
    with pytest.raises(InputError, match="no linear layer of llama has a plain weight, so nothing can be packed"):
        outrider.load(quantised(tiny("llama")), drafter="none", forward="packed")


def test_quantised_weights_are_not_compiled() -> None:
    model = tiny("llama")
    head = model.lm_head
    head.weight = nn.Parameter(head.weight.detach().as_subclass(Shown), requires_grad=False)
    with pytest.raises(InputError, match=r"weights of llama are quantised or offloaded, .* choose forward=eager"):
        outrider.load(model, drafter="none", forward="compiled")
