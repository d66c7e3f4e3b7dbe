"""A model is opened as it was saved, or refused with the tensors or the file that do not fit."""

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider import InputError
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf import open as opening
from outrider.lm.hf.open import open_config, open_model, open_tokenizer, straight_to
from tests.world.recurrent_zoo import RECURRENT, tiny_recurrent
from tests.world.zoo import ARCHITECTURES, tiny

UP = "model.layers.0.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """A small checkpoint without a tokenizer."""
    place = tmp_path_factory.mktemp("sound")
    tiny("llama").save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def wide(tmp_path_factory) -> Path:
    """The same with a row for each token of the pair that ships with Outrider."""
    place, model = tmp_path_factory.mktemp("wide"), copy.deepcopy(tiny("llama"))
    model.resize_token_embeddings(8192)
    model.save_pretrained(place)
    return place


@pytest.fixture
def broken(sound, tmp_path) -> Callable[[Callable[[dict[str, Tensor]], object]], Path]:
    """Makes a copy of the checkpoint, with its tensors changed."""

    def made(change: Callable[[dict[str, Tensor]], object]) -> Path:
        place = tmp_path / "broken"
        shutil.copytree(sound, place)
        tensors = load_file(place / "model.safetensors")
        change(tensors)
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        return place

    return made


@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_what_was_saved_is_opened(name, tmp_path):
    model = tiny(name) if name in ARCHITECTURES else tiny_recurrent(name)
    model.save_pretrained(tmp_path)
    opened = open_model(str(tmp_path))
    assert {n: t for n, t in opened.state_dict().items() if not torch.equal(t, model.state_dict()[n])} == {}


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_weights_for_a_gpu_are_read_straight_onto_it(sound, device, monkeypatch):
    asked: dict[str, object] = {}
    load = AutoModelForCausalLM.from_pretrained

    def spy(path: str, *, device_map: object = None, **options: object) -> object:
        asked["device_map"] = device_map
        return load(path, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", spy)
    monkeypatch.setattr(opening, "as_device", lambda given: torch.device(given or "cpu"))
    opened = open_model(str(sound), device=device)
    assert asked["device_map"] == (None if device == "cpu" else {"": torch.device(device)})
    # The spy has left the weights where a CPU has them; nothing moved them afterwards.
    assert opened.device.type == "cpu"
    assert open_model(str(sound), device_map={"": "cpu"}).device.type == "cpu"
    assert asked["device_map"] == {"": "cpu"}


def test_without_accelerate_weights_go_through_the_hosts_memory(monkeypatch):
    assert straight_to(torch.device("cuda")) == {"": torch.device("cuda")}
    monkeypatch.setattr(opening, "is_accelerate_available", lambda: False)
    assert straight_to(torch.device("cuda")) is None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda tensors: tensors.pop(UP), f"{UP} is missing; get a complete checkpoint"),
        (lambda tensors: tensors.update(more=torch.zeros(2)), "more is not part of the model"),
        (lambda tensors: tensors.update({UP: torch.zeros(3, 2)}), rf"{UP} is \(3, 2\) instead of \(48, 32\)"),
        (
            lambda tensors: [tensors.pop(name) for name in list(tensors) if ".mlp." in name],
            r"model.layers.0.mlp.down_proj.weight, .* and 6 more tensors are missing",
        ),
    ],
    ids=["missing", "unknown", "shape", "many"],
)
@pytest.mark.parametrize("role", ["target", "draft model"])
def test_a_checkpoint_of_other_tensors_is_refused_by_name(sound, broken, change, sentence, role):
    place = broken(change)
    options = {"target": place, "drafter": "none"} if role == "target" else {"drafter": f"model:path={place}"}
    with pytest.raises(InputError, match=rf"the checkpoint {place} does not fit LlamaForCausalLM: .*{sentence}"):
        outrider.load(**{"target": sound} | options)


def test_an_old_buffer_that_is_computed_anew_is_no_reason(broken):
    place = broken(lambda tensors: tensors.update({"model.rotary_emb.inv_freq": torch.zeros(4)}))
    assert open_model(str(place)).config.model_type == "llama"


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("model.safetensors", "half", "cannot load a causal LM from .*: Error while deserializing header"),
        ("model.safetensors", b"garbage " * 9, "cannot load a causal LM from .*: Error while deserializing header"),
        ("model.safetensors", b"", "cannot load a causal LM from .*: Error while deserializing header"),
        ("model.safetensors", None, "cannot load a causal LM from .*: Error no file named model.safetensors"),
        ("config.json", b"[]", "cannot load a causal LM from .*: its config.json holds no JSON object"),
        ("config.json", b"{", "cannot load a causal LM from .*"),
        (
            "config.json",
            b'{"model_type": "llama", "hidden_size": "wide"}',
            "Validation error for field 'hidden_size': TypeError: .* expected int, got str",
        ),
    ],
)
def test_a_broken_file_is_one_sentence(sound, tmp_path, file, content, sentence):
    place = tmp_path / "broken"
    shutil.copytree(sound, place)
    whole = (place / file).read_bytes()
    if content is None:
        (place / file).unlink()
    else:
        (place / file).write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    with pytest.raises(InputError, match=sentence) as refused:
        outrider.load(place)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("file", "content"),
    [("tokenizer.json", None), ("tokenizer.json", b"garbage"), ("tokenizer_config.json", b"garbage")],
)
def test_a_broken_tokenizer_is_one_sentence(tmp_path, file, content):
    place = tmp_path / "broken"
    shutil.copytree(EMBEDDED_TARGET, place)
    if content is None:
        (place / file).unlink()
    else:
        (place / file).write_bytes(content)
    with pytest.raises(InputError, match=f"cannot load a tokenizer from {place}: ") as refused:
        outrider.load(place)
    assert "\n" not in str(refused.value)


def test_a_tokenizer_can_be_named(sound, wide):
    assert open_tokenizer(str(sound)) is None
    assert outrider.load(sound).tokenizer is None
    assert len(outrider.load(wide, tokenizer=EMBEDDED_TARGET).tokenizer) == 8192
    with pytest.raises(InputError, match=f"there is no tokenizer in {sound}; give a directory, a GGUF file or a hub"):
        outrider.load(sound, tokenizer=str(sound))


def test_a_directory_may_hold_a_tokenizer_alone(wide, tmp_path):
    open_tokenizer(str(EMBEDDED_TARGET)).save_pretrained(tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert len(outrider.load(wide, tokenizer=tmp_path).tokenizer) == 8192


def test_a_tokenizer_with_more_tokens_than_the_target_has_rows_is_refused(sound):
    with pytest.raises(InputError, match=r"does not belong to the target: it has token ids up to 8191, and the target"):
        outrider.load(sound, tokenizer=EMBEDDED_TARGET)


def test_a_token_that_was_added_to_a_tokenizer_needs_no_row(wide):
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert outrider.load(wide, tokenizer=tokenizer).parts.target.vocab_size == 8192


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device": "cpu", "device_map": "auto"}, "device and device_map both say where the model goes"),
        ({"quantization_config": {"quant_method": "none such"}}, "Unknown quantization type, got none such"),
        ({"quantization_config": json.dumps({"bits": 4})}, "has no `quant_method` attribute"),
        ({"device_map": "nowhere"}, "cannot load a causal LM from"),
    ],
    ids=str,
)
def test_what_transformers_says_of_its_own_options_is_one_sentence(sound, options, sentence):
    with pytest.raises(InputError, match=sentence):
        outrider.load(sound, **options)


@pytest.mark.parametrize(
    ("name", "size"), [("num_hidden_layers", 1_000_000), ("hidden_size", 10**9), ("vocab_size", 10**30)]
)
@pytest.mark.parametrize("part", [None, "text_config"])
def test_a_size_beyond_any_models_is_a_sentence_before_anything_is_built(tmp_path, name, size, part):
    config = {"model_type": "llama", name: size}
    (tmp_path / "config.json").write_text(json.dumps(config if part is None else {"model_type": "llava", part: config}))
    for load in (open_model, open_config):
        with pytest.raises(InputError, match=rf"the config of {tmp_path} says {name}=1\d+.*no model has more than"):
            load(str(tmp_path))
