"""Where oneDNN has no products in bfloat16, models are packed for our own kernels, and round little else."""

from dataclasses import replace

import pytest
import torch

from outrider import catalog
from outrider.heads.objective import HeadContext
from outrider.lm.forwards import packed as module
from outrider.lm.forwards.packed import packable, packed
from outrider.lm.weights.linear import BlockLinear
from outrider.lm.weights.operators import has_kernels
from tests.lm.test_packed import model as llama
from tests.world.learners import batch, documents

pytestmark = pytest.mark.skipif(not has_kernels(), reason="no C++ compiler")

CASTS = True


@pytest.fixture(autouse=True)
def _no_onednn(monkeypatch):
    monkeypatch.setattr(module, "keeps_bits", lambda device, dtype: False)


def test_every_linear_layer_computes_from_blocks_and_says_nearly_the_same():
    model = llama()
    assert packable(model)
    assert not packable(llama(torch.float32))
    twin = packed(model)
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
    assert sum(isinstance(layer, BlockLinear) for layer in twin.modules()) == len(layers) > 0
    ids = torch.arange(12)[None] % model.config.vocab_size
    with torch.inference_mode():
        exact, here = model.double()(ids).logits, twin(ids).logits
        assert (here - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_token_keeps_its_bits_beside_others():
    twin = packed(llama())
    layer = next(layer for layer in twin.modules() if isinstance(layer, BlockLinear))
    states = torch.randn(9, layer.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(layer(states)[4:5], layer(states[4:5]))


def test_states_that_a_head_learns_from_come_from_packed_layers():
    spec = catalog.rows("drafter")["eagle"].kind
    target = llama().requires_grad_(False)
    objective = spec.learner(spec.options(), HeadContext(target=target, documents=documents(), depth=2))
    text = replace(batch(), hidden={})
    found = objective.with_states(text).hidden
    assert any(isinstance(layer, BlockLinear) for layer in objective._running.modules())
    assert not any(isinstance(layer, BlockLinear) for layer in target.modules())
    with torch.inference_mode():
        exact = target.double().base_model(text.tokens, output_hidden_states=True).hidden_states
    for tap, states in found.items():
        if tap < target.config.num_hidden_layers:
            assert (states - exact[tap]).abs().max() < 0.05 * exact[tap].abs().max()
