"""Models whose layers are on two devices. The second device is a test double, `tests.world.card`: its tensors say that
they are on a GPU, and raise where devices are mixed.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from transformers import PreTrainedModel

import outrider
from outrider import InputError
from outrider.lm.hf.cache_keyword import CACHE_KEYWORDS
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from outrider.lm.slots.budget import available_bytes
from tests.world.card import DEVICE, Card, Gpu, gpu
from tests.world.learners import head_learner
from tests.world.recurrent_zoo import tiny_recurrent
from tests.world.zoo import tiny

PROMPTS = [[5, 6, 7, 5, 6], [9, 3, 9]]
CPU = torch.device("cpu")


def llama() -> PreTrainedModel:
    """Three layers."""
    return tiny("llama")


def divided(model: PreTrainedModel, first: int) -> PreTrainedModel:
    """The model with its layers from `first` on, its norm and its output layer on the card, as accelerate runs it."""
    for part in (*model.model.layers[first:], model.model.norm, model.lm_head):
        add_hook_to_module(part.to(DEVICE), AlignDevicesHook(DEVICE, skip_keys=CACHE_KEYWORDS))
    for part in (model.model.embed_tokens, *model.model.layers[:first]):
        add_hook_to_module(part, AlignDevicesHook(CPU, skip_keys=CACHE_KEYWORDS))
    return add_hook_to_module(model, AlignDevicesHook(CPU, io_same_device=True, skip_keys=CACHE_KEYWORDS))


@contextmanager
def spread(first: int = 1) -> Iterator[tuple[PreTrainedModel, Gpu]]:
    with gpu() as card:
        yield divided(llama(), first), card


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a head, which reads the target's last states."""
    folder = tmp_path_factory.mktemp("head")
    head_learner("eagle", llama()).write(folder)
    return folder


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["ngram", "eagle"])
def test_layers_on_two_devices_say_what_layers_on_one_say(kind: str, temperature: float, head: Path) -> None:
    drafter = "ngram:prompt_lookup_min=1" if kind == "ngram" else f"eagle:path={head}"

    def said(model: PreTrainedModel) -> list[list[int]]:
        engine = outrider.load(model, drafter=drafter, length="fixed:3", max_slots=2)
        sampling = outrider.Sampling(temperature=temperature, seed=3)
        outputs = engine.generate(PROMPTS, max_new_tokens=12, sampling=sampling, ignore_eos=True)
        assert any(output.num_draft_tokens for output in outputs)
        return [output.tokens for output in outputs]

    with spread() as (model, _):
        there = said(model)
    assert there == said(llama())


def test_each_layers_cache_is_on_its_layers_device_and_trees_are_committed_there() -> None:
    with spread() as (model, _):
        lm = as_lm(model, max_slots=2)
        assert [isinstance(each, Card) for each in lm.cache.storages] == [False, False, True, True, True, True]
        assert lm.device == CPU
        slot = lm.open()
        tree = Segment(slot=slot, tokens=torch.tensor([3, 4, 5, 6]), parents=np.array([-1, -1, 1, 2]), logits="all")
        extension = lm.extend([tree], taps=[0, 2, 3])
        assert {states.device for states in extension.taps.values()} == {CPU}
        lm.commit({slot: [1, 2, 3]})
        there = lm.extend([Segment(slot=slot, tokens=torch.tensor([7]))]).logits
    with torch.no_grad():
        plain = llama()(torch.tensor([[4, 5, 6, 7]])).logits[0, -1:]
    torch.testing.assert_close(there, plain)


def test_masks_and_positions_go_to_a_device_once_in_a_forward() -> None:
    found = []
    for first in (2, 1):
        with spread(first) as (model, card):
            lm = as_lm(model, max_slots=2)
            segments = [Segment(slot=lm.open(), tokens=torch.tensor(prompt)) for prompt in PROMPTS]
            found.append(card.count(lambda lm=lm, segments=segments: lm.extend(segments)))
    one_layer, two_layers = found
    assert one_layer.uploads == two_layers.uploads, found


def test_the_drafters_view_of_the_ends_is_on_the_device_of_the_inputs() -> None:
    states = torch.randn(3, llama().config.hidden_size, generator=torch.Generator().manual_seed(0)).double()
    with spread() as (model, _):
        ends = as_lm(model, max_slots=1).embedding_and_head()
        logits = ends.head(ends.norm(states))
        assert logits.device == CPU
    plain = as_lm(llama(), max_slots=1).embedding_and_head()
    torch.testing.assert_close(logits, plain.head(plain.norm(states)))


def test_each_device_promises_its_own_part_of_the_cache() -> None:
    with gpu():
        # Forwards need memory too, as much over the one cache as over the other.
        gc.collect()
        free = available_bytes(DEVICE)
        lm = as_lm(divided(llama(), 2), max_slots=2, max_context=100)
        assert lm.cache.bytes_on(DEVICE) * 2 == lm.cache.bytes_on(CPU)
        part = free - available_bytes(DEVICE)
        del lm
        gc.collect()
        assert available_bytes(DEVICE) == free
        whole = as_lm(llama().to(DEVICE), max_slots=2, max_context=100)
        assert whole.cache.bytes_on(CPU) == 0
        assert 0 < part < free - available_bytes(DEVICE)


def test_a_model_on_two_devices_that_nothing_connects_is_refused() -> None:
    with gpu():
        model = llama()
        model.model.layers[1].to(DEVICE)
        with pytest.raises((InputError, RuntimeError), match=r"device"):
            as_lm(model, max_slots=1)


@pytest.mark.parametrize("forward", ["packed", "compiled", "replayed"])
def test_other_forwards_than_eager_are_refused_over_two_devices(forward: str) -> None:
    with spread() as (model, _), pytest.raises(InputError, match="on several; choose forward=eager"):
        outrider.load(model, drafter="none", forward=forward)


def test_recurrent_layers_on_two_devices_are_refused() -> None:
    with gpu():
        model = tiny_recurrent("mamba2")
        parts = model.backbone
        for part in (*parts.layers[1:], parts.norm_f, model.lm_head):
            add_hook_to_module(part.to(DEVICE), AlignDevicesHook(DEVICE, skip_keys="cache_params"))
        add_hook_to_module(model, AlignDevicesHook(CPU, io_same_device=True, skip_keys="cache_params"))
        with pytest.raises(InputError, match="recurrent layers must be on one device, got cpu, cuda:0"):
            as_lm(model, max_slots=1)
