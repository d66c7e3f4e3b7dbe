"""A GGUF file whose blocks stay packed is the model that transformers makes of it, and every command runs on it."""

import logging
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen2Config,
)

import outrider
from outrider import Sampling
from outrider.core.place import place_of
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.fingerprint import read_from, shape_of, weights_of
from outrider.lm.hf.gguf import MadePlain
from outrider.lm.hf.open import LOADING, logit_width, open_config, open_model
from outrider.lm.hf.weights import weight_bytes
from outrider.lm.weights.gguf import BlockModel
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear
from outrider.lm.weights.plain import copied, has_blocks
from outrider.proof.gate import in_float32
from outrider.training.online.learning import why_not
from recipes.tiny import scrambled
from tests.world.gguf_files import write_gguf

CASTS = True
GREEDY = Sampling(temperature=0, seed=0)
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=16, layer_types=["sliding_attention"] * 2),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
}
MIXED = {"attn_v": "Q6_K", "ffn_down": "Q5_K", "token_embd": "Q8_0", "attn_k": "Q5_0", "output.": "Q6_K"}


def tiny(name: str) -> PreTrainedModel:
    return scrambled(AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)).eval()


def packed(place: Path, name: str = "llama", kind: str = "Q4_K") -> Path:
    """A file of a tiny model; `mixed` has blocks of several kinds."""
    file = place / f"{name}-{kind}.gguf"
    kinds = MIXED if kind == "mixed" else {}
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    write_gguf(file, tiny(name), tokenizer, kind="Q4_K" if kind == "mixed" else kind, kinds=kinds)
    os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**10))
    return file


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "mixed"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_packed_model_is_the_unpacked_one_bit_for_bit(name: str, kind: str, tmp_path: Path) -> None:
    file = packed(tmp_path, name, kind)
    ours, theirs = open_model(str(file), keep_blocks=BlockModel.of), open_model(str(file))
    assert not any(type(module) in (nn.Linear, nn.Embedding) for module in ours.modules())
    tensors = dict([*ours.named_parameters(), *ours.named_buffers()])
    for part, weight in [*theirs.named_parameters(), *theirs.named_buffers()]:
        if part in tensors:
            assert tensors[part].dtype == weight.dtype
            assert torch.equal(tensors[part], weight), part
    unpacked = dict(copied(ours, torch.bfloat16).named_parameters())
    assert unpacked.keys() == dict(theirs.named_parameters()).keys()
    for part, weight in theirs.named_parameters():
        assert torch.equal(unpacked[part], weight), part
    assert ours.config.to_dict() == theirs.config.to_dict()
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()
    assert (ours.dtype, ours.training, ours.name_or_path) == (torch.bfloat16, False, str(file))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_weights_in_float64(name: str, tmp_path: Path) -> None:
    file, ids = packed(tmp_path, name, "mixed"), torch.arange(3, 40)[None]
    ours = open_model(str(file), keep_blocks=BlockModel.of)
    exact, rounded = copied(ours, torch.float64), copied(ours, torch.bfloat16)
    with torch.inference_mode():
        wanted = exact(ids).logits
        errors = [float((model(ids).logits.double() - wanted).std() / wanted.std()) for model in (ours, rounded)]
    # Weights that are exact leave the roundings of activations alone.
    assert errors[0] < 0.05, errors
    assert errors[0] < 1.2 * errors[1], errors


def test_tied_weights_are_one_tensor_and_memory_is_that_of_the_file(tmp_path: Path) -> None:
    file = packed(tmp_path, "tied")
    model = open_model(str(file), keep_blocks=BlockModel.of)
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, BlockEmbedding)
    assert isinstance(output, BlockLinear)
    assert embedding.data is output.data
    assert weight_bytes(model) < 1.1 * file.stat().st_size
    assert logit_width(model) == 8192


