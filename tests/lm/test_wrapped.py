"""Models in what others put around them: adapters, compilers, copies on several devices, several processes."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import outrider
from outrider import InputError
from tests.world.zoo import tiny

CASTS = True


GREEDY = outrider.Sampling(temperature=0.0, seed=0)
PROMPT = [5, 6, 7, 5, 6]


def drafted(target: object) -> list[int]:
    engine = outrider.load(target, drafter="ngram:prompt_lookup_min=1", length="fixed:4", max_slots=1)
    [output] = engine.generate([PROMPT], max_new_tokens=16, sampling=GREEDY, ignore_eos=True)
    return output.tokens


def generated(model: PreTrainedModel) -> list[int]:
    settings = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(input_ids=torch.tensor([PROMPT]), **settings)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("wrap", [nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_a_wrapped_model_stands_for_the_model_in_it(wrap) -> None:
    model = tiny("llama")
    assert outrider.load(wrap(model), drafter="none").parts.target.model is model


def test_a_large_module_is_refused_by_its_type() -> None:
    with pytest.raises(InputError, match=r"or a transformers model, got a Sequential$"):
        outrider.load(nn.Sequential(*[nn.Linear(1, 1) for _ in range(9)]))


def test_a_model_for_images_and_texts_is_opened_from_its_directory(tmp_path: Path) -> None:
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**size, image_size=28, patch_size=14, projection_dim=16)
    text = LlamaConfig(**size, vocab_size=64, max_position_embeddings=64)
    model = LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_id=63)).eval()
    model.save_pretrained(tmp_path)
    assert drafted(tmp_path) == generated(model)


def test_a_model_with_an_encoder_is_refused_as_such(tmp_path: Path) -> None:
    T5ForConditionalGeneration(T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(InputError, match="t5 is an encoder-decoder model; a decoder-only"):
        outrider.load(tmp_path)


def test_a_model_that_some_of_the_processes_hold_is_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model, mesh = tiny("llama"), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "parts"))["parts"]
        weight = DTensor.from_local(model.lm_head.weight.detach(), mesh, [Replicate()])
        model.lm_head.weight = nn.Parameter(weight)
        with pytest.raises(InputError, match="spread over 2 of 4 processes; start as many as hold it"):
            outrider.load(model)
    finally:
        dist.destroy_process_group()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapter(place: Path, base: Path, **more: object) -> Path:
    """An adapter's directory, with a file of weights that nobody reads."""
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(base)} | more))
    (place / "adapter_model.safetensors").write_bytes(b"")
    return place


@pytest.mark.skipif(importlib.util.find_spec("peft") is not None, reason="PEFT is installed")
def test_an_adapter_without_peft_is_told_what_it_is(base: Path, tmp_path: Path) -> None:
    place = adapter(tmp_path / "lora", base)
    with pytest.raises(InputError, match=rf"{place} is an adapter of {base}, which needs peft; .pip install"):
        outrider.load(place)


def test_an_adapter_without_weights_or_without_a_base_is_refused(base: Path, tmp_path: Path) -> None:
    place = adapter(tmp_path / "lora", base)
    (place / "adapter_model.safetensors").unlink()
    with pytest.raises(InputError, match=r"without adapter_model\.safetensors"):
        outrider.load(place)
    with pytest.raises(InputError, match="names no base_model_name_or_path"):
        outrider.load(adapter(tmp_path / "lost", base, base_model_name_or_path=None))


def adapted(base: Path, *, dora: bool = False) -> nn.Module:
    """A model with two adapters, `default` and `other`, that both say other texts than the model alone."""
    peft = pytest.importorskip("peft")
    kinds = {"task_type": "CAUSAL_LM", "lora_alpha": 32, "use_dora": dora}
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"], **kinds)
    model = peft.get_peft_model(tiny("llama").from_pretrained(base), config)
    model.add_adapter("other", peft.LoraConfig(target_modules=["v_proj"], **kinds))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                weight.normal_(std=0.5)
    return model.eval()


@pytest.fixture(params=[False, True], ids=["lora", "dora"])
def lora(base: Path, request: pytest.FixtureRequest) -> nn.Module:
    """The same, of both kinds."""
    return adapted(base, dora=request.param)


def test_an_adapter_is_part_of_the_target_and_stays_as_it_is(lora: nn.Module, base: Path, tmp_path: Path) -> None:
    expected = generated(lora)
    assert expected != drafted(base)
    before = {name: weight.clone() for name, weight in lora.named_parameters()}
    assert drafted(lora) == expected
    assert all(torch.equal(weight, before[name]) for name, weight in lora.named_parameters())
    lora.save_pretrained(tmp_path / "lora")
    assert drafted(tmp_path / "lora") == expected


def test_of_several_adapters_the_active_one_speaks(base: Path) -> None:
    model = adapted(base)
    first = drafted(model)
    model.set_adapter("other")
    assert drafted(model) == generated(model) != first


def test_a_merged_adapter_is_a_plain_target(base: Path, tmp_path: Path) -> None:
    model = adapted(base)
    expected = generated(model)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert drafted(tmp_path / "merged") == expected


def test_an_adapter_that_acts_outside_of_layers_is_refused(base: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(InputError, match=r"kind PROMPT_TUNING acts outside of the model's layers"):
        outrider.load(peft.get_peft_model(tiny("llama").from_pretrained(base), config))
