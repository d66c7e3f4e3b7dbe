"""A GGUF file is a model like a directory: the same weights, tokens and texts, wherever a model can be named."""

import copy
import json
import logging
import os
import shutil
from pathlib import Path

import gguf
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, Qwen2Config

import outrider
from outrider import InputError, Sampling
from outrider.core import progress
from outrider.core.place import place_of
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.fingerprint import weights_of
from outrider.lm.hf import gguf as reading
from outrider.lm.hf.gguf import header
from outrider.lm.hf.open import LOADING, open_config, open_model, open_tokenizer
from recipes.tiny import scrambled
from tests.world.gguf_files import write_gguf

PROMPT, GREEDY = "Once upon a time", Sampling(temperature=0)
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
"""Widths are whole blocks of 32."""


def tiny(name: str) -> PreTrainedModel:
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[name]
    return scrambled(AutoModelForCausalLM.from_config(kind(**SIZES), dtype=torch.float32)).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(EMBEDDED_TARGET)


@pytest.fixture(scope="module")
def shipped(tokenizer, tmp_path_factory) -> dict[str, Path]:
    """The pair that ships with Outrider as GGUF files, each in a folder of its own."""
    found = {}
    for name, folder in (("target", EMBEDDED_TARGET), ("draft", EMBEDDED_DRAFT)):
        model = AutoModelForCausalLM.from_pretrained(folder)
        place = tmp_path_factory.mktemp(name)
        found[name] = write_gguf(place / f"{name}.gguf", model, tokenizer, kind="F16")
    return found


def test_the_weights_of_a_file_are_unpacked_once_and_again_when_the_file_changes(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "m.gguf", tiny("llama"), tokenizer, kind="Q8_0")

    def aged(file: Path) -> None:
        """Files that have just changed are not trusted."""
        os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**10))

    aged(file)
    first = open_model(str(file))
    [folder] = (each.parent for each in (tmp_path / "cache" / "unpacked").glob("*/model.safetensors"))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    again = open_model(str(file))
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert all(map(torch.equal, first.state_dict().values(), again.state_dict().values()))
    assert first.generation_config.eos_token_id == again.generation_config.eos_token_id
    assert weights_of(first) == weights_of(again)
    other = copy.deepcopy(tiny("llama"))
    other.lm_head.weight.data.neg_()
    write_gguf(file, other, tokenizer, kind="Q8_0")
    aged(file)
    assert weights_of(open_model(str(file))) != weights_of(first)
    assert len(list((tmp_path / "cache" / "unpacked").glob("*/model.safetensors"))) == 1
    assert (folder / "model.safetensors").stat().st_mtime_ns != written


def test_the_tokenizer_and_the_config_of_a_file_are_read_once(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen2"), tokenizer, kind="Q8_0")
    os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**10))
    first = open_tokenizer(str(file)), open_config(str(file))
    reading._config.cache_clear()

    for kind in (AutoTokenizer, AutoConfig):
        read = kind.from_pretrained

        def checked(place, *, read=read, **options):
            assert "gguf_file" not in options, "the file was read again"
            return read(place, **options)

        monkeypatch.setattr(kind, "from_pretrained", checked)
    again = open_tokenizer(str(file)), open_config(str(file))
    text = "Once upon a time, 12 dogs.<|end|>"
    assert first[0](text).input_ids == again[0](text).input_ids
    assert first[0].chat_template == again[0].chat_template
    assert first[0].name_or_path == again[0].name_or_path == str(file)
    assert first[1].to_dict() == again[1].to_dict()


def test_unpacking_a_tokenizer_takes_seconds_and_is_shown_by_whoever_asks_for_it(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "m.gguf", tiny("qwen2"), tokenizer, kind="Q8_0")
    os.utime(file, ns=(0, file.stat().st_mtime_ns - 10**10))
    read, during = AutoTokenizer.from_pretrained, []

    def noted(place, **options):
        assert progress._display is not None
        during.append(["gguf_file" in options, [each.what for each in progress._display.tasks]])
        return read(place, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", noted)
    with progress.shown():
        open_tokenizer(str(file))
    assert during == [[True, ["unpacking the tokenizer, once"]], [False, []]]


def test_weights_that_cannot_be_kept_are_unpacked_all_the_same(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", "/dev/null")
    file = write_gguf(tmp_path / "m.gguf", tiny("llama"), tokenizer, kind="Q8_0")
    os.utime(file, ns=(0, 0))
    assert open_model(str(file)).dtype == torch.bfloat16


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 40)[None] % model.config.vocab_size).logits


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_logits_are_those_of_transformers_own_reading(name, kind, tmp_path):
    model = tiny(name)
    file = write_gguf(tmp_path / "model.gguf", model, kind=kind)
    opened = open_model(str(file), dtype="float32", device="cpu")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32)
    assert torch.equal(logits(opened), logits(theirs))
    if kind == "F32":
        assert (logits(opened) - logits(model)).abs().max() < 1e-5


