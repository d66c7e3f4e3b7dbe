"""EAGLE-1 and EAGLE-3: published forms against a naive reading of them, what is written, what is refused."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.eagle import SPEC as EAGLE
from outrider.heads.eagle3 import SPEC as EAGLE3
from outrider.heads.eagle3 import default_taps, usual_taps
from outrider.lm.hf.checkpoint import read_config
from outrider.lm.hf.taps import tapped
from outrider.lm.target_info import TargetInfo
from tests.heads.naive_heads import NaiveEagle, NaiveEagle3
from tests.world.forced import forced_guesses
from tests.world.learners import head_learner
from tests.world.models import llama, target
from tests.world.published import eagle, eagle3, layer_of
from tests.world.zoo import VOCAB, tiny

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

Form = Callable[[Path, TargetInfo], dict[str, Tensor]]
QWEN = {"model_type": "qwen3", "head_dim": 16}
EAGLES: dict[str, dict[str, Any]] = {
    "of its authors": {},
    "vllm": {"vllm": True},
    "two layers, with biases": {"layers": 2, "qkv_bias": True},
    "speculators": {"speculators": True},
}
EAGLE3S: dict[str, dict[str, Any]] = {
    "speculators": {},
    "normed residual": {"flags": {"norm_before_residual": True}},
    "normed states": {"flags": {"norm_before_fc": True}},
    "normed states and output": {"flags": {"fc_norm": True, "norm_output": True}},
    "two layers, all tokens": {"layers": 2, "few": False},
    "qwen3": QWEN,
    "narrow": {"size": 16},
    "shared output": {"few": False, "shared_output": True},
    "of its authors": {"native": True},
    "vllm, normed together": {"native": True, "flags": {"norm_before_fc": True, "norm_before_residual": True}},
    "automodel": {"native": True, "producer": "automodel", "flags": {"fc_norm": True, "norm_output": True}},
    "specforge": {"native": True, "producer": "specforge", "flags": {"fc_norm": True, "norm_output": True}},
}


def around() -> TargetInfo:
    return TargetInfo.of(target(1), None)


def check(spec: str, naive: NaiveEagle, taps: tuple[int, ...]) -> None:
    """Every guess of real drafting along a text is what the naive reading says. Rotary tables are in float32."""
    text, gamma, lm = np.random.default_rng(0).integers(3, VOCAB, size=14).tolist(), 3, target(1)
    guesses = forced_guesses(catalog.make("drafter", spec).bind(TargetInfo.of(lm, None)), lm, text, 5, gamma)
    model = llama()
    with torch.no_grad(), tapped(model.model.layers, taps) as seen:
        model(torch.tensor([text]), use_cache=False)
    known = naive.feature(torch.cat([seen[tap][0] for tap in taps], -1))
    for anchor in range(4, len(text) - gamma):
        features = known[:anchor]
        for number in range(gamma):
            tokens = torch.tensor(text[1 : anchor + 1 + number])
            hidden = naive.head_output(tokens, features)
            expected, logits = naive.logits(hidden[-1]), guesses[anchor + 1 + number, number]
            assert torch.allclose(logits, expected, atol=1e-5), (anchor, number, (logits - expected).abs().max())
            features = torch.cat([features, naive.next_feature(hidden[-1:])])


@pytest.mark.parametrize("form", EAGLES)
@torch.no_grad()
def test_a_published_eagle_is_recognised_and_guesses_what_its_description_says(tmp_path, form):
    known = around()
    tensors = eagle(tmp_path, known, **EAGLES[form])
    assert catalog.make("drafter", str(tmp_path)) == EAGLE.at(path=str(tmp_path))
    layer = layer_of(known, num_hidden_layers=EAGLES[form].get("layers", 1))
    check(str(tmp_path), NaiveEagle(tensors, layer, known.embedding_and_head()), (2,))


@pytest.mark.parametrize("form", EAGLE3S)
@torch.no_grad()
def test_a_published_eagle3_is_recognised_and_guesses_what_its_description_says(tmp_path, form):
    known, form_options = around(), EAGLE3S[form]
    tensors = eagle3(tmp_path, known, **form_options)
    assert catalog.make("drafter", str(tmp_path)) == EAGLE3.at(path=str(tmp_path))
    more = {key: value for key, value in form_options.items() if key in QWEN}
    layer = layer_of(known, num_hidden_layers=form_options.get("layers", 1), **more)
    flags = dict(form_options.get("flags", {}))
    if form_options.get("producer") == "specforge":
        # Its own feedback is raw, whatever the key says.
        flags["norm_output"] = False
    naive = NaiveEagle3(tensors, layer, known.embedding_and_head(), flags)
    spec = f"eagle3:path={tmp_path},taps=0x1x2" if form_options.get("native") else str(tmp_path)
    check(spec, naive, (0, 1, 2))


@torch.no_grad()
def test_an_embedding_that_is_the_targets_is_not_kept_twice(tmp_path):
    known = around()
    tensors = eagle(tmp_path, known)
    assert EAGLE.at(path=str(tmp_path)).bind(known).module.embed_tokens is not None
    tensors["embed_tokens.weight"] = llama().model.embed_tokens.weight.detach()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert EAGLE.at(path=str(tmp_path)).bind(known).module.embed_tokens is None


def test_tokens_in_no_order_and_tokens_that_the_target_leaves_out_are_read(tmp_path):
    known = around()
    tensors = eagle3(tmp_path, known)
    path = EAGLE3.at(path=str(tmp_path))
    before = path.bind(known)
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(2))
    ids = (torch.arange(len(order)) + tensors["d2t"])[order]
    mixed = {"lm_head.weight": tensors["lm_head.weight"][order], "d2t": ids - torch.arange(len(order))}
    save_file({**tensors, **mixed}, tmp_path / "model.safetensors")
    after = path.bind(known)
    assert torch.equal(after.short_list.ids, before.short_list.ids)
    assert torch.equal(after.module.lm_head.weight, before.module.lm_head.weight)
    few = path.bind(replace(known, vocab_size=VOCAB - 10))
    assert few.short_list.ids.tolist() == [i for i in before.short_list.ids.tolist() if i < VOCAB - 10]
    assert len(few.module.lm_head.weight) == len(few.short_list.ids) == few.lm.vocab_size


def test_what_is_written_has_the_names_and_the_keys_of_its_layout(tmp_path):
    model = tiny("llama").float().requires_grad_(False)
    ids = torch.arange(3, VOCAB, 2)
    head_learner("eagle3", model, ids=ids, fc_norm=True).write(tmp_path / "three")
    tensors, config = load_file(tmp_path / "three" / "model.safetensors"), read_config(str(tmp_path / "three"))
    published = eagle3(tmp_path, around(), flags={"fc_norm": True})
    assert tensors.keys() == published.keys()
    assert (torch.arange(len(ids)) + tensors["d2t"]).tolist() == ids.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    assert {"norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"} <= config.keys()
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", VOCAB, 1)
    assert layer["rope_theta"] == layer["rope_parameters"]["rope_theta"]
    head_learner("eagle", model).write(tmp_path / "one")
    assert load_file(tmp_path / "one" / "model.safetensors").keys() == eagle(tmp_path, around(), vllm=True).keys()
    config = read_config(str(tmp_path / "one"))
    assert (config["architectures"], config["model_type"]) == (["EagleLlamaForCausalLM"], "llama")


def test_questions_that_files_leave_open_are_asked(tmp_path):
    known = around()

    def bound(**answers: object) -> Any:
        return EAGLE3.at(path=str(tmp_path), **answers).bind(known)

    eagle3(tmp_path, known)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["norm_before_residual"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="vLLM takes for true and speculators for false"):
        bound()
    for answer in (True, False):
        assert bound(norm_before_residual=answer).module.sizes.norm_before_residual == answer
    (tmp_path / "model.safetensors").unlink()
    eagle3(tmp_path, known, native=True, flags={"norm_output": True})
    with pytest.raises(InputError, match="Add norm_output=true"):
        bound(taps=(0, 1, 2))
    with pytest.raises(InputError, match="Add taps=0x1x2 behind the path for the first, or taps=1x2x3"):
        bound(norm_output=False)
    assert bound(norm_output=False, taps=(1, 2, 2)).taps == (1, 2, 2)
    eagle3(tmp_path, known, native=True, taps=None)
    with pytest.raises(InputError, match=r"reads the hidden states \[2, 1, -1\], and this target has 0\.\.2"):
        bound()


def test_heads_of_another_target_are_refused_in_one_sentence(tmp_path):
    known = around()
    for write, make in ((eagle, EAGLE), (eagle3, EAGLE3)):
        folder = tmp_path / make.name
        folder.mkdir()
        tensors = write(folder, known)
        path = make.at(path=str(folder))
        with pytest.raises(InputError, match=f"width {known.hidden_size}, and this target's have width 64"):
            path.bind(replace(known, hidden_size=64))
        with pytest.raises(InputError, match="knows 64 tokens, and this target has 99"):
            path.bind(replace(known, vocab_size=99))
        file = next(folder.glob("*model*"))
        save = torch.save if file.suffix == ".bin" else save_file
        save({n: t for n, t in tensors.items() if "up_proj" not in n}, file)
        with pytest.raises(InputError, match=r"layers\.0\.mlp\.up_proj\.weight is missing"):
            path.bind(known)
        save({**tensors, "fusion.weight": torch.ones(1)}, file)
        with pytest.raises(InputError, match=r"fusion\.weight is not part of such a head"):
            path.bind(known)
        save({**tensors, "fc.weight": torch.ones(3, 3)}, file)
        with pytest.raises(InputError, match=r"fc\.weight is of another shape"):
            path.bind(known)


def test_damaged_lists_of_tokens_are_refused(tmp_path):
    known = around()
    tensors = eagle3(tmp_path, known)
    for wrong, message in [
        (tensors["d2t"][:-1], "d2t in .* names 30 tokens, and lm_head.weight has 31 rows"),
        (tensors["d2t"] + 99, "tokens that its target does not have"),
        (-torch.arange(len(tensors["d2t"])), "names tokens twice"),
    ]:
        save_file({**tensors, "d2t": wrong}, tmp_path / "model.safetensors")
        with pytest.raises(InputError, match=message):
            EAGLE3.at(path=str(tmp_path)).bind(known)
    save_file({n: t for n, t in tensors.items() if n != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"lm_head\.weight or d2t is missing"):
        EAGLE3.at(path=str(tmp_path)).bind(known)


def test_the_usual_taps_are_three_states_of_every_target():
    for layers in range(1, 100):
        taps = usual_taps(layers)
        assert len(taps) == 3
        assert all(0 <= tap <= layers for tap in taps)
        assert list(taps) == sorted(taps)
        if layers > 1:
            assert len(set(taps)) == 3
        if layers > 6:
            assert taps == default_taps(layers)
