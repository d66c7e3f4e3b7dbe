"""Inside transformers every option of a setup holds, or is refused because the model is loaded already."""

import inspect
import tempfile
from dataclasses import fields

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

import outrider
from outrider import InputError, as_custom_generate, catalog
from outrider.assembly import OF_LOADING
from outrider.integrate import generate, write_custom_generate
from outrider.integrate.kept import _KEPT
from outrider.setup import KINDS, Setup
from tests.integrate.test_generate import GREEDY, NGRAM, assert_same, batch
from tests.world.tokenizers import letters
from tests.world.zoo import tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

TOKENIZER = tempfile.TemporaryDirectory()
"""The folder of a tokenizer whose ids the tiny models have."""
letters().save_pretrained(TOKENIZER.name)
VALUES = {
    "drafter": NGRAM,
    "tree": "chain",
    "verifier": "token",
    "length": "fixed:3",
    "decoding": "pearl",
    "allow_lossy": True,
    "tokenizer": TOKENIZER.name,
    "max_slots": 2,
    "max_context": 60,
    "max_prefill_tokens": 5,
    "max_warm_slots": 1,
    "max_warm_tokens": 40,
    "trust_remote_code": True,
    "threads": 1,
    "pad_to": 2,
    "forward": "eager",
    "probe": False,
    "reproducible": False,
}
"""A value of every option that holds inside transformers."""
SETTLED = {
    "target": "org/name",
    "vocab_size": 50,
    "device": "cpu",
    "dtype": "float32",
    "weights": "q8_0",
    "activations": "int8",
    "device_map": "auto",
    "tp_plan": "auto",
    "quantization_config": {"bits": 4},
    "attn_implementation": "eager",
    "revision": "main",
    "ignore_generation_config": True,
}


def test_every_option_holds_or_is_refused():
    assert VALUES.keys() | SETTLED.keys() == {field.name for field in fields(Setup)}
    assert SETTLED.keys() == {"target", "vocab_size", "ignore_generation_config", *OF_LOADING}


@pytest.mark.parametrize("name", SETTLED)
@pytest.mark.parametrize("door", [as_custom_generate, write_custom_generate])
def test_what_a_loaded_model_has_settled_is_refused(name, door, tmp_path):
    given = {name: SETTLED[name]}
    with pytest.raises(InputError, match=f"inside transformers the model is loaded already; leave out {name}"):
        door(**given) if door is as_custom_generate else door(tmp_path / "new", **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("drafted", [as_custom_generate(**VALUES), None], ids=["callable", "function"])
def test_all_options_together_give_what_generate_gives(drafted):
    model, inputs = tiny("llama"), batch(9, 4, 14)
    if drafted is None:
        plain = model.generate(**inputs, **GREEDY)
        assert torch.equal(plain, generate(**inputs, **GREEDY, model=model, **VALUES))
    else:
        assert_same(model, inputs, drafted, **GREEDY)
    [kept] = _KEPT[model]
    parts = kept.engine.parts
    names = [catalog.name_of(part) for part in (parts.drafter, parts.tree, parts.verifier, parts.decoding)]
    assert names == ["ngram", "chain", "token", "pearl"]
    assert parts.length.num_speculative_tokens == 3
    assert (kept.engine.max_slots, kept.engine.max_prefill_tokens) == (2, 5)
    assert (parts.target.max_slots, parts.target.max_context, parts.target.pad_to) == (2 + 1, 60, 2)


def test_pearl_inside_generate_gives_what_generate_gives():
    for rows in ((9,), (9, 4, 14)):
        assert_same(tiny("llama"), batch(*rows), as_custom_generate(drafter=NGRAM, decoding="pearl:3"), **GREEDY)


def test_no_option_has_the_name_of_an_argument_of_generate():
    arguments = {*inspect.signature(GenerationMixin.generate).parameters, *GenerationConfig().to_dict()}
    assert not arguments & KINDS.keys()


def test_unknown_options_are_named():
    with pytest.raises(InputError, match="unknown option 'draftr'; did you mean 'drafter'"):
        as_custom_generate(draftr="ngram")
    with pytest.raises(InputError, match="decoding must be a name of the catalog or a part of that family"):
        tiny("llama").generate(**batch(9), custom_generate=as_custom_generate(decoding=3))


def test_a_written_form_has_every_option(tmp_path):
    given = VALUES | {"decoding": "step", "max_context": 70}
    write_custom_generate(tmp_path, **given)
    model, inputs = tiny("llama"), batch(9, 4)
    loaded = {"custom_generate": str(tmp_path), "trust_remote_code": True}
    assert torch.equal(model.generate(**inputs, **GREEDY), model.generate(**inputs, **GREEDY, **loaded))
    [kept] = _KEPT[model]
    assert (kept.engine.max_prefill_tokens, kept.engine.parts.target.max_context) == (5, 70)
    with pytest.raises(InputError, match="which a file cannot hold; give it by name"):
        outrider.integrate.write_custom_generate(tmp_path, tree=catalog.make("tree", "chain"))
