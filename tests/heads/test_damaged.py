"""Heads from anywhere: a damaged checkpoint loads, or is refused in one sentence that names what is wrong."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider import catalog
from outrider.core.types import InputError
from outrider.lm.hf.checkpoint import read_config, read_tensors
from outrider.lm.target_info import TargetInfo
from tests.world.heads import CHECKPOINTS
from tests.world.models import target
from tests.world.own_heads import peagle
from tests.world.published import eagle, eagle3, medusa_of_its_authors, medusa_of_vllm

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

HEADS = {**CHECKPOINTS, "peagle": peagle}
MUTATIONS = 60
DEEP: list[Any] = []
for _ in range(500):
    DEEP = [DEEP]
VALUES = (
    *(None, True, -1, 0, 1, 3, 7, 10**9, 10**30, 0.5, 32.0, float("nan"), float("inf"), "x", "32", ""),
    *([], ["x"], [0, 0], {}, {"a": 1}, DEEP),
)
ROTARY = (
    {"rope_type": "foo"},
    {"rope_type": ["yarn"]},
    {"rope_type": "yarn"},
    {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4},
    {"rope_type": "default", "rope_theta": -5.0},
    {"rope_type": "default", "rope_theta": "x"},
)
KEYS = (
    *("architectures", "model_type", "layer_types", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta"),
    *("outrider_target", "target_hidden_size", "draft_vocab_size", "speculators_config", "dflash_config"),
    *("sliding_window", "logit_scale", "block_size", "eagle_config", "partial_rotary_factor"),
)


def around() -> TargetInfo:
    return TargetInfo.of(target(1), None)


def places(config: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys of everything in a config."""
    parts = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, each in parts:
        yield (*above, key)
        yield from places(each, (*above, key))


