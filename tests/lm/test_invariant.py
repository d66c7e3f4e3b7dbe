"""Models with packed weights: the bits of a token's logits do not depend on what else a forward computes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.lm.forwards.attend import attends
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.linear import BlockLinear

CASTS = True
VOCAB, CONTEXT = 96, 700
TEXT = torch.from_numpy(np.random.default_rng(0).integers(3, VOCAB, size=CONTEXT))


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def packed(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """A random Llama whose layers compute from blocks that hold its weights in bfloat16."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCAB, num_hidden_layers=2, max_position_embeddings=CONTEXT, **sizes)
    )
    model = model.to(dtype).eval()
    for path, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear):
            blocks = layer.weight.detach().to(torch.bfloat16).view(torch.uint8).numpy()
            model.set_submodule(path, BlockLinear(BlockWeight.of_gguf(blocks, "BF16")))
    return model


def filled(lm: LanguageModel, length: int) -> int:
    """A slot with the beginning of the text."""
    slot = lm.open()
    for begin in range(0, length, 100):
        lm.extend([Segment(slot=slot, tokens=TEXT[begin : min(begin + 100, length)], logits="none")])
    lm.commit({slot: range(length)})
    return slot


def test_a_packed_model_attends_by_the_kernel():
    if not attends(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no C++ compiler is here")
    lm = LanguageModel(packed(), max_slots=2, forward="eager")
    slot = lm.open()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for begin, end in ((0, 50), (50, 53)):
            lm.extend([Segment(slot=slot, tokens=TEXT[begin:end])])
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["outrider::attend"] == 2 * 2
    assert not any("scaled_dot_product" in name for name in calls)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("behind", [1, 10, 300, 600])
def test_the_logits_of_a_token_have_the_same_bits_whatever_stands_beside_it(behind, dtype):
    if not attends(torch.device("cpu"), dtype):
        pytest.skip("no C++ compiler is here")
    lm = LanguageModel(packed(dtype), max_slots=8, forward="eager")
    alone = lm.extend([Segment(slot=filled(lm, behind), tokens=TEXT[behind : behind + 1])]).logits[0]
    differing = dict[str, int]()

    def compare(name: str, logits: Tensor) -> None:
        differing[name] = int((logits != alone).sum())

    for threads in (1, 2):
        torch.set_num_threads(threads)
        for width in (1, 2, 5, 8, 16, 40):
            slot = filled(lm, behind)
            tokens = TEXT[behind : behind + width]
            compare(f"{width} columns, {threads} threads", lm.extend([Segment(slot=slot, tokens=tokens)]).logits[0])
            lm.release(slot)
        slots = [filled(lm, length) for length in (3, behind, 450)]
        segments = [Segment(slot=slot, tokens=TEXT[k : k + 3 - k]) for k, slot in enumerate(slots)]
        segments[1] = Segment(slot=slots[1], tokens=TEXT[behind : behind + 2])
        compare(f"a batch, {threads} threads", lm.extend(segments).logits[3])
        for slot in slots:
            lm.release(slot)
    slot = filled(lm, behind)
    tree = torch.stack([TEXT[5], TEXT[behind], TEXT[6], TEXT[7]])
    compare("a tree", lm.extend([Segment(slot=slot, tokens=tree, parents=np.array([-1, -1, 0, 1]))]).logits[1])
    assert not {name: count for name, count in differing.items() if count}