@pytest.mark.parametrize(
    "kind, dtype", [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16), ("Q8_0", torch.bfloat16)]
)
def test_numbers_keep_their_dtype_and_blocks_become_bfloat16(kind, dtype, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tiny("llama"), kind=kind)
    opened = open_model(str(file), device="cpu")
    assert {weight.dtype for weight in opened.parameters()} == {open_config(str(file)).dtype} == {dtype}
    assert open_model(str(file), dtype="float64", device="cpu").dtype == torch.float64


def test_the_header_counts_parameters_and_bytes_of_blocks(tmp_path):
    model = tiny("llama")
    file = write_gguf(tmp_path / "model.gguf", model, kind="Q8_0")
    read, theirs = header(file), gguf.GGUFReader(file)
    sizes: dict[str, int] = {}
    for tensor in theirs.tensors:
        sizes[tensor.tensor_type.name] = sizes.get(tensor.tensor_type.name, 0) + int(tensor.n_bytes)
    assert read.architecture == "llama"
    assert dict(read.sizes) == sizes
    assert read.num_parameters == sum(int(tensor.n_elements) for tensor in theirs.tensors)


def test_one_line_names_the_blocks_and_the_memory_before_they_are_read(tmp_path, caplog):
    file = write_gguf(tmp_path / "model.gguf", tiny("llama"), kind="Q8_0")
    with caplog.at_level(logging.DEBUG, LOADING):
        model = open_model(str(file), device="cpu")
    [line] = [record.getMessage() for record in caplog.records if record.name == LOADING]
    millions = sum(weight.numel() for weight in model.parameters()) / 1e6
    assert line.startswith(f"loading llama, {millions:,.4g} M parameters, bfloat16, from {file} (Q8_0 ")
    assert line.endswith(f"; {2 * millions:,.4g} MB in memory)")


