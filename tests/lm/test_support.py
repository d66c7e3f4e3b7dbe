"""Models that cannot be driven by masks are refused with their reason, and no others."""

from pathlib import Path

import pytest
from transformers import (
    BartConfig,
    BertConfig,
    BitsAndBytesConfig,
    BltConfig,
    DeepseekV32Config,
    FalconConfig,
    GPTNeoConfig,
    InklingTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxConfig,
    MptConfig,
    Phi3Config,
    PreTrainedConfig,
    RobertaConfig,
    RwkvConfig,
    ViTConfig,
    XLMConfig,
    xLSTMConfig,
)

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.support import REFUSALS, refusal
from outrider.lm.model import LanguageModel
from tests.world.zoo import ARCHITECTURES, scrambled, tiny, tiny_config

REFUSED = [
    (BartConfig, "encoder-decoder"),
    (RwkvConfig, "recurrent layers and keeps its states in a way of its own"),
    (xLSTMConfig, "recurrent layers and keeps its states in a way of its own"),
    (MiniMaxConfig, "recurrent layers and keeps its states in a way of its own"),
    (MptConfig, "ALiBi"),
    (XLMConfig, "takes no cache"),
    (DeepseekV32Config, "layers of type"),
    (RobertaConfig, "counting the tokens that are not padding"),
    (BertConfig, "unless its config says is_decoder=True"),
    (GPTNeoConfig, "masks keys by their place in the cache"),
    (InklingTextConfig, "adds a bias by distance in the cache"),
    (BltConfig, "no single stack of decoder layers"),
    (ViTConfig, "no causal language model"),
]

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(("config", "reason"), REFUSED)
def test_models_that_cannot_be_rolled_back_or_masked_are_refused(config: type[PreTrainedConfig], reason: str) -> None:
    assert reason in (refusal(config()) or "")


def test_falcon_is_refused_with_alibi_only() -> None:
    assert "ALiBi" in (refusal(FalconConfig(alibi=True)) or "")
    assert refusal(FalconConfig(alibi=False)) is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_of_the_zoo_are_not_refused(name: str) -> None:
    assert refusal(tiny_config(name)) is None


def test_8_bit_layers_are_refused_where_tokens_change_each_other() -> None:
    given = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    for settings in (given, BitsAndBytesConfig(load_in_8bit=True)):
        assert "llm_int8_threshold=0" in (refusal(LlamaConfig(quantization_config=settings)) or "")
    assert refusal(LlamaConfig(quantization_config=given | {"llm_int8_threshold": 0.0})) is None
    assert refusal(LlamaConfig(quantization_config=BitsAndBytesConfig(load_in_4bit=True))) is None


def test_activations_that_are_quantised_in_every_forward_are_refused() -> None:
    model = tiny("llama")
    assert refusal(model) is None
    # What torchao's tensors have whose layers quantise their input.
    model.model.layers[1].mlp.up_proj.weight.act_quant_kwargs = object()
    assert "quantise the weights alone" in (refusal(model) or "")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_soft_caps_and_sinks_need_eager_attention(name: str) -> None:
    model = tiny(name)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(InputError, match="load the model with attn_implementation='eager'"):
        LanguageModel(model)


def test_attention_without_4d_masks_is_refused() -> None:
    model = tiny("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="'flash_attention_2' takes no 4-D mask"):
        LanguageModel(model)


def test_rotary_tables_that_change_with_length_end_the_context() -> None:
    dynamic = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})
    assert "dynamic rotary scaling" in (refusal(dynamic) or "")
    config = tiny_config("phi3")
    long = Phi3Config(**{**config.to_dict(), "rope_parameters": LONGROPE, "original_max_position_embeddings": 64})
    assert Anatomy.of(long).context_limit == 64
    assert refusal(long, max_context=64) is None
    assert "give max_context=64 or less" in (refusal(long, max_context=65) or "")


def test_llama_4_ends_where_it_scales_queries_by_the_length_of_the_cache() -> None:
    config = tiny_config("llama4")
    assert Anatomy.of(config).context_limit == 8191
    config.attn_temperature_tuning = False
    assert Anatomy.of(config).context_limit is None


class Deaf(LlamaForCausalLM):
    """A model that takes positions and counts them itself all the same."""

    def forward(self, *args, position_ids=None, cache=None, use_cache=None, logits_to_keep=0, **named):
        named |= {cache_keyword(LlamaForCausalLM): cache, "use_cache": use_cache}
        return super().forward(*args, logits_to_keep=logits_to_keep, **named)


def test_a_model_that_misreads_trees_is_refused_by_trying_one() -> None:
    model = scrambled(Deaf(tiny_config("llama")).double().eval())
    assert refusal(model) is None
    with pytest.raises(InputError, match="llama does not read a tree of tokens as it reads a text"):
        LanguageModel(model)


def test_the_page_of_models_names_everything_that_is_refused() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "models.md").read_text(encoding="utf-8")
    table = [line for line in page.split("## What is refused")[1].splitlines() if "|" in line]
    assert [line.split("|")[1].strip() for line in table[2:]] == [*REFUSALS]


def test_what_was_typed_wrongly_is_said() -> None:
    model = tiny("llama")
    with pytest.raises(InputError, match="max_slots must be >= 1, got 0"):
        LanguageModel(model, max_slots=0)
    with pytest.raises(InputError, match="max_context must be <= 384"):
        LanguageModel(model, max_context=385)
    with pytest.raises(InputError, match=r"vocab_size must be in 1\.\.64"):
        LanguageModel(model, vocab_size=65)
