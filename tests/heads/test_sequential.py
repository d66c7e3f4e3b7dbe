"""Hydra heads and MLP speculators: published forms against a naive reading of them, and what is refused."""

import json
import math

import pytest
import torch
from torch import Tensor

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.hydra import SPEC as HYDRA
from outrider.heads.mlp_speculator import SPEC as MLP_SPECULATOR
from outrider.lm.model import LanguageModel
from outrider.lm.target_info import TargetInfo
from tests.heads.naive_heads import normed, plain_layer
from tests.world.forced import forced_guesses
from tests.world.models import llama, target
from tests.world.published import hydra, layer_of, mlp_speculator

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

TEXT = [3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 9, 32, 3, 8, 46]
GAMMA = 4
HYDRAS = {
    "Hydra": {"prefix": False},
    "Hydra, deep": {"prefix": False, "layers": 3},
    "Hydra, not grounded": {"prefix": False, "grounded": False},
    "Hydra++": {"prefix": True},
    "Hydra++, deep": {"prefix": True, "layers": 3},
}
SPECULATORS = {"plain": {}, "tied": {"tied": True}, "scaled": {"scaled": True}, "both": {"tied": True, "scaled": True}}


def around() -> TargetInfo:
    return TargetInfo.of(target(1), None)


def silu(states: Tensor) -> Tensor:
    return states / (1 + torch.exp(-states))


def naive_hydra(tensors: dict[str, Tensor], seen: Tensor, tokens: list[int], layer: dict, embedding: Tensor) -> Tensor:
    """Logits behind some tokens, from the target's normed states before the first of them."""
    state, every = seen[-1], 1
    if "prefix_embeding_layer.norm.weight" in tensors:
        output = plain_layer(tensors, "prefix_embeding_layer.layers.0", seen, layer)
        state, every = normed(output, tensors["prefix_embeding_layer.norm.weight"])[-1], 2
    head = len(tokens) - 1
    name = f"hydra_mlp.{head}.{every - 1}"
    if f"{name}.res_connection.weight" in tensors:
        state = torch.cat([state, *(embedding[token] for token in tokens)])
        kept = tensors[f"{name}.res_connection.weight"] @ state + tensors[f"{name}.res_connection.bias"]
    else:
        kept = state
    state = kept + silu(tensors[f"{name}.linear.weight"] @ state + tensors[f"{name}.linear.bias"])
    place = 2 * every - 1
    while f"hydra_mlp.{head}.{place}.linear.weight" in tensors:
        name = f"hydra_mlp.{head}.{place}.linear"
        state, place = state + silu(tensors[f"{name}.weight"] @ state + tensors[f"{name}.bias"]), place + every
    name = f"hydra_lm_head.{head}{'.1' if every == 2 else ''}"
    return tensors[f"{name}.weight"] @ state + tensors[f"{name}.bias"]


def naive_speculator(tensors: dict[str, Tensor], state: Tensor, tokens: list[int], scaled: bool) -> Tensor:
    """The same for an MLP speculator, as its authors describe it."""

    def of(name: str, depth: int) -> Tensor:
        named = f"speculator.{name.format(depth)}"
        return tensors[named if named in tensors else f"speculator.{name.format(1 if 'proj' in name else 0)}"]

    inner = of("ln.{}.weight", 0).shape[0]
    share = 0.5 ** (0.5 / 4)
    if scaled:
        state = state / (state.pow(2).mean() + 1e-6).sqrt() / 2**0.5
    for depth, token in enumerate(tokens):
        moved = share * (of("proj.{}.weight", depth) @ state)
        moved = moved + math.sqrt(1 - share**2) * math.sqrt(inner / 2) * of("emb.{}.weight", depth)[token]
        moved = moved / (moved.pow(2).mean() + 1e-6).sqrt()
        moved = of("ln.{}.weight", depth) * moved + of("ln.{}.bias", depth)
        state = moved * 0.5 * (1 + torch.erf(moved / math.sqrt(2)))
    return of("head.{}.weight", len(tokens) - 1) @ state


