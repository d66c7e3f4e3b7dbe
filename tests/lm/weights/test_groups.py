"""Checkpoints of AWQ and GPTQ, written by a naive packer, are the models of scale times (code minus zero point)."""

import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import outrider
from outrider import InputError, Sampling
from outrider.embedded import EMBEDDED_TARGET
from outrider.lm.hf.open import LOADING, open_model
from outrider.lm.weights.blocks import BlockWeight
from outrider.lm.weights.checkpoint import keep_packed
from outrider.lm.weights.groups import GroupFormat
from outrider.lm.weights.linear import BlockLinear
from outrider.lm.weights.operators import block_linear
from outrider.lm.weights.plain import has_blocks
from recipes.tiny import scrambled
from tests.lm.weights.test_gguf import CONFIGS
from tests.lm.weights.test_linear import error, states

CASTS = True
GREEDY = Sampling(temperature=0, seed=0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output whose code lies at each place of a word, as AutoAWQ packs them."""
METHODS = ("awq", "gptq", "gptq_v2")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A random linear layer of 4-bit codes.

    Attributes:
        codes: From 0 to 15.
        zeros: Zero points.
        scales: In float16.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray

    @classmethod
    def random(cls, outputs: int, features: int, group: int, seed: int = 0, zero: int | None = None) -> "Grouped":
        dice = np.random.default_rng(seed)
        shape = (outputs, features // group)
        return cls(
            codes=dice.integers(0, 16, (outputs, features)),
            zeros=dice.integers(1, 16, shape) if zero is None else np.full(shape, zero),
            scales=dice.uniform(0.002, 0.02, shape).astype(np.float16),
        )

    @property
    def weight(self) -> Tensor:
        """The numbers that it stands for, each computed by itself in float64."""
        outputs, features = self.codes.shape
        group = features // self.zeros.shape[1]
        weight = np.zeros((outputs, features))
        for o in range(outputs):
            for i in range(features):
                g = i // group
                weight[o, i] = float(self.scales[o, g]) * (int(self.codes[o, i]) - int(self.zeros[o, g]))
        return torch.from_numpy(weight)

    def tensors(self, method: str) -> dict[str, Tensor]:
        """As a checkpoint has them, packed word by word."""
        outputs, features = self.codes.shape
        num_groups = self.zeros.shape[1]
        scales = torch.from_numpy(self.scales.T.copy())
        if method == "awq":
            qweight, qzeros = words(features, outputs // 8), words(num_groups, outputs // 8)
            for j in range(outputs // 8):
                for place, of in enumerate(AWQ_ORDER):
                    for i in range(features):
                        qweight[i, j] |= int(self.codes[8 * j + of, i]) << 4 * place
                    for g in range(num_groups):
                        qzeros[g, j] |= int(self.zeros[8 * j + of, g]) << 4 * place
            return {"qweight": signed(qweight), "qzeros": signed(qzeros), "scales": scales}
        kept = self.zeros - (method == "gptq")
        qweight, qzeros = words(features // 8, outputs), words(num_groups, outputs // 8)
        for o in range(outputs):
            for i in range(features):
                qweight[i // 8, o] |= int(self.codes[o, i]) << 4 * (i % 8)
            for g in range(num_groups):
                qzeros[g, o // 8] |= int(kept[o, g]) << 4 * (o % 8)
        order = torch.arange(features, dtype=torch.int32) // (features // num_groups)
        return {"qweight": signed(qweight), "qzeros": signed(qzeros), "scales": scales, "g_idx": order}


def words(rows: int, columns: int) -> np.ndarray:
    return np.zeros((rows, columns), np.int64)


def signed(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.astype(np.uint32).view(np.int32))


def settings(method: str, group: int = 32) -> dict[str, object]:
    """A config's `quantization_config`."""
    if method == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return {"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": False, "checkpoint_format": method}


def weight_of(layer: Grouped, method: str, group: int) -> BlockWeight:
    return GroupFormat.of(settings(method, group), "a model").weight("up_proj", layer.tensors(method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("zero", [None, 8])
def test_a_packed_layer_is_that_of_a_naive_reader(method: str, group: int, zero: int | None) -> None:
    layer = Grouped.random(48, 256, 256 if group == -1 else group, seed=group + 1, zero=zero)
    packed = weight_of(layer, method, group)
    assert packed.kind == ("Q4_0" if zero == 8 else "Q5_0")
    assert torch.equal(packed.dequantised(torch.float64), layer.weight)
    for dtype in (torch.float32, torch.bfloat16):
        given = states(5, 256, dtype)
        exact = given.double() @ layer.weight.T
        output = block_linear(given.float(), [packed], None)
        assert error(output, exact) < 1e-6


@pytest.mark.parametrize("zero", [0, 15, 16])
def test_the_largest_and_the_smallest_zero_points_are_exact(zero: int) -> None:
    # The first format of GPTQ keeps one less, so that 16 is its largest one and the others cannot have it.
    for method in ("gptq",) if zero == 16 else ("awq", "gptq_v2"):
        layer = Grouped.random(16, 64, 32, zero=zero)
        assert torch.equal(weight_of(layer, method, 32).dequantised(torch.float64), layer.weight)


def test_many_rows_are_read_slice_by_slice() -> None:
    layer = Grouped.random(1032, 32, 32)
    for method in ("awq", "gptq"):
        assert torch.equal(weight_of(layer, method, 32).dequantised(torch.float64), layer.weight)


def written(place: Path, method: str, name: str = "llama", group: int = 32) -> tuple[Path, PreTrainedModel]:
    """The folder of a checkpoint, and the model of its numbers in bfloat16, apart from those of matrices in float32."""
    folder = place / f"{name}-{method}"
    config = type(CONFIGS[name]).from_dict(CONFIGS[name].to_dict() | SIZES)
    plain = scrambled(AutoModelForCausalLM.from_config(config, dtype=torch.float32)).to(torch.bfloat16)
    plain.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for number, (path, layer) in enumerate(plain.named_modules()):
        if type(layer) is nn.Linear and path != "lm_head":
            coded = Grouped.random(*layer.weight.shape, group, seed=number)
            del tensors[f"{path}.weight"]
            tensors |= {f"{path}.{part}": tensor for part, tensor in coded.tensors(method).items()}
            exact.get_submodule(path).weight.data = coded.weight.float()
    rewrite(folder, tensors)
    written_config = json.loads((folder / "config.json").read_text())
    written_config |= {"quantization_config": settings(method, group), "dtype": "float16"}
    (folder / "config.json").write_text(json.dumps(written_config))
    AutoTokenizer.from_pretrained(EMBEDDED_TARGET).save_pretrained(folder)
    return folder, exact


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write other tensors. The old file is mapped, so it stays as it is."""
    save_file(tensors, folder / "new", metadata={"format": "pt"})
    os.replace(folder / "new", folder / "model.safetensors")


def opened(folder: Path, **options: str) -> PreTrainedModel:
    return open_model(str(folder), device="cpu", keep_blocks=keep_packed(**options), **options)


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("name", ["qwen2", "tied"])
def test_a_checkpoint_is_the_model_of_its_numbers(name: str, method: str, tmp_path: Path) -> None:
    folder, exact = written(tmp_path, method, name)
    ours, ids = opened(folder, dtype="float32"), torch.arange(3, 40)[None]
    linear = {path for path, layer in ours.named_modules() if isinstance(layer, BlockLinear)}
    assert linear == {path for path, layer in exact.named_modules() if type(layer) is nn.Linear} - {"lm_head"}
    with torch.inference_mode():
        logits, wanted = ours(ids).logits, exact(ids).logits
    assert error(logits, wanted.double()) < 1e-4
    half = opened(folder)
    assert half.dtype == torch.bfloat16
    assert half.lm_head.kind == half.get_input_embeddings().kind == "BF16"
    assert torch.equal(half.lm_head.blocks.dequantised(torch.float32), exact.lm_head.weight)
    assert (half.lm_head.data is half.get_input_embeddings().data) == (name == "tied")
    assert getattr(ours.config, "quantization_config", None) is None
    assert (ours.lm_head.weight is ours.get_input_embeddings().weight) == (name == "tied")


def test_every_way_of_drafting_says_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = written(tmp_path, "awq")
    texts = []
    for drafter in ("none", "ngram:prompt_lookup_min=1", f"model:path={folder}"):
        with caplog.at_level(logging.DEBUG, LOADING):
            engine = outrider.load(str(folder), drafter=drafter, length="fixed:3", device="cpu")
        assert has_blocks(engine.parts.target.model)
        [output] = engine.generate([[5, 6, 7, 5, 6]], max_new_tokens=12, sampling=GREEDY, ignore_eos=True)
        texts.append(output.tokens)
    assert texts[0] == texts[1] == texts[2]
    assert "(awq, 4 bits in groups of 32; stay packed, " in caplog.text
    count = 2 * 8192 * 64 + 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128) + 5 * 64
    assert f"{count / 1e6:,.4g} M parameters, bfloat16, from" in caplog.text


def test_without_kernels_the_numbers_become_plain_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, exact = written(tmp_path, "gptq")
    monkeypatch.setattr("outrider.lm.weights.plain.has_kernels", lambda: False)
    with caplog.at_level(logging.DEBUG, LOADING):
        ours = opened(folder, dtype="float32")
    assert "made plain, because there is no C++ compiler" in caplog.text
    assert not has_blocks(ours)
    for path, weight in exact.named_parameters():
        assert torch.equal(ours.get_parameter(path), weight), path


@pytest.mark.parametrize(
    ("method", "changed", "sentence"),
    [
        ("gptq", {"bits": 8}, "has weights of 8 bits, and of gptq only 4 are known here"),
        ("awq", {"version": "gemv"}, "of awq in the format 'gemv', which is not known here"),
        ("gptq", {"checkpoint_format": "marlin"}, "of gptq in the format 'marlin', which is not known here"),
        ("awq", {"zero_point": False}, "of awq without zero points, which is not known here"),
        ("awq", {"group_size": 16}, "has groups of 16 weights, and only multiples of 32 are known here"),
    ],
    ids=str,
)
def test_other_formats_are_refused(method: str, changed: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        GroupFormat.of(settings(method) | changed, "a model")


def test_what_is_not_exact_or_does_not_fit_is_refused(tmp_path: Path) -> None:
    layer, codes = Grouped.random(16, 64, 32), GroupFormat.of(settings("gptq"), "a model")
    parts = layer.tensors("gptq")
    for changed, sentence in (
        ({"g_idx": parts["g_idx"].flip(0)}, r"inputs in an order of their own \(act-order\)"),
        ({"scales": parts["scales"].float() + 1e-7}, "scales that are not exact in float16"),
        ({"scales": parts["scales"][:1]}, "the tensors of up_proj do not fit together"),
    ):
        with pytest.raises(InputError, match=sentence):
            codes.weight("up_proj", parts | changed)
    del parts["qzeros"]
    with pytest.raises(InputError, match="up_proj has no qzeros; get the complete checkpoint"):
        codes.weight("up_proj", parts)
    folder, _ = written(tmp_path, "gptq")
    tensors = load_file(folder / "model.safetensors")
    cut = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.1.mlp.up_proj")}
    rewrite(folder, cut)
    with pytest.raises(InputError, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        opened(folder)
    rewrite(folder, tensors | {"model.layers.9.qweight": tensors["model.layers.1.mlp.up_proj.qweight"].clone()})
    with pytest.raises(InputError, match=r"model.layers.9 of .* is no linear layer of LlamaForCausalLM"):
        opened(folder)
    with pytest.raises(InputError, match="is quantised already, as its config says; leave out weights"):
        outrider.load(str(folder), weights="q8_0", device="cpu")
