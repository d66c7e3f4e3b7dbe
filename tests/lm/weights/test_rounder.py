"""`activations=int8`: another model than with bfloat16, everywhere the same one."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import outrider
from outrider import InputError, Sampling
from outrider.lm.fingerprint import read_from, shape_of, weights_of
from outrider.lm.forwards.packed import packed as packed_twin
from outrider.lm.hf.open import LOADING, open_model
from outrider.lm.model import LanguageModel
from outrider.lm.weights.gguf import BlockModel
from outrider.lm.weights.linear import BlockLinear, Int8Linear
from outrider.lm.weights.plain import RoundedLinear
from outrider.lm.weights.rounder import Rounder
from outrider.plan.table import key_of
from outrider.proof import gate
from outrider.proof.gate import in_float32
from tests.lm.weights.test_gguf import CONFIGS, packed
from tests.lm.weights.test_linear import COMPILED
from tests.lm.weights.test_quantiser import written

pytestmark = COMPILED
CASTS = True
GREEDY = Sampling(temperature=0, seed=0)


def opened(file: Path, activations: str) -> torch.nn.Module:
    model, rounder = open_model(str(file), keep_blocks=BlockModel.of), Rounder.of(activations)
    return model if rounder is None else rounder(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_every_packed_layer_rounds_and_tied_weights_stay_tied(name: str, tmp_path: Path) -> None:
    file = packed(tmp_path, name, "mixed")
    plain, ours = opened(file, "bfloat16"), opened(file, "int8")
    linear = {path: layer for path, layer in plain.named_modules() if isinstance(layer, BlockLinear)}
    assert linear
    for path, layer in linear.items():
        other = ours.get_submodule(path)
        assert isinstance(other, Int8Linear), path
        assert (other.kind, str(other.extra_repr())) == (layer.kind, layer.extra_repr())
        assert torch.equal(other.data, layer.data)
    ends = ours.get_input_embeddings(), ours.get_output_embeddings()
    assert (ends[0].data is ends[1].data) == ours.config.tie_word_embeddings
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        near, far = plain(ids).logits.float(), ours(ids).logits.float()
    assert not torch.equal(near, far)
    assert (near - far).norm() < 0.1 * near.norm()


def test_it_is_known_as_another_model_than_that_of_the_same_file(tmp_path: Path) -> None:
    file = packed(tmp_path, kind="mixed")
    plain, ours, same = opened(file, "bfloat16"), opened(file, "int8"), opened(file, "int8")
    assert read_from(ours) == read_from(plain) is not None
    assert weights_of(ours) == weights_of(same) != weights_of(plain)
    assert shape_of(ours) == shape_of(same) != shape_of(plain)
    plain_lm, our_lm = LanguageModel(plain, max_slots=2), LanguageModel(ours, max_slots=2)
    assert plain_lm.package.folder != our_lm.package.folder
    engines = [engine_of(file, activations) for activations in ("bfloat16", "int8", "int8")]
    keys = [key_of(engine.parts) for engine in engines]
    assert keys[1] == keys[2] != keys[0]
    gates = [gate.key(engine, [[3, 4]]) for engine in engines]
    assert gates[1] == gates[2] != gates[0]


def engine_of(file: Path, activations: str, **options: object) -> outrider.Engine:
    given = {"drafter": "none", "max_slots": 2, **options}
    return outrider.load(str(file), device="cpu", activations=activations, **given)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_texts_with_drafts_are_those_of_plain_decoding(name: str, tmp_path: Path) -> None:
    target, draft = packed(tmp_path, name, "mixed"), packed(tmp_path, name, "Q8_0")
    prompts, texts = [[5, 6, 7, 5, 6], [9, 3, 11]], []
    for drafter in ("none", "ngram:prompt_lookup_min=1", f"model:path={draft}", f"model:path={draft},activations=int8"):
        engine = engine_of(target, "int8", drafter=drafter, length="fixed:3")
        outputs = engine.generate(prompts, max_new_tokens=12, sampling=GREEDY, ignore_eos=True)
        texts.append([output.tokens for output in outputs])
        if drafter.startswith("model"):
            drafts = any(isinstance(part, Int8Linear) for part in engine.parts.drafter.lm.model.modules())
            assert drafts == drafter.endswith("int8")
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_the_model_that_proofs_compare_with_rounds_too(tmp_path: Path) -> None:
    engine = engine_of(packed(tmp_path, kind="mixed"), "int8")
    ours, exact = engine.parts.target.model, in_float32(engine).parts.target.model
    rounding = [path for path, layer in ours.named_modules() if isinstance(layer, Int8Linear)]
    assert exact.dtype == torch.float64
    assert rounding == [path for path, layer in exact.named_modules() if isinstance(layer, RoundedLinear)]
    assert not any(isinstance(layer, BlockLinear) for layer in exact.modules())
    ids, own = torch.arange(3, 40)[None], ours.dtype
    with torch.inference_mode():
        far, near = ours(ids).logits, exact(ids).logits
    assert (own, near.dtype) == (torch.bfloat16, torch.float64)
    assert (far - near).norm() < 0.1 * near.norm()


def test_a_pair_whose_target_rounds_passes_the_gate(tmp_path: Path) -> None:
    engine = engine_of(packed(tmp_path, kind="mixed"), "int8", drafter="ngram:prompt_lookup_min=1", length="fixed:3")
    assert gate.gate(engine).fault is None


def test_packed_forwards_round_too(tmp_path: Path) -> None:
    model = opened(packed(tmp_path, kind="mixed"), "int8")
    with torch.inference_mode():
        assert torch.equal(packed_twin(model)(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


def test_quantised_weights_round_too_and_a_line_says_what_the_model_is(tmp_path: Path, caplog) -> None:
    folder = written(tmp_path)
    with caplog.at_level(logging.DEBUG, logger=LOADING):
        engine = engine_of(folder, "int8", weights="q8_0")
    assert any(isinstance(layer, Int8Linear) for layer in engine.parts.target.model.modules())
    line = "its packed layers round activations to int8, in groups of 32: another model than with bfloat16"
    assert line in caplog.messages


def test_what_cannot_round_is_refused(tmp_path: Path) -> None:
    folder, file = written(tmp_path), packed(tmp_path)
    for given, options in ((folder, {}), (file, {"dtype": "float32"})):
        with pytest.raises(InputError, match="has none here; name a GGUF file or a checkpoint of AWQ or GPTQ, or give"):
            engine_of(given, "int8", **options)
    with pytest.raises(InputError, match="unknown activations 'int4'; did you mean 'int8'"):
        engine_of(file, "int4")
    with pytest.raises(InputError, match="loaded already; leave out activations"):
        outrider.load(open_model(str(folder)), activations="int8")
    setup = outrider.setup.Setup(str(file), activations="int8")
    assert replace(setup, drafter="none").options()["activations"] == "int8"
