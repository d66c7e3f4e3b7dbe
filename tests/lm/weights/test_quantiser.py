"""A model of plain weights that is quantised while it is opened."""

import json
import logging
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import outrider
from outrider import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.fingerprint import weights_of
from outrider.lm.hf.open import LOADING, open_model
from outrider.lm.hf.weights import weight_bytes
from outrider.lm.weights import quantiser
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.gguf import BlockModel
from outrider.lm.weights.linear import BlockEmbedding, BlockLinear
from outrider.lm.weights.plain import has_blocks
from outrider.lm.weights.quantised import quantised
from outrider.lm.weights.quantiser import KINDS, Quantiser
from outrider.proof.gate import in_float32
from outrider.setup import Setup
from outrider.training.online.learning import check_setup, why_not
from recipes.tiny import scrambled
from tests.cli.runs import done
from tests.lm.weights.test_gguf import CONFIGS, packed, tiny
from tests.world.gguf_files import write_gguf

CASTS = True
GREEDY = Sampling(temperature=0, seed=0)


def written(place: Path, name: str = "llama", **sizes: int) -> Path:
    """The folder of a tiny model in bfloat16."""
    folder = place / "-".join([name, *map(str, sizes.values())])
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict() | sizes)
    model = scrambled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(EMBEDDED_TARGET).save_pretrained(folder)
    return folder


def opened(folder: Path, weights: str, **options: object) -> PreTrainedModel:
    return open_model(str(folder), device="cpu", quantise=Quantiser.of(weights), **options)


@pytest.mark.parametrize("weights", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_matrix_is_quantised_and_all_else_stays(name: str, weights: str, tmp_path: Path) -> None:
    folder = written(tmp_path, name)
    ours, plain = opened(folder, weights), open_model(str(folder), device="cpu")
    assert not any(type(part) in (nn.Linear, nn.Embedding) for part in ours.modules())
    for path, layer in plain.named_modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            wanted = quantised(layer.weight, KINDS[weights])
            assert ours.get_submodule(path).kind == wanted.kind == KINDS[weights]
            assert torch.equal(ours.get_submodule(path).data, wanted.data), path
    kept = dict([*ours.named_parameters(), *ours.named_buffers()])
    for path, weight in [*plain.named_parameters(), *plain.named_buffers()]:
        if path in kept:
            assert torch.equal(kept[path], weight), path
            assert kept[path].dtype == weight.dtype
    assert (ours.dtype, ours.training) == (torch.bfloat16, False)
    assert ours.config.to_dict() == plain.config.to_dict()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_is_the_model_of_the_file_that_llama_cpp_makes_of_it(name: str, tmp_path: Path) -> None:
    folder, ids = written(tmp_path, name), torch.arange(3, 40)[None]
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    file = write_gguf(tmp_path / "m.gguf", rounded, AutoTokenizer.from_pretrained(EMBEDDED_TARGET), kind="Q8_0")
    ours, theirs = opened(folder, "q8_0"), open_model(str(file), device="cpu", keep_blocks=BlockModel.of)
    with torch.inference_mode():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)


def test_tied_weights_stay_one_matrix(tmp_path: Path) -> None:
    model = opened(written(tmp_path, "tied"), "q4_k")
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, BlockEmbedding)
    assert isinstance(output, BlockLinear)
    assert embedding.data is output.data


@pytest.mark.parametrize(
    ("sizes", "kind"), [({"intermediate_size": 96}, "Q5_0"), ({"intermediate_size": 40}, None)], ids=str
)
def test_rows_that_are_no_whole_blocks_get_another_kind_or_stay(
    sizes: dict[str, int], kind: str | None, tmp_path: Path
) -> None:
    model = opened(written(tmp_path, **sizes), "q4_k")
    down = model.model.layers[0].mlp.down_proj
    assert getattr(down, "kind", None) == kind
    assert model.model.layers[0].mlp.up_proj.kind == "Q4_K"
    with torch.inference_mode():
        assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_a_matrix_is_dropped_before_the_next_one_is_quantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Tensor]] = []

    def watched(weight: Tensor, kind: str) -> BlockWeight:
        assert [each for each in seen if each() is not None] == []
        seen.append(weakref.ref(weight))
        return quantised(weight, kind)

    monkeypatch.setattr(quantiser, "quantised", watched)
    folder = written(tmp_path)
    model = opened(folder, "q4_k")
    assert len(seen) == 2 * 7 + 2
    plain = open_model(str(folder), device="cpu")
    assert weight_bytes(model) < 0.3 * weight_bytes(plain)


def test_without_kernels_weights_are_plain_and_have_the_values_of_the_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = written(tmp_path, "qwen2")
    blocks = opened(folder, "q4_0")
    monkeypatch.setattr("outrider.lm.weights.plain.has_kernels", lambda: False)
    with caplog.at_level(logging.DEBUG, LOADING):
        plain = opened(folder, "q4_0")
    assert "rounded to Q4_0 and plain, because there is no C++ compiler" in caplog.text
    assert_has_the_values_of(plain, blocks)
    ids = torch.tensor([[3, 4, 5]])
    with torch.inference_mode():
        one, other = plain(ids).logits.float(), blocks(ids).logits.float()
    assert (one - other).std() < 0.05 * other.std()