def test_a_model_of_a_file_is_saved_trained_and_known_as_one_of_a_directory(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tiny("qwen2"), kind="Q8_0")
    opened = open_model(str(file), device="cpu")
    opened.save_pretrained(tmp_path / "saved")
    again = open_model(str(tmp_path / "saved"), device="cpu")
    assert not hasattr(again.config, "quantization_config")
    assert weights_of(again) == weights_of(opened) is not None
    opened(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    assert all(weight.grad is not None for weight in opened.parameters())
    assert copy.deepcopy(opened).name_or_path == str(file)


def test_every_name_of_a_file_is_one_place(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf", tiny("llama"))
    monkeypatch.chdir(tmp_path)
    assert {place_of(name).file.resolve() for name in (str(file), "model.gguf", str(tmp_path), ".")} == {file.resolve()}
    assert open_config(".").vocab_size == tiny("llama").config.vocab_size


def test_a_file_of_a_hub_id_is_found_in_the_hubs_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0" * 40
    place = tmp_path / "models--org--name" / "snapshots" / commit
    place.mkdir(parents=True)
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text(commit)
    write_gguf(place / "tiny.gguf", tiny("llama"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = place_of("org/name:tiny.gguf")
    assert (found.file, found.name) == (place / "tiny.gguf", "org/name:tiny.gguf")
    assert open_model("org/name:tiny.gguf", device="cpu").name_or_path == "org/name:tiny.gguf"
    with pytest.raises(InputError, match=r"cannot fetch other\.gguf of org/name"):
        place_of("org/name:other.gguf")


def test_what_is_no_single_gguf_model_is_told(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, tiny("llama"))
    with pytest.raises(InputError, match=r"holds 2 GGUF files: a\.gguf, b\.gguf; name one, as .*/a\.gguf"):
        open_model(str(tmp_path))
    shutil.copy(tmp_path / "a.gguf", tmp_path / "a-00001-of-00002.gguf")
    with pytest.raises(InputError, match="is one of 2 parts of a model"):
        open_model(str(tmp_path / "a-00001-of-00002.gguf"))
    (tmp_path / "text.txt").write_text("Once")
    for opening in (open_model, open_config, open_tokenizer):
        with pytest.raises(InputError, match=r"text\.txt is a file, but no GGUF model; give a"):
            opening(str(tmp_path / "text.txt"))
    with pytest.raises(InputError, match=r"there is no file 'nowhere\.gguf'"):
        open_model("nowhere.gguf")
    cut = (tmp_path / "a.gguf").read_bytes()[:400]
    (tmp_path / "cut.gguf").write_bytes(cut)
    with pytest.raises(InputError, match=r"the header of .*cut\.gguf cannot be read; the file is damaged"):
        open_model(str(tmp_path / "cut.gguf"))
    (tmp_path / "short.gguf").write_bytes((tmp_path / "a.gguf").read_bytes()[:-5000])
    for opening in (open_model, open_config):
        with pytest.raises(InputError, match=r"short\.gguf ends before \d+ of its tensors, such as .*; get the whole"):
            opening(str(tmp_path / "short.gguf"))
    with pytest.raises(InputError, match="is quantised already, as a GGUF file"):
        open_model(str(tmp_path / "a.gguf"), quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})


def test_a_directory_with_a_config_is_a_model_beside_its_files(tmp_path):
    tiny("qwen2").save_pretrained(tmp_path)
    write_gguf(tmp_path / "model.gguf", tiny("llama"))
    assert open_config(str(tmp_path)).model_type == "qwen2"
    assert open_config(str(tmp_path / "model.gguf")).model_type == "llama"


def test_without_its_library_one_sentence_says_what_to_install(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf", tiny("llama"))
    monkeypatch.setattr(reading.importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(InputError, match=r'model\.gguf needs gguf; `pip install "outrider\[gguf\]'):
        open_model(str(file))


def test_the_tokenizer_of_a_file_cuts_texts_as_the_one_that_it_was_written_from(shipped, tokenizer):
    read = open_tokenizer(str(shipped["target"]))
    for text in (PROMPT, "def f(x):\n    return {'a': 1234}\n", "<|user|>Grüße 😀<|end|>"):
        assert read(text).input_ids == tokenizer(text).input_ids
        assert read.decode(read(text).input_ids) == tokenizer.decode(tokenizer(text).input_ids)
    assert read.chat_template == tokenizer.chat_template
    assert (read.eos_token_id, read.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


@pytest.mark.parametrize("drafter", ["suffix", "draft"])
def test_greedy_texts_of_a_file_are_those_of_the_target_alone(drafter, shipped):
    named = f"model:path={shipped['draft']}" if drafter == "draft" else drafter
    engine = outrider.load(str(shipped["target"]), drafter=named, dtype="float32", length="fixed:3", device="cpu")
    [output] = engine.generate([PROMPT], max_new_tokens=24, sampling=GREEDY, ignore_eos=True)
    alone = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype=torch.float32)
    ids = torch.tensor([engine.encode(PROMPT)])
    wanted = alone.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    assert output.tokens == wanted.tolist()
    if drafter == "draft":
        assert output.num_accepted_tokens > 0


def test_a_drafter_may_be_named_by_its_file_alone(shipped):
    engine = outrider.load(str(shipped["target"]), drafter=str(shipped["draft"]), length="fixed:2", device="cpu")
    assert engine.generate([PROMPT], max_new_tokens=6, sampling=GREEDY)[0].num_draft_tokens > 0


def test_a_file_names_its_ends_beyond_the_first(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", tiny("llama"), ends={"eos": 2, "eot": 5})
    assert open_model(str(file), device="cpu").generation_config.eos_token_id == [2, 5]


@pytest.mark.parametrize("path", ["nowhere", "empty", "note.txt", "nowhere.gguf"])
@pytest.mark.parametrize("drafter", ["model", "eagle3", "medusa", "mtp", "steered", "dflash"])
def test_a_wrong_path_of_a_drafter_is_noticed_before_the_target_is_loaded(drafter, path, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text(json.dumps({}))

    def never(*_: object, **__: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("outrider.assembly.open_model", never)
    with pytest.raises(InputError, match=path):
        outrider.load(EMBEDDED_TARGET, drafter=f"{drafter}:path={tmp_path / path}")


def test_headers_that_are_read_quickly_are_those_of_the_library(shipped):
    """Each number and text of the header, their types, and the tensors."""
    own = gguf.GGUFReader
    with reading.quick_headers():
        quick = gguf.GGUFReader(shipped["target"])
    slow = own(shipped["target"])
    assert (gguf.GGUFReader, type(quick) is own) == (own, False)
    assert list(quick.fields) == list(slow.fields)
    for ours, theirs in zip(quick.fields.values(), slow.fields.values(), strict=True):
        assert (ours.types, ours.data, ours.offset) == (theirs.types, theirs.data, theirs.offset)
        assert [(part.dtype, part.tolist()) for part in ours.parts] == [
            (part.dtype, part.tolist()) for part in theirs.parts
        ]
    for tensor, same in zip(quick.tensors, slow.tensors, strict=True):
        assert (tensor.name, tensor.tensor_type, tensor.shape.tolist()) == (
            same.name,
            same.tensor_type,
            same.shape.tolist(),
        )
        assert (tensor.data == same.data).all()
