"""Bare forwards: the plain call of a transformers model on prepared tensors, which everything else is read against."""

import time
from collections.abc import Callable

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.lm.forwards.packed import packed
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """How long a call takes, the device's work included."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


class Bare:
    """Forwards of a model over a batch, behind a context that stays as long as it is.

    Args:
        ids: Tokens of each row; all are the context, and a forward is over the first ones again.
    """

    def __init__(self, model: PreTrainedModel, ids: Int[Tensor, "batch tokens"]) -> None:
        self.model, self.ids, self.cache = model, ids, DynamicCache(config=model.config)
        self._cached = {cache_keyword(type(model)): self.cache, "use_cache": True}
        with torch.inference_mode():
            model(ids, **self._cached, logits_to_keep=1)

    @torch.inference_mode()
    def forward(self, width: int) -> float:
        """Seconds of a forward over so many new tokens per row."""
        tokens = self.ids[:, :width].contiguous()
        spent = seconds(lambda: self.model(tokens, **self._cached), self.model.device)
        self.cache.crop(-width)
        return spent


class BareCompiled:
    """The same for a model's compiled forward, called with tensors that are ready.

    Args:
        ids: Tokens of each row; all are the context, and a forward is over the first ones again.
    """

    def __init__(self, model: PreTrainedModel, ids: Int[Tensor, "batch tokens"]) -> None:
        self.ids = ids
        self.lm = LanguageModel(model, max_slots=len(ids), max_context=2 * ids.shape[1])
        self.lm.prepare()
        self._slots = [self.lm.open() for _ in ids]
        for slot, row in zip(self._slots, ids, strict=True):
            self.lm.extend([Segment(slot=slot, tokens=row, logits="none")])
        self.lm.commit({slot: range(ids.shape[1]) for slot in self._slots})

    def forward(self, width: int) -> float:
        """Seconds of a forward over so many new tokens per row."""
        segments = [Segment(slot=s, tokens=row[:width]) for s, row in zip(self._slots, self.ids, strict=True)]
        return seconds(self.lm.repeated(segments), self.lm.device)


def bare(model: PreTrainedModel, ids: Int[Tensor, "batch tokens"], forward: str) -> Bare | BareCompiled:
    """Bare forwards of a kind."""
    if forward == "compiled":
        return BareCompiled(model, ids)
    return Bare(packed(model) if forward == "packed" else model, ids)


def random_llama(
    *, hidden: int, layers: int, heads: int, kv_heads: int, device: str | torch.device = "cpu"
) -> PreTrainedModel:
    """A Llama with random weights in bfloat16, which the device draws."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=hidden * 19 // 6,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)
