"""A target that several processes hold together (tensor parallel): two of them, over gloo on CPUs."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider import InputError
from outrider.assembly import by_a_clock
from outrider.core import ranks
from outrider.decoding.pearl import PearlDecoding
from outrider.lengths.goodput import GoodputLength
from outrider.lm.hf.support import refusal
from recipes.tiny import VOCAB, scrambled
from tests.lm import divided
from tests.world.forked import rank_environments, started, statuses
from tests.world.learners import head_learner
from tests.world.models import engine
from tests.world.recurrent_zoo import tiny_recurrent

CASTS = True


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A target in float32, and a head for it."""
    folder = tmp_path_factory.mktemp("divided")
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    model = scrambled(LlamaForCausalLM(config))
    model.save_pretrained(folder / "target")
    head_learner("eagle", model).write(folder / "head")
    return str(folder / "target"), str(folder / "head")


def test_two_processes_say_what_one_says(places: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "told.json"
    assert statuses(*(started(divided.main, *places, str(out), **rank) for rank in rank_environments(2))) == [0, 0]
    first, second = json.loads(out.read_text())
    assert first == second
    assert first.pop("processes") == [2, 2]
    alone = divided.decoded(*places, tp_plan=None)
    assert first.keys() == alone.keys()
    for name, tokens in alone.items():
        # Without a seed each run draws others, and all processes of a run draw the same.
        assert name.endswith("without a seed") or first[name] == tokens, name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "this is one; start them with torchrun --nproc-per-node 2"),
        ({"device_map": "auto"}, "tp_plan and device or device_map both say"),
    ],
)
def test_what_cannot_be_divided_is_refused(places: tuple[str, str], options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        outrider.load(places[0], drafter="none", tp_plan="auto", **options)


@pytest.fixture
def two() -> Iterator[None]:
    """This process takes itself for one of two that hold a target; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ranks.join(2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": GoodputLength()}, "length 'goodput' depends on times, .* choose length 'fixed:5'"),
        ({"decoding": PearlDecoding()}, "decoding 'pearl' depends on times, .* choose decoding 'step'"),
        ({}, None),
    ],
)
def test_choices_by_a_clock_are_refused(two: None, change: dict[str, object], message: str | None) -> None:
    reason = by_a_clock(replace(engine("ngram").parts, **change))
    assert (message is None and reason is None) or (message and re.search(message, str(reason)))


def test_recurrent_layers_in_several_processes_are_refused(two: None) -> None:
    model, mesh = tiny_recurrent("mamba2"), init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(model.backbone.embeddings.weight.detach(), mesh, [Replicate()])
    model.backbone.embeddings.weight = nn.Parameter(weight)
    assert "recurrent layers, whose states in 2 processes are not known here" in str(refusal(model))
