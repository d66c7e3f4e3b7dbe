"""Targets that bitsandbytes, torchao and quanto quantised, where they are installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import outrider
from outrider.lm.forwards.packed import PackedLinear, packed
from outrider.lm.hf.open import open_model
from tests.world.zoo import scrambled, tiny

GREEDY = outrider.Sampling(temperature=0.0, seed=0)

CASTS = True


def everything(model: nn.Module) -> dict[str, list[int]]:
    """The bytes of all weights and buffers; of tensors around other ones, those of the inner ones."""

    def inner(name: str, tensor: Tensor) -> Iterator[tuple[str, list[int]]]:
        if hasattr(tensor, "__tensor_flatten__"):
            for part in tensor.__tensor_flatten__()[0]:
                yield from inner(f"{name}.{part}", getattr(tensor, part))
        else:
            yield name, tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
            if (state := getattr(tensor, "quant_state", None)) is not None:
                yield from inner(f"{name}.absmax", state.absmax)

    return dict(
        pair for name, each in [*model.named_parameters(), *model.named_buffers()] for pair in inner(name, each)
    )


def nf4(place: str) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    return LlamaForCausalLM.from_pretrained(place, quantization_config=settings, device_map="cpu")


def int8_of_torchao(place: str) -> nn.Module:
    torchao = pytest.importorskip("torchao.quantization")
    model = LlamaForCausalLM.from_pretrained(place)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


def int8_of_quanto(place: str) -> nn.Module:
    quanto = pytest.importorskip("optimum.quanto")
    model = LlamaForCausalLM.from_pretrained(place)
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    return model


def int8_of_compressed_tensors(place: str) -> nn.Module:
    """From a checkpoint of packed weights. transformers unpacks them to floating weights in the first forward."""
    kinds = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    model = LlamaForCausalLM.from_pretrained(place)
    weights = kinds.QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    scheme = kinds.QuantizationScheme(targets=["Linear"], weights=weights)
    kinds.apply_quantization_config(model, kinds.QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    with torch.no_grad():
        for layer in (each for each in model.modules() if hasattr(each, "weight_scale")):
            layer.weight_scale.copy_(layer.weight.abs().amax(1, keepdim=True) / 127)
            layer.quantization_status = kinds.QuantizationStatus.FROZEN
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    packed_place = Path(place) / "packed"
    model.save_pretrained(packed_place)
    compressor.update_config(packed_place)
    found = open_model(str(packed_place), dtype="float32")
    assert found.model.layers[0].mlp.up_proj.weight_packed.dtype == torch.int32
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("opened", [nf4, int8_of_torchao, int8_of_quanto, int8_of_compressed_tensors])
def test_a_quantised_target_says_what_it_says_alone_and_stays_as_it_is(opened, tmp_path: Path) -> None:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    scrambled(LlamaForCausalLM(LlamaConfig(**size, vocab_size=64)), 0).save_pretrained(tmp_path)
    model = opened(tmp_path).eval()
    prompts, settings = [[5, 6, 7, 5, 6], [9, 3]], {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    # bitsandbytes arranges its weights anew in the first forward.
    plain = [model.generate(torch.tensor([p]), max_new_tokens=16, **settings)[0, len(p) :].tolist() for p in prompts]
    before = everything(model)
    engine = outrider.load(model, drafter="ngram:prompt_lookup_min=1", length="goodput", max_slots=2)
    made = engine.generate(prompts, max_new_tokens=16, sampling=GREEDY, ignore_eos=True)
    assert [output.tokens for output in made] == plain
    assert everything(model) == before


def test_only_plain_layers_of_a_torchao_target_are_packed() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny("llama").bfloat16()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    assert not any(isinstance(layer, PackedLinear) for layer in packed(model).modules())