def test_code_that_reads_weights_gets_plain_ones_and_a_line_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, file = written(tmp_path), packed(tmp_path, kind="Q8_0")
    blocks = opened(folder, "q8_0")

    def forward(self: LlamaMLP, x: Tensor) -> Tensor:
        gate = nn.functional.linear(x, self.gate_proj.weight)
        return self.down_proj(self.act_fn(gate) * self.up_proj(x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    reason = "because the code of llama does not compute with packed layers: 'BlockLinear' object has no attribute"
    with caplog.at_level(logging.DEBUG, LOADING):
        plain = opened(folder, "q8_0")
    assert reason in caplog.text
    assert_has_the_values_of(plain, blocks)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, LOADING):
        of_file = open_model(str(file), device="cpu", keep_blocks=BlockModel.of)
    assert f"made plain, {reason}" in caplog.text
    assert not has_blocks(of_file)
    with torch.inference_mode():
        assert of_file(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def assert_has_the_values_of(plain: PreTrainedModel, blocks: PreTrainedModel) -> None:
    assert has_blocks(blocks)
    assert not has_blocks(plain)
    assert plain.dtype == blocks.dtype
    for path, layer in blocks.named_modules():
        if isinstance(layer, BlockLinear | BlockEmbedding):
            assert torch.equal(plain.get_submodule(path).weight, layer.blocks.dequantised(blocks.dtype)), path
    floating = {path: buffer for path, buffer in plain.named_buffers() if buffer.is_floating_point()}
    assert floating.keys() <= dict(blocks.named_buffers()).keys()
    assert all(torch.equal(buffer, blocks.get_buffer(path)) for path, buffer in floating.items())


def test_a_line_says_what_weights_became(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, LOADING):
        opened(written(tmp_path, intermediate_size=96), "q4_k")
    assert "its weights are now Q4_K 2.709 MB, Q5_0 0.03379 MB, plain" in caplog.text


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    folder, file = written(tmp_path), packed(tmp_path)
    quantised_folder = tmp_path / "quantised"
    shutil.copytree(folder, quantised_folder)
    config = quantised_folder / "config.json"
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "fp8"},', 1))
    narrow = written(tmp_path, hidden_size=40, head_dim=10, intermediate_size=24)
    for target, options, sentence in (
        (folder, {"weights": "q4k"}, "unknown kind of weights 'q4k'; did you mean 'q4_k'?"),
        (file, {}, "is quantised already, as a GGUF file; leave out weights"),
        (quantised_folder, {}, "is quantised already, as its config says; leave out weights"),
        (folder, {"quantization_config": {"quant_method": "x"}}, "both quantise the model; give one of them"),
        (folder, {"device": None, "device_map": "auto"}, "weights quantises a model on one CPU"),
        (narrow, {}, "whole groups of 32, and llama has none; leave out weights"),
        (tiny("llama"), {"device": None}, "the target is loaded already; leave out weights"),
    ):
        given = target if isinstance(target, PreTrainedModel) else str(target)
        with pytest.raises(InputError, match=sentence):
            outrider.load(given, drafter="none", **{"weights": "q8_0", "device": "cpu", **options})


def test_a_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lm.hf.open.as_device", lambda device: torch.device("cuda"))
    with pytest.raises(InputError, match="this one goes onto cuda; leave it out, or give device=cpu"):
        outrider.load(str(written(tmp_path)), drafter="none", weights="q8_0")


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(InputError, match=r"PEFT's layers do not know packed weights; give the"):
        outrider.load(str(tmp_path), drafter="none", weights="q8_0", device="cpu")


def test_each_kind_is_another_model(tmp_path: Path) -> None:
    folder = written(tmp_path)
    hashes = [weights_of(open_model(str(folder), device="cpu"))]
    hashes += [weights_of(opened(folder, weights)) for weights in KINDS]
    assert len(set(hashes)) == 1 + len(KINDS)
    assert weights_of(opened(folder, "q4_k")) == hashes[1 + list(KINDS).index("q4_k")]


def test_a_target_and_a_draft_model_are_quantised_and_compared_with_the_same_weights(tmp_path: Path) -> None:
    folder = written(tmp_path)
    drafter = f"model:path={folder},weights=q4_0"
    engine = outrider.load(str(folder), weights="q4_k", drafter=drafter, length="fixed:2", device="cpu")
    target, draft = engine.parts.target.model, engine.parts.drafter.lm.model
    assert (target.lm_head.kind, draft.lm_head.kind) == ("Q4_K", "Q4_0")
    assert "packed and cannot be trained" in (why_not(engine.parts.drafter) or "")
    exact = in_float32(engine)
    assert exact.parts.target.dtype == exact.parts.drafter.lm.dtype == torch.float32
    for packed_model, plain in ((target, exact.parts.target.model), (draft, exact.parts.drafter.lm.model)):
        assert torch.equal(plain.lm_head.weight, packed_model.lm_head.blocks.dequantised(torch.float32))


def test_learning_refuses_a_quantised_draft_model_before_weights_are_read(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="packed and cannot be trained; leave out weights="):
        check_setup(Setup(target=str(folder), drafter=f"model:path={folder},weights=q8_0"))


def test_the_command_line_quantises_the_target(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    given = ("generate", "--prompt", "Once", "--max-new-tokens", "4", "--device", "cpu", "--no-probe", "--json")
    assert len(json.loads(done(monkeypatch, capsys, *given, "--weights", "q8_0"))["tokens"]) == 4