def states_of(text: list[int]) -> tuple[Tensor, Tensor]:
    """The target's normed last states along a text, and its embedding."""
    model = llama()
    seen = model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    return seen, model.get_input_embeddings().weight


def pieces(place: int, number: int) -> tuple[int, list[int]]:
    """Where the anchor of a guess stands, and the tokens from there that it reads."""
    anchor = place - 1 - number
    return anchor, TEXT[anchor : anchor + number + 1]


@pytest.mark.parametrize("form", HYDRAS)
@torch.no_grad()
def test_published_hydra_heads_are_recognised_and_guess_what_their_description_says(tmp_path, form):
    known = around()
    tensors = hydra(tmp_path, known, **HYDRAS[form])
    path = catalog.make("drafter", str(tmp_path))
    assert path == HYDRA.at(str(tmp_path))
    lm = LanguageModel(llama(), max_slots=1)
    guesses = forced_guesses(path.bind(TargetInfo.of(lm, None)), lm, TEXT, 5, GAMMA)
    assert {number for _, number in guesses} == set(range(GAMMA))
    seen, embedding = states_of(TEXT)
    for (place, number), logits in guesses.items():
        anchor, tokens = pieces(place, number)
        expected = naive_hydra(tensors, seen[:anchor], tokens, layer_of(known), embedding)
        assert torch.allclose(logits, expected, atol=1e-5), (place, number)


@pytest.mark.parametrize("form", SPECULATORS)
@torch.no_grad()
def test_a_published_mlp_speculator_is_recognised_and_guesses_what_its_description_says(tmp_path, form):
    tensors = mlp_speculator(tmp_path, around(), **SPECULATORS[form])
    path = catalog.make("drafter", str(tmp_path))
    assert path == MLP_SPECULATOR.at(str(tmp_path))
    lm = LanguageModel(llama(), max_slots=1)
    guesses = forced_guesses(path.bind(TargetInfo.of(lm, None)), lm, TEXT, 5, GAMMA)
    seen, _ = states_of(TEXT)
    for (place, number), logits in guesses.items():
        anchor, tokens = pieces(place, number)
        expected = naive_speculator(tensors, seen[anchor - 1], tokens, SPECULATORS[form].get("scaled", False))
        assert torch.allclose(logits, expected, atol=1e-6), (place, number)


def test_heads_of_another_kind_or_target_are_refused_in_one_sentence(tmp_path):
    known = around()
    for name in ("hydra", "mlp"):
        (tmp_path / name).mkdir()
    hydra(tmp_path / "hydra", known, prefix=True)
    mlp_speculator(tmp_path / "mlp", known)

    def config(name: str, **changes: object) -> None:
        file = tmp_path / name / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    def refused(message: str, name: str, **changes: object) -> None:
        before = (tmp_path / name / "config.json").read_text()
        config(name, **changes)
        with pytest.raises(InputError, match=message):
            catalog.make("drafter", str(tmp_path / name)).bind(known)
        (tmp_path / name / "config.json").write_text(before)

    refused("kind 'eagle-attn'; known are mlp, prefix-mlp", "hydra", hydra_head_arch="eagle-attn")
    refused("does not name the target", "hydra", base_model_name_or_path="")
    refused("9 layers before the end", "hydra", hidden_state_offset=9)
    refused("made of layers of the type", "hydra", base_model_name_or_path=str(gpt2(tmp_path)))
    refused("n_predict in config.json of .* must be a whole number", "mlp", n_predict=None)
    refused("must be a whole number in 1..256, got 0", "mlp", n_predict=0)
    refused("of another shape", "mlp", inner_dim=8)
    (tmp_path / "mlp" / "model.safetensors").unlink()
    refused("no weights of a head", "mlp")
    with pytest.raises(InputError, match="holds no Hydra heads"):
        HYDRA.at(str(tmp_path / "mlp")).bind(known)
    with pytest.raises(InputError, match="holds no MLP speculator"):
        MLP_SPECULATOR.at(str(tmp_path / "hydra")).bind(known)


def gpt2(folder):
    """The folder of a config of another kind of layers."""
    place = folder / "gpt2"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    return place