def changed_config(config: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """The config with one value that makes no sense, or without one key."""
    config = copy.deepcopy(config)
    layer = config.get("transformer_layer_config")
    inner = layer if isinstance(layer, dict) and dice.random() < 0.5 else config
    way = dice.random()
    if way < 0.15:
        inner[dice.choice(["rope_parameters", "rope_scaling"])] = dice.choice(ROTARY)
    elif way < 0.35:
        inner[dice.choice(KEYS)] = dice.choice(VALUES)
    else:
        *above, last = dice.choice(list(places(config)))
        at: Any = config
        for key in above:
            at = at[key]
        if dice.random() < 0.1:
            del at[last]
        else:
            at[last] = dice.choice(VALUES)
    return config


def changed_tensors(tensors: dict[str, Tensor], dice: random.Random) -> dict[str, Tensor]:
    """The tensors with one that is damaged, missing, foreign, or of another kind."""
    damaged, name = dict(tensors), dice.choice(sorted(tensors))
    old = damaged.pop(name)
    ways = {
        "missing": {},
        "renamed": {f"{name}x": old},
        "numbered": {name.replace(".0.", f".{'9' * 30}.").replace(".1.", ".98."): old},
        "foreign": {name: old, "more.weight": torch.ones(3)},
        "whole": {name: old.long()},
        "truths": {name: old.bool()},
        "weights": {name: old.double()},
        "packed": {name: old.to(torch.uint8)},
        "quantised": {name: old.float().to(torch.float8_e4m3fn)},
        "not numbers": {name: torch.full_like(old.double(), torch.nan)},
        "infinite": {name: torch.full_like(old.double(), -torch.inf)},
        "wider": {name: torch.zeros([size + 1 for size in old.shape], dtype=old.dtype)},
        "turned": {name: old.t().contiguous()} if old.dim() == 2 else {name: old.flip(0)},
        "deeper": {name: old[None]},
        "empty": {name: old[:0]},
        "single": {name: old.flatten()[0]},
        "negative": {name: old if old.dtype is torch.bool else -old},
    }
    return damaged | dice.choice(list(ways.values()))


def saved(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A checkpoint's two files."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.parametrize("kind", HEADS)
def test_a_damaged_head_loads_or_is_refused_in_one_sentence(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    known = around()
    HEADS[kind](tmp_path, known)
    config, tensors = read_config(str(tmp_path)), read_tensors(str(tmp_path))
    name = catalog.name_of(catalog.make("drafter", str(tmp_path)))
    refused: list[str] = []
    for number in range(MUTATIONS):
        dice = random.Random(number)
        of_config = dice.random() < 0.6
        place = saved(
            tmp_path / "changed",
            changed_config(config, dice) if of_config else config,
            tensors if of_config else changed_tensors(tensors, dice),
        )
        try:
            catalog.make("drafter", f"{name}:path={place}").bind(known)
        except InputError as error:
            refused.append(str(error))
        except Exception as error:
            raise AssertionError(f"mutation {number} of {kind}: {type(error).__name__}: {error}") from error
    assert 0 < len(refused) < MUTATIONS
    assert not [sentence for sentence in refused if "\n" in sentence or len(sentence) > 1000]


def refusal(place: Path, config: dict[str, Any] | None = None, tensors: dict[str, Tensor] | None = None) -> str:
    """The sentence that a user reads about a folder, some of whose entries are others."""
    old, weights = read_config(str(place)), read_tensors(str(place))
    new = saved(place / "changed", old | (config or {}), weights | (tensors or {}))
    with pytest.raises(InputError) as error:
        catalog.make("drafter", new).bind(around())
    return str(error.value)


def test_a_damaged_tensor_is_named(tmp_path):
    tensors = eagle3(tmp_path, around(), taps=(0, 1, 2))
    name = "layers.0.mlp.up_proj.weight"
    poisoned = tensors[name].clone()
    poisoned[3, 4] = torch.nan
    for tensor, what in (
        (poisoned, "holds values that are not numbers"),
        (poisoned.nan_to_num(torch.inf), "holds values that are not numbers"),
        (tensors[name].long(), f"{name} is of another kind of numbers"),
        (tensors[name].float().to(torch.float8_e4m3fn), "get the head that is not quantised"),
    ):
        sentence = refusal(tmp_path, tensors={name: tensor})
        assert name in sentence
        assert what in sentence


def test_what_a_config_must_not_say_is_named(tmp_path):
    eagle3(tmp_path, around(), taps=(0, 1, 2))
    layer = read_config(str(tmp_path))["transformer_layer_config"]
    for config, says in (
        ({"num_hidden_layers": 0}, "num_hidden_layers in config.json"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json"),
        ({"intermediate_size": 900_000}, "mlp.up_proj.weight are of another shape"),
        ({"hidden_size": True}, "expected int, got bool"),
        ({"num_attention_heads": -4}, "num_attention_heads in config.json"),
        ({"hidden_size": "32"}, "refused by transformers"),
        ({"num_key_value_heads": 3}, "must be a multiple of the last"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps in the config"),
        ({"rope_parameters": {"rope_type": "foo"}}, "has the rope_type 'foo'; known are default"),
    ):
        assert says in refusal(tmp_path, {"transformer_layer_config": layer | config})
    assert "architectures in config.json" in refusal(tmp_path, {"architectures": "Eagle3Speculator"})
    assert "must be an object" in refusal(tmp_path, {"transformer_layer_config": [1]})
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(InputError, match="nested too deeply"):
        catalog.make("drafter", str(tmp_path))


def test_an_eagle_folder_without_its_fusion_is_no_model(tmp_path):
    tensors = eagle(tmp_path, around(), vllm=True)
    config = read_config(str(tmp_path)) | {"architectures": ["LlamaForCausalLM"]}
    del tensors["fc.weight"]
    with pytest.raises(InputError, match=r"fc\.weight is missing"):
        catalog.make("drafter", saved(tmp_path, config, tensors)).bind(around())


def test_an_eagle_head_of_a_mixtral_has_a_plain_layer(tmp_path):
    known = around()
    eagle(tmp_path, known)
    config, tensors = read_config(str(tmp_path)), read_tensors(str(tmp_path))
    plain = catalog.make("drafter", str(tmp_path)).bind(known).lm.module
    config |= {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8}
    other = catalog.make("drafter", saved(tmp_path / "other", config, tensors)).bind(known).lm.module
    assert all(torch.equal(weight, other.state_dict()[name]) for name, weight in plain.state_dict().items())
    positions = torch.arange(4)[None]
    assert torch.equal(*(head.rotary(torch.zeros(1, 4, 8), positions) for head in (plain, other)))


def test_medusa_heads_of_another_vocabulary_are_those_of_another_target(tmp_path):
    known = around()
    medusa_of_its_authors(tmp_path, known)
    tensors = read_tensors(str(tmp_path))
    wide = {name: torch.cat([t, t[:9]]) for name, t in tensors.items() if len(t) == known.vocab_size}
    assert "knows 73 tokens, and this target has 64" in refusal(tmp_path, tensors=wide)


@pytest.mark.parametrize("form", [medusa_of_vllm, medusa_of_its_authors])
def test_medusa_tensors_that_nobody_knows_are_refused_by_name(tmp_path, form):
    form(tmp_path, around())
    extra = {"0.9.gate.weight": torch.ones(3), "blocks.0.layers.0.extra": torch.ones(3)}
    for name, tensor in extra.items():
        assert f"{name} is not part of such a head" in refusal(tmp_path, tensors={name: tensor})
    model = {"model.embed_tokens.weight": torch.ones(3, 3), "lm_head.weight": torch.ones(3, 3)}
    whole = saved(tmp_path / "whole", read_config(str(tmp_path)), read_tensors(str(tmp_path)) | model)
    assert catalog.make("drafter", whole).bind(around()).max_depth > 1


def test_a_pickle_that_holds_code_is_refused_without_advice_to_run_it(tmp_path):
    medusa_of_its_authors(tmp_path, around())
    torch.save({"0.0.linear.weight": Path("x")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(InputError, match="convert the tensors to safetensors") as error:
        catalog.make("drafter", f"medusa:path={tmp_path}").bind(around())
    assert "weights_only" not in str(error.value)
