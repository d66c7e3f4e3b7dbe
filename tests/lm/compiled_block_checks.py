"""Run by `test_compiled_blocks.py` in a process of its own, where no shapes are checked, which cannot be compiled."""

import json
import logging
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.core.types import InputError
from outrider.lm.choice import at_hand
from outrider.lm.forwards import libraries, shims
from outrider.lm.forwards.constants import INDEX, read
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear, Int8Linear
from tests.lm.compiled_checks import differences
from tests.lm.weights.test_blocks import file_bytes

VOCAB, SIZE = 4096, 64
COUNTS = (2, 5, 8, 16)
ROUNDING = ("q_proj", "k_proj", "v_proj")
KINDS = {"q_proj": "Q4_0", "k_proj": "Q4_1", "v_proj": "Q8_0", "o_proj": "Q5_1", "down_proj": "Q5_0"}


def llama(dtype: torch.dtype) -> LlamaForCausalLM:
    """A random Llama whose embedding and linear layers are packed, and have blocks of several kinds. In bfloat16 the
    layers of its MLP are plain, and some others multiply states of 8 bits.
    """
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": SIZE, "intermediate_size": 96, "max_position_embeddings": 512}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).to(dtype).eval()
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            plain = dtype == torch.bfloat16 and parent is model.model.layers[0].mlp
            if type(layer) is nn.Linear and name != "lm_head" and not plain:
                weight = blocks(KINDS.get(name, "Q4_0"), *layer.weight.shape)
                bias = None if layer.bias is None else torch.randn(layer.out_features).to(dtype)
                rounds = dtype == torch.bfloat16 and name in ROUNDING
                setattr(parent, name, (Int8Linear if rounds else BlockLinear)(weight, bias))
    tied = blocks("Q8_0", VOCAB, SIZE)
    output = Int8Linear if dtype == torch.bfloat16 else BlockLinear
    model.model.embed_tokens, model.lm_head = BlockEmbedding(tied, dtype), output(tied)
    return model


def blocks(kind: str, rows: int, features: int) -> BlockWeight:
    return BlockWeight.of_gguf(file_bytes(kind, rows, features, seed=rows), kind)


def alone_and_among(lm: LanguageModel) -> dict[str, int]:
    """By the number of rows and of threads, how many numbers of a row's logits differ from those that it has alone.

    Each row sees its own key only, so that attention returns that key's value.
    """
    tokens, found, threads = torch.arange(max(COUNTS)) * 229, {}, torch.get_num_threads()
    alone = torch.cat([firsts(lm, tokens[k : k + 1]) for k in range(len(tokens))])
    for count in COUNTS:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            among = firsts(lm, tokens[:count])
            found[f"{count} rows, {number} threads"] = int((among != alone[:count]).sum())
    torch.set_num_threads(threads)
    return found


def behind_and_among(lm: LanguageModel) -> dict[str, int]:
    """By what stands beside a token behind 300 others, and threads, how many of its logits differ from those alone."""
    text = torch.arange(340) * 37 % VOCAB
    prefix, found, threads = lm.open(), dict[str, int](), torch.get_num_threads()
    lm.extend([Segment(slot=prefix, tokens=text[:300], logits="none")])
    lm.commit({prefix: range(300)})
    company = {
        "alone": ([300], None),
        "chain of 5": (range(300, 305), None),
        "chain of 20": (range(300, 320), None),
        "tree": ([9, 300, 8, 7], np.array([-1, -1, 0, 1])),
    }
    alone: Tensor | None = None
    for number in (1, 2):
        torch.set_num_threads(number)
        for name, (tokens, parents) in company.items():
            slot = lm.copy(prefix, 300)
            rows = lm.extend([Segment(slot=slot, tokens=text[list(tokens)], parents=parents)]).logits
            row = rows[list(tokens).index(300)].clone()
            lm.release(slot)
            alone = row if alone is None else alone
            found[f"{name}, {number} threads"] = int((row != alone).sum())
    torch.set_num_threads(threads)
    lm.release(prefix)
    return found


def firsts(lm: LanguageModel, tokens: Tensor) -> Tensor:
    """The logits behind each of some tokens, which stand alone in slots of their own, in one forward."""
    slots = [lm.open() for _ in tokens]
    rows = lm.extend([Segment(slot=slot, tokens=token[None]) for slot, token in zip(slots, tokens, strict=True)]).logits
    for slot in slots:
        lm.release(slot)
    return rows.clone()


def without_a_compiler(model: LlamaForCausalLM) -> dict[str, object]:
    """What becomes of a library that is there where its functions cannot be built, and of one that is not."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("outrider").addHandler(handler)
    lm, found = LanguageModel(model, max_slots=2), dict[str, object]()
    with mock.patch.object(shims, "load", return_value=False):
        found["there"] = lm.package.exists()
        found["at hand"] = at_hand(lm)
        with mock.patch.object(libraries.Library, "opened", return_value=None):
            try:
                lm.package.open()
            except InputError as error:
                found["refused"] = str(error)
    logging.getLogger("outrider").removeHandler(handler)
    return {**found, "said": said}


def own_tensors(lm: LanguageModel) -> Sequence[str]:
    """The model's own tensors that its library reads in their places."""
    return sorted(each.own for each in read(lm.package.folder / INDEX) if each.own is not None)


def main() -> None:
    """Print what all checks find."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = llama(dtype)
        plain, compiled = (LanguageModel(model, max_slots=16, forward=kind) for kind in ("eager", "compiled"))
        before = compiled.num_compiled_forwards
        results: dict[str, object] = {"differences": differences(plain, compiled, ())}
        results["compiled"] = compiled.num_compiled_forwards > before
        results["differing"] = alone_and_among(compiled) | behind_and_among(compiled)
        results["own"] = own_tensors(compiled)
        results["gated"] = b"aoti_torch_cpu_gated" in (compiled.package.folder / libraries.LIBRARY).read_bytes()
        results["at hand"] = at_hand(compiled)
        if dtype == torch.float32:
            results["without a compiler"] = without_a_compiler(model)
            folder = compiled.package.folder
            with mock.patch.object(shims, "SOURCES", shims.SOURCES[:1]):
                results["other kernels"] = compiled.package.folder != folder
        found[str(dtype)] = results
    print(json.dumps(found))
