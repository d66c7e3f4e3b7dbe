"""A packed model says the same bits, of weights that it shares; taps and caches are the same."""

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider import InputError, load
from outrider.lm.forwards.packed import PackedLinear, packable, packed, worth_packing
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment

pytestmark = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this CPU has no kernels for bfloat16",
)

CASTS = True


def model(dtype: torch.dtype = torch.bfloat16, **more) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **more,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


@pytest.mark.parametrize("more", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}])
def test_a_packed_model_says_the_same_bits_in_every_shape(more):
    plain = model(**more)
    twin = packed(plain)
    for shape in ((1, 1), (1, 2), (1, 7), (3, 5), (1, 64)):
        ids = torch.arange(shape[0] * shape[1]).view(shape) % 99
        with torch.inference_mode():
            assert torch.equal(plain(ids).logits, twin(ids).logits)


def test_the_model_itself_is_left_alone_and_its_other_weights_are_shared():
    plain = model()
    twin = packed(plain)
    assert not any(isinstance(m, PackedLinear) for m in plain.modules())
    assert sum(isinstance(m, PackedLinear) for m in twin.modules()) == 2 * 7 + 1
    assert twin.model.embed_tokens.weight.data_ptr() == plain.model.embed_tokens.weight.data_ptr()
    assert twin.model.norm.weight is plain.model.norm.weight


def test_slots_trees_and_taps_are_the_same():
    plain = model()
    found = []
    for forward in ("eager", "packed"):
        lm = LanguageModel(plain, max_slots=2, forward=forward)
        slot = lm.open()
        lm.extend([Segment(slot=slot, tokens=torch.tensor([3, 1, 4]), logits="none")])
        lm.commit({slot: [0, 1, 2]})
        tree = Segment(slot=slot, tokens=torch.tensor([1, 5, 9]), parents=np.array([-1, -1, 0]))
        found.append(lm.extend([tree], taps=(0, 1, 2)))
    assert torch.equal(found[0].logits, found[1].logits)
    assert all(torch.equal(found[0].taps[k], found[1].taps[k]) for k in (0, 1, 2))


def test_only_what_keeps_every_bit_is_packed():
    assert worth_packing(model())
    assert not packable(model(torch.float32))
    with pytest.raises(InputError, match="packed works for bfloat16"):
        LanguageModel(model(torch.float32), forward="packed")


def test_a_model_that_is_loaded_here_may_be_packed_and_one_that_is_given_is_packed_only_if_asked():
    def is_packed(lm: LanguageModel) -> bool:
        return any(isinstance(m, PackedLinear) for m in lm._forwards[lm.forward].model.modules())

    engine = load(dtype="bfloat16")
    for lm in (engine.parts.target, engine.parts.drafter.lm):
        assert set(lm.choice.milliseconds) >= {"eager", "packed"}
        assert is_packed(lm) == (lm.forward == "packed")
    assert not is_packed(load(dtype="bfloat16", forward="eager").parts.target)
    assert not is_packed(load(model(), drafter="ngram").parts.target)
    assert is_packed(load(model(), drafter="ngram", forward="packed").parts.target)


def test_weights_that_changed_are_packed_anew():
    def larger() -> LlamaForCausalLM:
        found = model()
        with torch.no_grad():
            for weight in found.parameters():
                weight.mul_(1.5)
        return found

    def logits(lm: LanguageModel) -> torch.Tensor:
        return lm.extend([Segment(slot=lm.open(), tokens=torch.arange(5))]).logits

    lm = LanguageModel(model(), max_slots=2, forward="packed")
    before = logits(lm)
    with torch.no_grad():
        for weight in lm.model.parameters():
            weight.mul_(1.5)
    lm.renew()
    # Against packed weights: on CPUs with bfloat16 instructions packed products round differently.
    found = logits(lm)
    assert torch.equal(found, logits(LanguageModel(larger(), max_slots=1, forward="packed")))
    assert not torch.equal(found, before)
