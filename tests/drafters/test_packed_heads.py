"""Heads beside a packed target: they compute with packed weights, and so does the target's output layer for them."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.types import Sampling
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.packed import PackedLinear, keeps_bits
from outrider.lm.head import suited
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from tests.world.heads import HEADS, head
from tests.world.parts import parts_of
from tests.world.zoo import VOCAB

pytestmark = pytest.mark.skipif(
    not keeps_bits(torch.device("cpu"), torch.bfloat16), reason="this CPU has no kernels for bfloat16"
)
GREEDY = Sampling(temperature=0.0)
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8, 9, 7, 9]]


class Reads(TorchDispatchMode):
    """Counts operations, and notes which of them read some tensors."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.watched = {tensor.data_ptr() for tensor in tensors}
        self.counts: Counter[str] = Counter()
        self.reading: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.data_ptr() in self.watched:
                self.reading[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).bfloat16().eval()


def engine(lm: LanguageModel, drafter: Drafter) -> Engine:
    parts = parts_of(lm, drafter)
    return Engine(parts, max_slots=3)


def beside(model: LlamaForCausalLM, forward: Forward) -> LanguageModel:
    return LanguageModel(model, max_slots=3, pad_to=2, forward=forward)


def linear_weights(module: nn.Module) -> list[torch.Tensor]:
    return [part.weight for part in module.modules() if isinstance(part, nn.Linear)]


@pytest.mark.parametrize("kind", HEADS)
def test_no_step_reads_a_weight_that_was_packed_or_packs_one(model, kind):
    lm = beside(model, "packed")
    drafter = head(kind, TargetInfo.of(lm, None))
    busy = engine(lm, drafter)
    own = nn.ModuleList(drafter.modules.values())
    reads = Reads(linear_weights(model) + linear_weights(own))
    with reads:
        made = busy.generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)
    assert not reads.reading, reads.reading
    assert reads.counts["_linear_pointwise"] > 0
    assert reads.counts["_reorder_linear_weight"] == 0
    plain = engine(beside(model, "packed"), NoDrafter()).generate(PROMPTS, max_new_tokens=12, sampling=GREEDY)
    assert [out.tokens for out in made] == [out.tokens for out in plain]


@pytest.mark.parametrize("kind", HEADS)
def test_packed_heads_guess_what_they_guess_unpacked(model, kind):
    accepted, modules = [], []
    for forward in ("eager", "packed"):
        lm = beside(model, forward)
        drafter = head(kind, TargetInfo.of(lm, None))
        made = engine(lm, drafter).generate(PROMPTS, max_new_tokens=24, sampling=GREEDY)
        accepted.append([(out.num_draft_tokens, out.num_accepted_tokens, out.tokens) for out in made])
        modules.append(nn.ModuleList(drafter.modules.values()))
    assert accepted[0] == accepted[1]
    weights, others = (each.state_dict() for each in modules)
    assert all(torch.equal(weight, others[name]) for name, weight in weights.items())


def test_the_output_layer_for_heads_is_that_of_the_packed_target(model):
    hidden = torch.randn(3, 32).bfloat16()
    ends = {forward: beside(model, forward).embedding_and_head() for forward in ("eager", "packed")}
    with torch.inference_mode():
        assert torch.equal(ends["eager"].head(hidden), ends["packed"].head(hidden))
        with Reads(linear_weights(model)) as reads:
            ends["packed"].head(hidden)
            assert not reads.reading
            ends["eager"].head(hidden)
            assert reads.reading
    assert not any(isinstance(part, PackedLinear) for part in model.modules())


def test_heads_run_as_their_target_does_where_that_keeps_every_bit():
    half, whole = nn.Linear(4, 4).bfloat16(), nn.Linear(4, 4)
    assert [suited(forward, half) for forward in ("eager", "packed", "compiled")] == ["eager", "packed", "packed"]
    assert {suited(forward, whole) for forward in ("eager", "packed", "compiled")} == {"eager"}