def test_a_line_says_that_blocks_stay_or_why_they_do_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def line(file: Path, **options: object) -> str:
        caplog.clear()
        with caplog.at_level(logging.DEBUG, LOADING):
            outrider.load(str(file), drafter="none", device="cpu", **options)
        return next(text for each in caplog.records if (text := each.getMessage()).startswith("loading"))

    assert "; stay packed, " in line(packed(tmp_path))
    assert "packed" not in line(packed(tmp_path), dtype="bfloat16")
    assert "; made plain, because no layer computes from blocks of kind TQ2_0, " in line(packed(tmp_path, kind="TQ2_0"))


def test_what_cannot_stay_becomes_plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, reason in (("F16", "it has no blocks"), ("TQ2_0", "no layer computes from blocks of kind TQ2_0")):
        file = packed(tmp_path, kind=kind)
        with pytest.raises(MadePlain, match=reason):
            BlockModel.of(place_of(str(file)), open_config(str(file)))
        assert not has_blocks(open_model(str(file), keep_blocks=BlockModel.of))
    file = packed(tmp_path)
    monkeypatch.setattr("outrider.lm.weights.gguf.has_kernels", lambda: False)
    with pytest.raises(MadePlain, match="there is no C"):
        BlockModel.of(place_of(str(file)), open_config(str(file)))


def test_a_packed_model_is_known_by_its_file_and_is_not_the_unpacked_one(tmp_path: Path) -> None:
    file = packed(tmp_path, kind="mixed")
    one, same, plain = (open_model(str(file), keep_blocks=keep) for keep in (BlockModel.of, BlockModel.of, None))
    assert read_from(one) is not None
    assert weights_of(one) == weights_of(same) != weights_of(plain)
    assert shape_of(one) == shape_of(same) != shape_of(plain)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_texts_are_those_of_plain_decoding_and_of_the_model_alone(name: str, tmp_path: Path) -> None:
    target, draft = packed(tmp_path, name, "mixed"), packed(tmp_path, name, "Q8_0")
    prompts = [[5, 6, 7, 5, 6], [9, 3, 11]]
    texts = []
    for drafter in ("none", "ngram:prompt_lookup_min=1", f"model:path={draft}"):
        engine = outrider.load(str(target), drafter=drafter, length="fixed:3", device="cpu", max_slots=2)
        assert has_blocks(engine.parts.target.model)
        outputs = engine.generate(prompts, max_new_tokens=12, sampling=GREEDY, ignore_eos=True)
        texts.append([output.tokens for output in outputs])
        if drafter.startswith("model"):
            assert has_blocks(engine.parts.drafter.lm.model)
            exact = in_float32(engine)
            assert not has_blocks(exact.parts.target.model)
            assert exact.parts.target.dtype == exact.parts.drafter.lm.dtype == torch.float32
    assert texts[0] == texts[1] == texts[2]


def test_a_packed_draft_model_may_propose_a_short_list(tmp_path: Path) -> None:
    file, words = packed(tmp_path, kind="mixed"), tmp_path / "words.txt"
    words.write_text("\n".join(map(str, range(0, 8192, 3))))
    engine = outrider.load(str(file), drafter=f"model:path={file},token_map={words}", length="fixed:2", device="cpu")
    drafter = engine.parts.drafter
    assert drafter.lm.vocab_size == 2731
    ids = torch.arange(3, 9)[None]
    with torch.inference_mode():
        whole, cut = engine.parts.target.model(ids).logits, drafter.lm.model(ids).logits
    assert torch.equal(whole[..., ::3], cut)
    output = drafter.lm.model.get_output_embeddings()
    assert isinstance(output, BlockLinear)
    assert (output.kind, output.data.nbytes) == ("Q6_K", 171 * 3360)
    [output] = engine.generate([[5, 6, 7]], max_new_tokens=8, sampling=GREEDY, ignore_eos=True)
    assert len(output.tokens) == 8


def test_packed_draft_models_do_not_learn(tmp_path: Path) -> None:
    file = packed(tmp_path)
    engine = outrider.load(str(file), drafter=f"model:path={file}", length="fixed:2", device="cpu")
    assert "packed and cannot be trained" in (why_not(engine.parts.drafter) or "")
