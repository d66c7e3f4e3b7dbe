"""What cannot be drafted is refused by name, in one sentence."""

import functools

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.streamers import BaseStreamer

from outrider import InputError, as_custom_generate
from outrider.integrate import generate, write_custom_generate
from outrider.integrate.kept import _KEPT
from outrider.lm.hf.cache_keyword import cache_keyword
from tests.integrate.test_generate import GREEDY, NGRAM, batch
from tests.world.models import llama
from tests.world.zoo import tiny


class Counts(LogitsProcessor):
    """Remembers how often it was asked."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores


class Switches(LogitsProcessor):
    """Has nothing to look at, and yet gives something else each time."""

    __slots__ = ()
    signs = iter([1.0, -1.0] * 50)

    def __call__(self, input_ids, scores):
        return scores + next(Switches.signs)


class Once(LogitsProcessor):
    """Can be asked once."""

    def __init__(self):
        self.asked = []

    def __call__(self, input_ids, scores):
        if self.asked:
            raise RuntimeError("asked already")
        self.asked.append(lambda: None)
        return scores


class Remembers(LogitsProcessor):
    """Forbids the token that stood last when it was asked before."""

    before = None

    def __call__(self, input_ids, scores):
        scores = scores if self.before is None else scores.scatter(1, self.before, -torch.inf)
        self.before = input_ids[:, -1:]
        return scores


class Deaf(BaseStreamer):
    """A streamer."""

    def put(self, value): ...
    def end(self): ...


class Padding:
    """A criterion by which `generate` pads rows."""

    eos_token_id = 7

    def __call__(self, input_ids, scores):
        return input_ids[:, -1] == 7


def filled() -> DynamicCache:
    model, cache = llama(), DynamicCache()
    model(batch(3)["input_ids"], **{cache_keyword(type(model)): cache})
    return cache


ALLOWED = iter(range(3, 60))
KEYS = [5, 9, 11]
REFUSED = {
    "num_beams": ({"num_beams": 3}, r"beam_search is neither sampling nor greedy decoding; drop num_beams"),
    "drawn beams": ({"num_beams": 2, "do_sample": True}, "beam_sample .* drop num_beams"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive_search .* drop penalty_alpha"),
    "dola": ({"dola_layers": "low"}, "dola_generation .* drop dola_layers"),
    "constraints": (
        {"force_words_ids": [[3]], "num_beams": 2},
        "constrained_beam_search .* drop constraints or force_w",
    ),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, "assisted_generation .* prompt_lookup_num_tokens"),
    "early exit": ({"assistant_early_exit": 1}, "assisted_generation .* assistant_early_exit"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions cannot be had"),
    "hidden": ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states cannot be had"),
    "guidance": ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidanceLogitsProcessor remembers earlier calls"),
    "synthid": (
        {"watermarking_config": SynthIDTextWatermarkingConfig(keys=KEYS, ngram_len=3)},
        "SynthIDTextWatermarkLogitsProcessor remembers earlier calls",
    ),
    "positions": ({"position_ids": torch.arange(3, 12)[None]}, "position_ids must count each row's tokens from 0"),
    "holes": ({"attention_mask": torch.tensor([[1] * 4 + [0] + [1] * 4])}, "attention_mask hides tokens .* pad on the"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 8 + [0]])}, "attention_mask hides tokens .* pad on the l"),
    "nothing but padding": ({"attention_mask": torch.zeros(1, 9, dtype=torch.long)}, "a row of the batch is all paddi"),
    "context": ({"max_new_tokens": 900}, r"9 tokens and 900 new ones pass the context of 256; give max_new_tokens=247"),
    "counting": ({"logits_processor": LogitsProcessorList([Counts()])}, "Counts is changed by being asked"),
    "switching": ({"logits_processor": LogitsProcessorList([Switches()])}, "Switches is changed by being asked"),
    "once": ({"logits_processor": LogitsProcessorList([Once()])}, "Once is changed by being asked"),
    "remembering": ({"logits_processor": LogitsProcessorList([Remembers()])}, "Remembers is changed by being asked"),
    "allowed tokens that change": (
        {"prefix_allowed_tokens_fn": lambda row, said: [next(ALLOWED)]},
        "PrefixConstrainedLogitsProcessor is changed by being asked",
    ),
    "marks for other tokens": (
        {"attention_mask": torch.tensor([[0] + [1] * 4])},
        r"shape \(1, 5\), input_ids \(1, 9\)",
    ),
    "positions of other tokens": ({"position_ids": torch.arange(4)[None]}, "position_ids must count each row's tokens"),
    "no tokens": (
        {"input_ids": torch.zeros(1, 0).long()},
        r"input_ids of shape \(1, 0\) hold no token; give every row",
    ),
    "no rows": ({"input_ids": torch.zeros(0, 4).long()}, r"input_ids of shape \(0, 4\) hold no token; give every row"),
    "a prompt that fills the context": (
        {"input_ids": torch.full((1, 256), 5)},
        "256 tokens and 24 new ones pass the context of 256; give a shorter prompt",
    ),
    "no padding token": (
        {"stopping_criteria": StoppingCriteriaList([Padding()]), "pad_token_id": None},
        "there is no padding token; give pad_token_id",
    ),
    "streamer": ({"streamer": Deaf()}, r"does not hand streamer on .* as_custom_generate\(streamer=...\)"),
    "assistant": ({"assistant_model": llama()}, "does not hand assistant_model on .* drafter='model:path=...'"),
    "synced": ({"synced_gpus": True}, "does not hand synced_gpus on .* drop it"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_drafted_is_refused_by_name(what):
    given, sentence = REFUSED[what]
    model = llama()
    model.generation_config.pad_token_id = None
    inputs = batch(9) if "input_ids" not in given else {}
    with pytest.raises(InputError, match=sentence):
        model.generate(**inputs | GREEDY | given, custom_generate=as_custom_generate(drafter=NGRAM))
    assert model not in _KEPT or "context" in what, "refused before there is an engine, which knows its context"


def test_a_filled_cache_is_refused():
    model = llama()
    keyword = cache_keyword(type(model))
    with pytest.raises(InputError, match=f"{keyword} cannot be continued"):
        model.generate(**batch(9), **{keyword: filled()}, custom_generate=as_custom_generate())


def test_embeddings_are_refused():
    with pytest.raises(InputError, match="inputs_embeds cannot be used"):
        llama().generate(
            inputs_embeds=torch.zeros(1, 3, 32, dtype=torch.float64),
            max_new_tokens=3,
            custom_generate=as_custom_generate(),
        )


def test_other_inputs_are_refused():
    ids = batch(9)
    with pytest.raises(InputError, match="token_type_ids cannot be used"):
        tiny("gpt2").generate(**ids, token_type_ids=ids["attention_mask"], custom_generate=as_custom_generate())


def test_encoder_decoder_models_are_refused():
    config = BartConfig(
        vocab_size=32,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    with pytest.raises(InputError, match="bart is an encoder-decoder model"):
        BartForConditionalGeneration(config).generate(batch(9)["input_ids"] % 32, custom_generate=as_custom_generate())


@pytest.mark.parametrize("sizes", [(9, 4), (9, 9, 9)])
def test_a_processor_that_looks_across_rows_is_refused(sizes):
    across = LogitsProcessorList([lambda ids, scores: scores - scores.mean(0, keepdim=True)])
    drafted = as_custom_generate(drafter=NGRAM)
    with pytest.raises(InputError, match="gives a row other scores beside other rows"):
        llama().generate(**batch(*sizes), **GREEDY, logits_processor=across, custom_generate=drafted)
    assert llama().generate(**batch(9), **GREEDY, logits_processor=across, custom_generate=drafted).shape == (1, 33)


def test_a_model_with_its_own_way_of_preparing_inputs_is_refused_while_it_has_it():
    model, drafted = llama(), as_custom_generate(drafter=NGRAM)
    plain, own = model.generate(**batch(9), **GREEDY), model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = functools.wraps(own)(lambda *given, **named: own(*given, **named))
    with pytest.raises(InputError, match=r"prepare_inputs_for_generation was replaced .* generate without Outrider"):
        model.generate(**batch(9), **GREEDY, custom_generate=drafted)
    model.prepare_inputs_for_generation = own
    assert torch.equal(model.generate(**batch(9), **GREEDY, custom_generate=drafted), plain)


def test_stop_strings_without_tokenizer_are_refused():
    with pytest.raises(InputError, match="stop_strings need the model's tokenizer; give tokenizer="):
        generate(**batch(9), model=llama(), stop_strings=["."])
    with pytest.raises(InputError, match="stop_strings need the model's tokenizer"):
        as_custom_generate(stop_strings=["."])


def test_scores_that_leave_no_token_are_refused():
    nothing = LogitsProcessorList([lambda ids, scores: scores - torch.inf])
    with pytest.raises(InputError, match="leave no token that could come"):
        llama().generate(
            **batch(9), do_sample=True, logits_processor=nothing, custom_generate=as_custom_generate(drafter=NGRAM)
        )


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"assistant_model": llama()}, "assistant_model is not used here; give a draft model as drafter="),
        ({"synced_gpus": True}, "synced_gpus would have all GPUs step together"),
        ({"custom_generate": as_custom_generate()}, "custom_generate is Outrider here already"),
        ({"cache_implementation": "quantized"}, "cache_implementation='quantized' rounds keys and values"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged' runs another generate"),
        ({"token_healing": True}, "token_healing is not done here; heal the prompt with model.heal_tokens"),
        ({"generation_config": GenerationConfig(token_healing=True)}, "token_healing is not done here"),
    ],
)
def test_the_whole_of_generate_refuses_what_it_does_not_use(given, sentence):
    with pytest.raises(InputError, match=sentence):
        generate(**batch(9), model=llama(), **given)


def test_what_has_no_generate_is_refused():
    with pytest.raises(InputError, match="a Linear has no generate of its own; give the transformers model in it"):
        generate(**batch(9), model=torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"drafter": "ngrm"}, "unknown drafter 'ngrm'; did you mean 'ngram'"),
        ({"length": "fixed:x"}, "length 'fixed' field"),
    ],
)
def test_a_file_is_not_written_for_parts_that_do_not_exist(given, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        write_custom_generate(tmp_path, **given)
    assert not list(tmp_path.iterdir())


def test_parts_that_do_not_fit_are_refused_as_by_load():
    with pytest.raises(InputError, match="unknown drafter 'ngrm'; did you mean 'ngram'"):
        llama().generate(**batch(9), custom_generate=as_custom_generate(drafter="ngrm"))
    with pytest.raises(InputError, match="lenient"):
        llama().generate(**batch(9), custom_generate=as_custom_generate(verifier="lenient"))
