"""A checkpoint's generation config: each field is honoured, refused by name, or has no part in the law of an output."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import outrider
from outrider import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.generation_config import BY_PROCESSORS, REFUSED, WHERE_SAMPLED
from outrider.lm.hf.open import open_model
from tests.world.zoo import tiny

HONOURED: dict[str, Any] = {
    "repetition_penalty": 1.7,
    "eos_token_id": [2, 5, 7],
    "sequence_bias": [[[3], 4.0], [[4, 5], -9.0]],
    "encoder_repetition_penalty": 1.9,
    "no_repeat_ngram_size": 1,
    "encoder_no_repeat_ngram_size": 1,
    "bad_words_ids": [[29], [5, 6], [59], [8], [9]],
    "min_length": 20,
    "min_new_tokens": 17,
    "forced_bos_token_id": 6,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.9),
    "suppress_tokens": [29, 59, 60],
    "begin_suppress_tokens": list(range(20, 61)),
    "watermarking_config": {"bias": 9.0},
}
SAMPLED = {"do_sample", "temperature", "top_k", "top_p", "min_p"}
REFUSED_AT: dict[str, Any] = {
    "typical_p": 0.9,
    "epsilon_cutoff": 1e-3,
    "eta_cutoff": 1e-3,
    "top_h": 0.5,
    "watermarking_config": {"bias": 2.0},
    "num_beams": 2,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "constraints": [1],
    "force_words_ids": [[1]],
    "guidance_scale": 1.5,
    "token_healing": True,
    "max_time": 1.0,
}
ELSEWHERE = {"stop_strings"}
"""Honoured, and tested with a tokenizer."""
LENGTH = {"max_length", "max_new_tokens", "num_return_sequences"}
"""How much is asked for; a request says it."""
OF_BEAMS = {"early_stopping", "length_penalty", "diversity_penalty", "low_memory"}
OF_DRAFTS = {"prompt_lookup_num_tokens", "max_matching_ngram_size", "use_mtp", "is_assistant", "speculation_type"}
OF_DRAFTS |= {"num_assistant_tokens", "num_assistant_tokens_schedule", "target_lookbehind"}
OF_DRAFTS |= {"assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight"}
OF_DRAFTS |= {"assistant_lookbehind"}
"""How transformers drafts; drafts do not change the law."""
OF_CACHES = {"use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"}
OF_CACHES |= {"compile_config", "disable_compile", "continuous_batching_config"}
OF_OUTPUTS = {"output_attentions", "output_hidden_states", "output_logits", "output_scores", "return_dict_in_generate"}
NO_LAW = {"pad_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version", "renormalize_logits"}
"""Padding, the other family of models, and a constant that softmax takes off again."""
PROMPTS = [[4, 52, 7, 24, 5, 6, 4], [9]]


def test_every_field_of_transformers_has_its_place():
    groups = [SAMPLED, HONOURED.keys(), REFUSED_AT.keys(), ELSEWHERE, LENGTH, OF_BEAMS, OF_DRAFTS, OF_CACHES]
    known = set().union(*groups, OF_OUTPUTS, NO_LAW)
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    assert fields - known == set(), "new fields: honour or refuse them"
    assert set(BY_PROCESSORS) <= HONOURED.keys()
    assert {*REFUSED, *WHERE_SAMPLED} == REFUSED_AT.keys()


def model_with(**fields: Any) -> PreTrainedModel:
    model = tiny("llama").float()
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=2)
    for name, value in fields.items():
        setattr(model.generation_config, name, value)
    return model


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16)
    return found[0, len(prompt) :].tolist()


def test_greedy_output_follows_each_field_as_generate_does():
    idle = [name for name in HONOURED if not _follows(name)]
    # Nothing is invalid in these logits, and the text is shorter than what these fields ask for anyway.
    assert set(idle) <= {"remove_invalid_values", "min_length", "min_new_tokens", "eos_token_id"}


def _follows(name: str) -> bool:
    """Whether a field changes the output. It is compared with that of `generate`."""
    plain, model = model_with(do_sample=False), model_with(do_sample=False, **{name: HONOURED[name]})
    engine = outrider.load(model, drafter="ngram", length="fixed:3")
    outputs = [out.tokens for out in engine.generate(PROMPTS, max_new_tokens=16)]
    assert outputs == [generated(model, prompt) for prompt in PROMPTS], name
    return outputs != [generated(plain, prompt) for prompt in PROMPTS]


def test_an_end_waits_for_the_length_that_the_config_asks_for():
    """The likeliest token is the end, so that every output would end at once."""
    for name, value in (("min_length", 12), ("min_new_tokens", 5)):
        model = model_with(do_sample=False, sequence_bias=[[[2], 60.0]], **{name: value})
        [out] = outrider.load(model, drafter="ngram").generate(PROMPTS[:1], max_new_tokens=16)
        assert out.tokens == generated(model, PROMPTS[0])
        assert len(out.tokens) == 6


def test_settings_of_a_request_leave_the_rules_in_force():
    model = model_with(suppress_tokens=list(range(3, 40)))
    engine = outrider.load(model, drafter="none")
    for out in engine.generate(PROMPTS, max_new_tokens=16, sampling=Sampling(temperature=1, seed=0)):
        assert not set(out.tokens) & set(range(3, 40))


@pytest.mark.parametrize("name", REFUSED_AT)
def test_what_is_not_done_is_refused_by_name_and_can_be_ignored(name):
    model = model_with(do_sample=True, **{name: REFUSED_AT[name]})
    with pytest.raises(InputError, match=f"generation config has {name}=.*--ignore-generation-config"):
        outrider.load(model, drafter="none")
    engine = outrider.load(model, drafter="none", ignore_generation_config=True)
    assert (engine.sampling, engine.rules) == (Sampling(), None)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"sequence_bias": [[[3], 1.0]], "repetition_penalty": 1.2}, "sequence_bias and repetition_penalty"),
        ({"bad_words_ids": [[3], [10**6]]}, "cannot be followed: .*; remove it"),
        ({"no_repeat_ngram_size": "two"}, "cannot be followed"),
        ({"stop_strings": ["."]}, "stop_strings, which need a tokenizer"),
        ({"watermarking_config": {"keys": [1, 2, 3], "ngram_len": 2}, "do_sample": False}, "generation config"),
    ],
    ids=["order", "tokens", "kind", "tokenizer", "synthid"],
)
def test_what_cannot_be_followed_is_a_sentence(fields, sentence):
    with pytest.raises(InputError, match=sentence):
        outrider.load(model_with(**fields), drafter="none")


def test_stop_strings_of_the_config_end_outputs():
    engine = outrider.load(drafter="none", forward="eager", dtype="float32")
    model = open_model(str(EMBEDDED_TARGET), dtype="float32")
    model.generation_config.stop_strings = ["time", "."]
    greedy = Sampling(temperature=0)
    stopped = outrider.load(model, drafter="none", tokenizer=engine.tokenizer)
    [free] = engine.generate(["Once upon a"], max_new_tokens=40, sampling=greedy)
    [out] = stopped.generate(["Once upon a"], max_new_tokens=40, sampling=greedy)
    assert "." in free.text
    assert free.tokens[: len(out.tokens)] == out.tokens
    assert (out.finish_reason, out.text) == ("stop", free.text[: len(out.text)])
    assert "." not in out.text
    [going] = stopped.generate(["Once upon a"], max_new_tokens=40, sampling=greedy, ignore_eos=True)
    assert "." in going.text
