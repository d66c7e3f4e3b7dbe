"""Vectors that are added in a model's feed-forward layers."""

import numpy as np
import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.steered import SteeredLM, steered, up_projections
from tests.world.zoo import VOCAB, tiny

GATED = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "cohere2", "gemma3n")
TARGETS = ("gpt2", "opt", "bloom", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "llama4")
TEXT = torch.tensor([[3, 9, 4, 7, 11, 5, 8, 30]])


def vectors(parts, rows: int, columns: int, seed: int = 0) -> list[torch.Tensor]:
    dice = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, columns, part.width, generator=dice, dtype=torch.float64) for part in parts]


@pytest.mark.parametrize("name", GATED)
@torch.no_grad()
def test_a_layer_multiplies_its_gate_with_its_up_projection_and_the_vector(name):
    model = tiny(name)
    parts = up_projections(model)
    deltas, seen = vectors(parts, *TEXT.shape), {}

    def note(layer):
        return lambda module, given, output: seen.update({layer: (module, given[0], output)})

    feed_forward = [module for module in model.modules() if hasattr(module, "down_proj")]
    hooks = [module.register_forward_hook(note(i)) for i, module in enumerate(feed_forward)]
    with steered(parts, deltas.__getitem__):
        model(TEXT, use_cache=False)
    for hook in hooks:
        hook.remove()
    assert len(seen) == len(parts)
    for layer, (module, given, output) in seen.items():
        if hasattr(module, "gate_up_proj"):
            gate, up = module.gate_up_proj(given).chunk(2, -1)
        else:
            gate, up = module.gate_proj(given), module.up_proj(given)
        act = module.activation_fn if hasattr(module, "activation_fn") else module.act_fn
        assert torch.allclose(output, module.down_proj(act(gate) * (up + deltas[layer])), atol=1e-9)
    plain = model(TEXT, use_cache=False).logits
    with steered(parts, deltas.__getitem__):
        assert not torch.allclose(model(TEXT, use_cache=False).logits, plain, atol=1e-3)
    assert torch.equal(model(TEXT, use_cache=False).logits, plain)


@pytest.mark.parametrize("name", TARGETS)
def test_models_without_a_gated_layer_each_are_refused(name):
    with pytest.raises(InputError, match="cannot be steered"):
        up_projections(tiny(name))


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
@torch.no_grad()
def test_every_node_of_a_ragged_batch_of_trees_gets_its_own_vectors(name):
    model = tiny(name)
    lm = SteeredLM(model, max_slots=3)
    texts = [[3, 9, 4, 7], [11, 5], [8, 30, 6, 6, 12]]
    slots = [lm.open() for _ in texts]
    dice = torch.Generator().manual_seed(1)
    given = [torch.randn(len(text), lm.feature_size, generator=dice, dtype=torch.float64) for text in texts]
    segments = [
        Segment(slot=slot, tokens=torch.tensor(text), features=own)
        for slot, text, own in zip(slots, texts, given, strict=True)
    ]
    logits = lm.extend(segments).logits.split([len(text) for text in texts])
    for text, own, ours in zip(texts, given, logits, strict=True):
        deltas = own[None].split([part.width for part in lm.parts], -1)
        with steered(lm.parts, deltas.__getitem__):
            alone = model(torch.tensor([text]), use_cache=False).logits[0]
        assert torch.allclose(ours, alone, atol=1e-9)
    lm.commit({slot: range(len(text)) for slot, text in zip(slots, texts, strict=True)})
    siblings = torch.randn(2, lm.feature_size, generator=dice, dtype=torch.float64)
    tree = Segment(slot=slots[0], tokens=torch.tensor([5, 9]), parents=np.array([-1, -1]), features=siblings)
    ours = lm.extend([tree]).logits
    for i, token in enumerate((5, 9)):
        deltas = torch.cat([given[0], siblings[i : i + 1]])[None].split([part.width for part in lm.parts], -1)
        with steered(lm.parts, deltas.__getitem__):
            alone = model(torch.tensor([[*texts[0], token]]), use_cache=False).logits[0, -1]
        assert torch.allclose(ours[i], alone, atol=1e-9)


def test_nodes_without_vectors_are_read_as_the_model_reads_them_bit_for_bit():
    model = tiny("llama").float()
    plain, lm = LanguageModel(model, max_slots=1), SteeredLM(model, max_slots=1)
    zeros = torch.zeros(TEXT.shape[1], lm.feature_size)
    expected = plain.extend([Segment(slot=plain.open(), tokens=TEXT[0])]).logits
    for features in (None, zeros):
        slot = lm.open()
        assert torch.equal(lm.extend([Segment(slot=slot, tokens=TEXT[0], features=features)]).logits, expected)
        lm.release(slot)


def test_a_chain_in_one_go_is_steered_as_single_forwards_are():
    lm = SteeredLM(tiny("llama"), max_slots=4)
    dice = torch.Generator().manual_seed(2)
    own = torch.randn(2, lm.feature_size, generator=dice, dtype=torch.float64)
    tokens = torch.randint(3, VOCAB, (3, 2), generator=dice)
    slots = [lm.open() for _ in range(4)]
    follow = lm.chain(slots[:2], [3, 3])
    for row in tokens:
        ours = follow(row, own).logits
        single = [
            Segment(slot=slot, tokens=token[None], features=vector[None])
            for slot, token, vector in zip(slots[2:], row, own, strict=True)
        ]
        assert torch.allclose(ours, lm.extend(single).logits, atol=1e-9)


def test_a_steered_model_runs_eager_and_says_why():
    lm = SteeredLM(tiny("llama"), max_slots=1)
    assert str(lm.choice) == "eager, because it is steered by hooks"
    for forward in ("packed", "compiled"):
        with pytest.raises(InputError, match="do not see hooks"):
            lm.run_by(forward)
