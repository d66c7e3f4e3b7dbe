"""A target that several processes hold together (tensor parallel): two of them, over gloo on CPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import outrider
from outrider import InputError
from outrider.core import ranks
from recipes.tiny import VOCAB, scrambled
from tests.lm.divided import decoded
from tests.world.learners import head_learner

ROOT = Path(__file__).parent.parent.parent


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


def launched(*command: str) -> str:
    """What two processes print."""
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", *command]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_processes_say_what_one_says(places: tuple[str, str]) -> None:
    told: list[dict[str, Any]] = json.loads(launched("tests.lm.divided", *places))
    alone = decoded(*places, tp_plan=None)
    first, second = told
    assert first == second
    assert first.pop("processes") == [2, 2]
    assert first.keys() == alone.keys()
    for name, tokens in alone.items():
        # Without a seed each run draws others, and all processes of a run draw the same.
        assert name.endswith("drawn") or first[name] == tokens, name


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": "goodput"}, "length 'goodput' depends on times, .* choose length 'fixed:5'"),
        ({"decoding": "pearl", "drafter": "model:path={place}"}, "decoding 'pearl' depends on times"),
    ],
)
def test_choices_by_a_clock_are_refused(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, options: dict[str, str], message: str
) -> None:
    # One process that takes itself for one of two.
    monkeypatch.setattr(ranks.dist, "is_initialized", lambda: True)
    monkeypatch.setitem(ranks._TOGETHER, "count", 2)
    monkeypatch.setattr("outrider.core.ranks.dist.all_gather_object", lambda into, value: None)
    monkeypatch.setattr("outrider.core.ranks.dist.get_world_size", lambda: 0)
    monkeypatch.setattr("outrider.core.ranks.dist.broadcast_object_list", lambda told, src: None)
    named = {"drafter": "ngram"} | {name: value.format(place=places[0]) for name, value in options.items()}
    with pytest.raises(InputError, match=message):
        outrider.load(places[0], **named)
