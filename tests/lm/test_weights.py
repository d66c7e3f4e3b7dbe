"""Models whose weights are not numbers are refused by the name of a tensor."""

import pytest
import torch
from transformers import PreTrainedModel

from outrider.cli.opened import check_numbers
from outrider.core.types import InputError
from outrider.lm.hf.open import reason_of
from outrider.lm.hf.weights import check_weights, has_other_than_numbers
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel
from tests.world.models import engine
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import tiny


def damaged(model: PreTrainedModel, name: str, value: float) -> PreTrainedModel:
    with torch.no_grad():
        model.get_parameter(name).view(-1)[-1] = value
    return model


@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_model_whose_weights_are_not_numbers_is_refused_by_the_tensors_name(dtype, value):
    name = "model.layers.1.mlp.down_proj.weight"
    model = damaged(tiny("llama").to(dtype), name, value)
    with pytest.raises(InputError, match=f"{name} of llama holds values that are not numbers"):
        LanguageModel(model, max_slots=1)


def test_a_recurrent_model_whose_weights_are_not_numbers_is_refused_by_the_tensors_name():
    model = tiny_recurrent("mamba2")
    name = next(name for name, _ in model.named_parameters() if name.endswith("out_proj.weight"))
    with pytest.raises(InputError, match=f"{name} of mamba2 holds values that are not numbers"):
        RecurrentModel(damaged(model, name, torch.nan), max_slots=1)


def test_a_weight_that_no_short_text_reads_is_named_where_all_weights_are_read():
    busy = engine("ngram")
    check_numbers(busy)
    damaged(busy.parts.target.model, "model.embed_tokens.weight", torch.nan)
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight of the target holds"):
        check_numbers(busy)


def test_every_kind_of_weight_is_judged():
    largest = torch.finfo(torch.float16).max
    assert not has_other_than_numbers(torch.full((9,), largest, dtype=torch.float16))
    assert has_other_than_numbers(torch.tensor([[0.5, torch.nan]]).to(torch.float8_e4m3fn))
    assert not any(map(has_other_than_numbers, (torch.zeros(0), torch.ones(3, dtype=torch.int8), torch.tensor([True]))))
    assert not has_other_than_numbers(torch.ones(3, device="meta"))
    check_weights(torch.nn.Linear(2, 2), "a layer")


def test_a_config_that_makes_logits_of_nothing_is_not_said_to_be_a_matter_of_masks():
    model = tiny("llama")
    model.model.norm.variance_epsilon = torch.nan
    with pytest.raises(InputError, match="llama gives logits that are not numbers for a short text"):
        LanguageModel(model, max_slots=1)


def test_a_longest_context_below_one_is_none():
    model = tiny("llama")
    model.config.max_position_embeddings = -1
    assert LanguageModel(model, max_slots=1, max_context=50).max_context == 50


def test_an_unknown_name_in_a_config_is_said_to_be_unknown():
    assert reason_of(KeyError("foo")) == "'foo' is unknown or missing"
