"""Attention without masks for chains, and without copies of keys and values on GPUs."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers.integrations.sdpa_attention import repeat_kv

from outrider.lm.forwards.grouped import lean, read_chain, read_grouped
from outrider.lm.head import attend
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from tests.world.card import DEVICE, gpu
from tests.world.zoo import VOCAB, tiny

WIDE = 40
"""Tokens of a chunk that needs no mask."""

CASTS = True


@dataclass
class Call:
    """One call of an attention kernel."""

    query_heads: int
    key_heads: int
    mask_dtype: torch.dtype | None
    gqa: bool

    @property
    def masked(self) -> bool:
        return self.mask_dtype is not None


class Spy(TorchFunctionMode):
    """Notes the calls of torch's attention kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if "scaled_dot_product" in getattr(func, "__name__", ""):
            mask, gqa = named.get("attn_mask"), named.get("enable_gqa", False)
            # The corner of a triangle is no mask: no kernel that takes it reads one.
            dtype = None if mask is None or isinstance(mask, CausalBias) else mask.dtype
            self.calls.append(Call(args[0].shape[1], args[1].shape[1], dtype, gqa))
        return func(*args, **named)

    @property
    def num_masked(self) -> int:
        return sum(call.masked for call in self.calls)


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, count).tolist()


def extend(lm: LanguageModel, slots: list[int], count: int) -> None:
    lm.extend([Segment(slot=s, tokens=torch.tensor(tokens(count, s)), logits="none") for s in slots])
    lm.commit({s: range(count) for s in slots})


@pytest.mark.parametrize("slots", [1, 3])
def test_the_chunks_of_prompts_are_read_without_any_mask(slots: int) -> None:
    lm = LanguageModel(tiny("llama"), max_slots=slots)
    opened = [lm.open() for _ in range(slots)]
    with Spy() as spy:
        extend(lm, opened, WIDE)
        assert (spy.num_masked, len(spy.calls)) == (0, lm.num_layers), spy.calls
        extend(lm, opened, WIDE)
        # Keys before the chunk and its own are read apart.
        assert (spy.num_masked, len(spy.calls)) == (0, 3 * lm.num_layers), spy.calls


def test_layers_that_look_back_less_far_have_a_mask_and_the_others_none() -> None:
    lm = LanguageModel(tiny("gemma3"), max_slots=1)
    with Spy() as spy:
        extend(lm, [lm.open()], WIDE)
    assert [call.masked for call in spy.calls] == [True, False]


def test_drafts_and_chunks_behind_texts_of_different_lengths_have_masks() -> None:
    lm = LanguageModel(tiny("llama"), max_slots=2)
    slots = [lm.open(), lm.open()]
    extend(lm, slots[:1], 5)
    with Spy() as spy:
        extend(lm, slots, WIDE)
        extend(lm, slots[:1], 6)
    assert spy.num_masked == len(spy.calls) == 2 * lm.num_layers


def test_a_model_that_does_not_read_a_text_without_a_mask_always_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    forward = type(model.model.layers[0].self_attn).forward

    def without_order(self: Any, *args: Any, attention_mask: Tensor | None = None, **named: Any) -> Any:
        keys = named[cache_keyword(type(model))]
        plain = attention_mask is None and keys is not None
        seen = torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(1, 1, args[0].shape[1], 3) if plain else attention_mask
        return forward(self, *args, attention_mask=seen, **named)

    monkeypatch.setattr(type(model.model.layers[0].self_attn), "forward", without_order)
    lm = LanguageModel(model, max_slots=1)
    with Spy() as spy:
        extend(lm, [lm.open()], WIDE)
    assert spy.num_masked == len(spy.calls) == lm.num_layers


@pytest.mark.parametrize(("width", "keys"), [(1, 9), (9, 9), (4, 70), (64, 65)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_a_chain_reads_what_a_mask_lets_it_read(width: int, keys: int, heads: tuple[int, int]) -> None:
    torch.manual_seed(keys)
    queries = torch.randn(2, heads[0], width, 8, dtype=torch.float64)
    key, value = torch.randn(2, 2, heads[1], keys, 8, dtype=torch.float64).unbind()
    mask = torch.arange(keys) <= torch.arange(keys - width, keys)[:, None]
    groups = heads[0] // heads[1]
    plain = scaled_dot_product_attention(queries, repeat_kv(key, groups), repeat_kv(value, groups), attn_mask=mask)
    assert torch.allclose(read_chain(queries, key, value), plain, atol=1e-12)
    shared = mask.expand(2, 1, -1, -1)
    assert torch.allclose(read_grouped(queries, key, value, shared), plain, atol=1e-12)
    assert torch.allclose(attend(queries, key, value, shared), plain, atol=1e-12)


def test_a_model_attends_as_before_once_no_forward_runs() -> None:
    text = tiny("llama").config
    with lean(text):
        with lean(text):
            pass
        assert text._attn_implementation != "sdpa"
    assert text._attn_implementation == "sdpa"
    with pytest.raises(RuntimeError), lean(text):
        raise RuntimeError
    assert text._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_keys_and_values_reach_the_kernel_with_their_own_heads(dtype: torch.dtype) -> None:
    with gpu():
        model = tiny("llama").to(dtype).to(DEVICE)
        lm = LanguageModel(model, max_slots=2)
        slots = [lm.open(), lm.open()]
        with Spy() as spy:
            extend(lm, slots, WIDE)
            extend(lm, slots[:1], 3)
            extend(lm, slots, 2)
            branching = np.array([-1, 0, 0])
            lm.extend([Segment(slot=s, tokens=torch.tensor(tokens(3)), parents=branching) for s in slots])
    assert len(spy.calls) >= 4 * lm.num_layers
    assert {call.key_heads for call in spy.calls} == {2}, spy.calls
    assert not any(call.gqa and call.masked for call in spy.calls), spy.calls


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize(("width", "keys"), [(1, 9), (40, 40), (6, 70)])
def test_a_chain_on_a_gpu_reads_what_it_reads_on_a_cpu(width: int, keys: int) -> None:
    torch.manual_seed(keys)
    queries, key = torch.randn(1, 6, width, 64).bfloat16(), torch.randn(1, 2, keys, 64).bfloat16()
    plain = read_chain(queries, key, key)
    with Spy() as spy:
        found = read_chain(queries.cuda(), key.cuda(), key.cuda()).cpu()
    assert spy.num_masked == 0
    assert torch.allclose(found.float(), plain.float(), atol=0.02)


def test_on_a_gpu_a_mask_is_made_once_per_forward_and_added() -> None:
    with gpu():
        lm = LanguageModel(tiny("llama").float().to(DEVICE), max_slots=1)
        slot = lm.open()
        with Spy() as spy:
            extend(lm, [slot], 3)
    assert {call.mask_dtype for call in spy.calls} == {torch.float32}, spy.calls


def test_on_a_gpu_heads_read_shared_keys_by_no_mask_of_the_slow_kernel() -> None:
    torch.manual_seed(0)
    queries, keys = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 7, 8)
    mask = torch.ones(1, 1, 3, 7, dtype=torch.bool).tril(4)
    plain = attend(queries, keys, keys, mask)
    with gpu(), Spy() as spy:
        found = attend(queries.to(DEVICE), keys.to(DEVICE), keys.to(DEVICE), mask.to(DEVICE)).cpu()
    assert [(call.key_heads, call.gqa) for call in spy.calls] == [(2, False)]
    assert torch.allclose(found, plain, atol=1e-6)
