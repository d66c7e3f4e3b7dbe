"""Medusa heads: published forms against a naive reading of them, what is written, what is refused."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.medusa import SPEC, MedusaConfig, MedusaHeads
from outrider.lm.hf.checkpoint import TargetShape, read_config, write_head
from outrider.lm.target_info import TargetInfo
from tests.world.models import target
from tests.world.published import medusa_of_its_authors, medusa_of_vllm, medusa_with_fewer_tokens

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

FORMS = {
    "vllm": lambda folder, around: medusa_of_vllm(folder, around),
    "vllm, deep, with biases": lambda folder, around: medusa_of_vllm(folder, around, layers=3, bias=True),
    "fewer tokens": lambda folder, around: medusa_with_fewer_tokens(folder, around, shared=False),
    "fewer tokens, shared": lambda folder, around: medusa_with_fewer_tokens(folder, around, shared=True),
    "fewer tokens, to be cut": lambda folder, around: medusa_with_fewer_tokens(
        folder, around, shared=False, whole=True
    ),
    "original": lambda folder, around: medusa_of_its_authors(folder, around),
    "original inside a model": lambda folder, around: medusa_of_its_authors(folder, around, prefix="medusa_head."),
}


def around() -> TargetInfo:
    return TargetInfo.of(target(1), None)


def naive(tensors: dict[str, Tensor], hidden: Tensor, head: int, vocab: int) -> Tensor:
    """A head's logits over all tokens, -inf where it has none, straight from the names of its tensors."""
    original = any(".linear." in name for name in tensors)
    prefix = next((p for p in ("medusa_heads.", "medusa_head.") if any(n.startswith(p) for n in tensors)), "")
    layer = 0
    while True:
        name = f"{head}.{layer}.linear" if original else f"blocks.{head}.layers.{layer}"
        weight = tensors.get(f"{prefix}{name}.weight")
        if weight is None:
            break
        turned = weight @ hidden + tensors.get(f"{prefix}{name}.bias", 0)
        hidden, layer = hidden + turned / (1 + torch.exp(-turned)), layer + 1
    name = f"{head}.{layer}.weight" if original else f"lm_heads.{head}.weight"
    output = tensors.get(prefix + name, tensors.get(f"{prefix}lm_heads.0.weight"))
    if "token_map" not in tensors:
        return output @ hidden
    chosen = tensors["token_map"]
    output = output[chosen] if len(output) > len(chosen) else output
    logits = torch.full((vocab,), -torch.inf, dtype=hidden.dtype)
    logits[chosen] = output @ hidden
    return logits


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_published_form_is_recognised_and_guesses_what_its_description_says(tmp_path, form):
    known = around()
    tensors = FORMS[form](tmp_path, known)
    path = catalog.make("drafter", str(tmp_path))
    assert path == SPEC.at(str(tmp_path))
    drafter = path.bind(known)
    hidden = torch.randn(known.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for head in range(drafter.max_depth):
        logits = drafter.head.logits(drafter.head(hidden, head), head)
        if drafter.short_list is not None:
            logits = drafter.short_list.widened(logits[None], -torch.inf)[0]
        expected = naive(tensors, hidden, head, known.vocab_size)
        assert torch.allclose(logits, expected, atol=1e-12), form
    assert drafter.max_depth == (4 if form.startswith("vllm") else 3)


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_written_is_vllms_form_and_reads_back(tmp_path, shared):
    config = MedusaConfig(hidden_size=32, vocab_size=64, num_heads=3, truncated_vocab_size=5, original_lm_head=shared)
    heads = MedusaHeads(config)
    heads.begin_from(torch.randn(64, 32), torch.tensor([1, 4, 5, 7, 11]))
    torch.nn.init.normal_(heads.blocks[1].layers[0].weight)
    shape = TargetShape(num_layers=2, hidden_size=32, vocab_size=64, taps=(2,))
    write_head(tmp_path, *heads.record(shape, torch.float32, ""), torch.float32)
    again = SPEC.at(str(tmp_path), dtype="float32").bind(around()).head
    assert again.config == config
    hidden = torch.randn(4, 32)
    for head in range(3):
        assert torch.equal(again.logits(again(hidden, head), head), heads.logits(heads(hidden, head), head))
    names = {f"blocks.{i}.layers.0.weight" for i in range(3)} | {"token_map"}
    names |= {f"lm_heads.{i}.weight" for i in range(1 if shared else 3)}
    assert load_file(tmp_path / "model.safetensors").keys() == names
    config = read_config(str(tmp_path))
    assert (config["model_type"], config["truncated_vocab_size"], config["num_heads"]) == ("medusa", 5, 3)
    assert not [name for name in config if "num" in name and "heads" in name and name != "num_heads"]
    assert TargetShape.of(config, "") == shape


def test_new_heads_are_the_targets_output_layer():
    config = MedusaConfig(hidden_size=8, vocab_size=12, num_heads=2, num_hidden_layers=2)
    heads, output, hidden = MedusaHeads(config), torch.randn(12, 8), torch.randn(3, 8)
    heads.begin_from(output, None)
    for head in range(2):
        assert torch.equal(heads.logits(heads(hidden, head), head), hidden @ output.T)


def test_heads_of_another_target_are_refused_in_one_sentence(tmp_path):
    known = around()
    medusa_of_vllm(tmp_path, known)
    path = SPEC.at(str(tmp_path))
    with pytest.raises(InputError, match=f"width {known.hidden_size}, and this target's have width 64"):
        path.bind(replace(known, hidden_size=64))
    with pytest.raises(InputError, match="shows none"):
        path.bind(replace(known, num_layers=0))
    with pytest.raises(InputError, match="knows 64 tokens, and this target has 99"):
        path.bind(replace(known, vocab_size=99))
    config = json.loads((tmp_path / "config.json").read_text())
    shape = TargetShape(num_layers=9, hidden_size=known.hidden_size, vocab_size=64, taps=(9,))
    (tmp_path / "config.json").write_text(json.dumps(config | {"outrider_target": shape.record()}))
    with pytest.raises(InputError, match="a target with 9 layers of width 32, and this target has 2"):
        path.bind(known)
    (tmp_path / "config.json").write_text(json.dumps(config | {"outrider_target": {"taps": 3}}))
    with pytest.raises(InputError, match="is damaged"):
        path.bind(known)


def test_damaged_checkpoints_are_refused_in_one_sentence(tmp_path):
    known = around()
    path = SPEC.at(str(tmp_path))
    with pytest.raises(InputError, match=r"it has no config\.json"):
        path.bind(known)
    tensors = medusa_of_vllm(tmp_path, known)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InputError, match="no weights of a head"):
        path.bind(known)
    torch.save(
        {name: t for name, t in tensors.items() if name != "blocks.1.layers.0.weight"}, tmp_path / "medusa_lm_head.pt"
    )
    with pytest.raises(InputError, match=r"blocks\.1\.layers\.0\.weight is missing"):
        path.bind(known)
    torch.save({"what": 3}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="other things than tensors"):
        path.bind(known)
    (tmp_path / "medusa_lm_head.pt").write_bytes(b"nothing")
    with pytest.raises(InputError, match="cannot be read as a file of tensors"):
        path.bind(known)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match="must be a JSON object"):
        path.bind(known)


def test_a_folder_without_a_drafter_is_refused_and_a_model_is_a_model(tmp_path):
    with pytest.raises(InputError, match="there is no directory /nowhere/at/all"):
        catalog.make("drafter", "/nowhere/at/all")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Something"]}))
    with pytest.raises(InputError, match="holds no drafter that is known"):
        catalog.make("drafter", str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    assert catalog.name_of(catalog.make("drafter", str(tmp_path))) == "model"
