"""Heads in layouts of this project: what they compute, what is written, what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider import catalog
from outrider.core.types import InputError
from outrider.heads.blockwise import SPEC as BLOCKWISE
from outrider.heads.parallel import SPEC as PARALLEL
from outrider.heads.parts.backoff import FILE
from outrider.lm.hf.checkpoint import TargetShape, write_head
from outrider.lm.hf.taps import tapped
from outrider.lm.protocol import Segment
from outrider.lm.target_info import TargetInfo
from tests.heads.naive_heads import NaiveEagle3, plain_layer
from tests.world.forced import forced_guesses
from tests.world.models import llama, target
from tests.world.own_heads import blockwise, parallel, peagle

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

SHAPE = TargetShape(num_layers=2, hidden_size=32, vocab_size=64, taps=(2,))


def around() -> TargetInfo:
    return TargetInfo.of(target(1), None)


@torch.no_grad()
def test_blockwise_heads_are_recognised_and_compute_what_their_description_says(tmp_path):
    known = around()
    tensors = blockwise(tmp_path, known)
    path = catalog.make("drafter", str(tmp_path))
    assert path == BLOCKWISE.at(str(tmp_path))
    drafter = path.bind(known)
    hidden = torch.randn(3, known.hidden_size, dtype=torch.float64)
    for i in range(4):
        inner = (hidden @ tensors[f"heads.{i}.up.weight"].T + tensors[f"heads.{i}.up.bias"]).clamp_min(0)
        output = hidden + inner @ tensors[f"heads.{i}.down.weight"].T + tensors[f"heads.{i}.down.bias"]
        assert torch.allclose(drafter.head.logits(drafter.head(hidden, i), i), known.head(output), atol=1e-12)
    assert drafter.max_depth == 4


@pytest.mark.parametrize(("form", "layers"), [("eagle", 1), ("medusa", 1), ("medusa", 2), ("eagle", 2)])
@torch.no_grad()
def test_a_parallel_head_is_recognised_and_computes_what_its_description_says(tmp_path, form, layers):
    known = around()
    tensors = parallel(tmp_path, known, form=form, layers=layers)
    path = catalog.make("drafter", str(tmp_path))
    assert path == PARALLEL.at(path=str(tmp_path))
    lm = path.bind(known).lm
    count, size = 5, known.hidden_size
    states = torch.randn(count, size, dtype=torch.float64)
    tokens = torch.randint(3, 64, (count,))
    nothing = torch.zeros(3, size, dtype=torch.float64)
    segment = Segment(
        slot=lm.open(), tokens=torch.cat([tokens, torch.tensor([-1, -2, -3])]), features=torch.cat([states, nothing])
    )
    logits = lm.extend([segment]).logits
    read = torch.cat([known.embed(tokens), states], 1) if form == "eagle" else states
    hidden = torch.cat([read, tensors["slots"]])
    hidden = hidden @ tensors["fc.weight"].T if form == "eagle" else hidden
    layer = json.loads((tmp_path / "config.json").read_text())["layer"]
    # Rotary tables are in float32. Slots behind one text are one group, so that plain causal layers are right.
    for i in range(layers):
        hidden = plain_layer(tensors, f"layers.{i}", hidden, layer)
    assert torch.allclose(logits, known.head(hidden), atol=1e-5), float((logits - known.head(hidden)).abs().max())


@torch.no_grad()
def test_what_is_written_reads_back(tmp_path):
    known, first, second = around(), tmp_path / "first", tmp_path / "second"
    first.mkdir()
    hidden = torch.randn(3, known.hidden_size, dtype=torch.float64)
    blockwise(first, known)
    heads = BLOCKWISE.at(str(first)).bind(known).head
    write_head(second, *heads.record(SHAPE, torch.float64, ""), torch.float64)
    again = BLOCKWISE.at(str(second)).bind(known).head
    assert again.config == heads.config
    for i in range(4):
        assert torch.equal(again.logits(again(hidden, i), i), heads.logits(heads(hidden, i), i))
    for form in ("eagle", "medusa"):
        parallel(first, known, form=form)
        head = PARALLEL.at(str(first)).bind(known).lm.module
        write_head(second, *head.record(SHAPE, torch.float64, ""), torch.float64)
        again = PARALLEL.at(str(second)).bind(known).lm.module
        assert (again.form, again.num_slots) == (form, 3)
        assert again.config.rope_parameters == head.config.rope_parameters
        assert {name: tensor.tolist() for name, tensor in load_file(second / "model.safetensors").items()} == {
            name: tensor.tolist() for name, tensor in load_file(first / "model.safetensors").items()
        }


def change(folder: Path, **fields: object) -> None:
    """Change fields of a config; None leaves a field out."""
    config = json.loads((folder / "config.json").read_text()) | fields
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_blockwise_heads_that_do_not_fit_are_refused_in_one_sentence(tmp_path):
    known = around()
    blockwise(tmp_path, known)
    path = BLOCKWISE.at(str(tmp_path))
    for wrong, message in (
        (replace(known, hidden_size=64), "width 32, and this target's have width 64"),
        (replace(known, vocab_size=99), "knows 64 tokens, and this target has 99"),
    ):
        with pytest.raises(InputError, match=message):
            path.bind(wrong)
    for fields, message in (
        ({"rescorer": "a", "paths": 3}, "leave out rescorer or paths"),
        ({"lam": 1.5}, r"lam must be in \[0, 1\], got 1\.5"),
        ({"mu": -1.0}, "mu must be >= 0"),
        ({"paths": 0}, "paths must be >= 1, got 0"),
        ({"top_k": 0}, "top_k must be >= 1, got 0"),
    ):
        with pytest.raises(InputError, match=message):
            BLOCKWISE.at(str(tmp_path), **fields)
    (tmp_path / FILE).unlink()
    with pytest.raises(InputError, match="there is no n-gram model"):
        replace(path, paths=2).bind(known)
    assert replace(path, paths=2, mu=0.0).bind(known).model is None
    for fields, message in (
        ({"num_heads": None}, r"num_heads in config.json of .* must be a whole number in 1\.\.256, got None"),
        ({"num_heads": 0}, "must be a whole number in .*, got 0"),
        ({"num_heads": 5}, r"heads\.4\.down\.bias.* missing"),
        ({"outrider_head": None}, "holds no blockwise heads"),
    ):
        blockwise(tmp_path, known)
        change(tmp_path, **fields)
        with pytest.raises(InputError, match=message):
            path.bind(known)


def test_a_parallel_head_that_does_not_fit_is_refused_in_one_sentence(tmp_path):
    known = around()
    path = PARALLEL.at(path=str(tmp_path))
    for fields, message in (
        ({"num_slots": None}, "num_slots in config.json of .* must be a whole number"),
        ({"num_slots": 7}, "slots is of another shape"),
        ({"num_slots": -1}, "must be a whole number in .*, got -1"),
        ({"form": "dflash"}, "must be eagle or medusa, got 'dflash'"),
        ({"outrider_head": None}, "holds no parallel head"),
        ({"layer": {"model_type": "gpt2"}}, "layers of the type 'gpt2'"),
    ):
        parallel(tmp_path, known)
        change(tmp_path, **fields)
        with pytest.raises(InputError, match=message):
            path.bind(known)
    parallel(tmp_path, known)
    with pytest.raises(InputError, match="width 32, and this target's have width 64"):
        path.bind(replace(known, hidden_size=64))
    with pytest.raises(InputError, match="knows 64 tokens, and this target has 99"):
        path.bind(replace(known, vocab_size=99))


def test_an_ngram_model_of_another_vocabulary_is_refused(tmp_path):
    known = around()
    blockwise(tmp_path, replace(known, vocab_size=63))
    grams = (tmp_path / FILE).read_bytes()
    blockwise(tmp_path, known)
    (tmp_path / FILE).write_bytes(grams)
    with pytest.raises(InputError, match="knows 63 tokens, and the heads beside it 64"):
        BLOCKWISE.at(str(tmp_path), paths=2).bind(known)
    assert np.isfinite(BLOCKWISE.at(str(tmp_path), paths=2, mu=0.0).bind(known).mu)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"layers": 3, "few": False},
        {"size": 16},
        {"flags": {"norm_before_residual": True}},
        {"flags": {"fc_norm": True}},
        {"flags": {"norm_before_fc": True}},
        {"native": True},
        {"native": True, "producer": "automodel", "flags": {"fc_norm": True}},
    ],
)
@torch.no_grad()
def test_a_peagle_head_is_recognised_and_guesses_what_its_description_says(tmp_path, more):
    lm = target(1)
    known = TargetInfo.of(lm, None)
    tensors = peagle(tmp_path, known, **more)
    path = catalog.make("drafter", str(tmp_path))
    assert path == PARALLEL.at(path=str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    layer = config.get("transformer_layer_config", config)
    naive = NaiveEagle3(tensors=tensors, layer=layer, ends=known.embedding_and_head(), flags=more.get("flags", {}))
    if more.get("native"):
        # vLLM's own layout counts layers otherwise, and says how many tokens are drafted when it is started.
        hints = {} if more.get("producer") else {"slots": 3}
        path = replace(path, taps=(0, 1, 2), **hints)
    text, gamma = np.random.default_rng(0).integers(3, 64, size=12).tolist(), 4
    drafter = path.bind(known)
    assert (drafter.max_depth, drafter.taps) == (4, (0, 1, 2))
    guesses = forced_guesses(drafter, lm, text, 5, gamma)
    model = llama()
    with tapped(model.model.layers, (0, 1, 2)) as seen:
        model(torch.tensor([text]), use_cache=False)
    features = naive.feature(torch.cat([seen[tap][0] for tap in (0, 1, 2)], -1))
    unknown = naive.feature(tensors["mask_hidden"][0])
    for anchor in range(4, len(text) - gamma):
        tokens = torch.tensor([*text[1 : anchor + 1], 5, 5, 5])
        logits = naive.logits(naive.head_output(tokens, torch.cat([features[:anchor], unknown.expand(3, -1)])))[-gamma:]
        for number in range(gamma):
            # Rotary tables are in float32.
            assert torch.allclose(guesses[anchor + 1 + number, number], logits[number], atol=1e-5), (anchor, number)


def test_a_peagle_head_that_leaves_a_question_open_is_refused_in_one_sentence(tmp_path):
    known = around()
    path = PARALLEL.at(path=str(tmp_path))
    for more, fields, message in (
        ({"tokens": None}, {}, "does not say how many tokens it drafts; add slots=N"),
        ({}, {"mask_token_id": None}, "say it with mask_token_id="),
        ({}, {"mask_token_id": 64}, "does not fit it"),
        ({}, {"norm_before_residual": None}, "has no norm_before_residual"),
    ):
        peagle(tmp_path, known, **more)
        change(tmp_path, **fields)
        with pytest.raises(InputError, match=message):
            path.bind(known)
    peagle(tmp_path, known, tokens=None)
    assert replace(path, slots=6).bind(known).max_depth == 7
    change(tmp_path, norm_before_residual=None, mask_token_id=None)
    assert replace(path, slots=2, norm_before_residual=False, mask_token_id=7).bind(known).lm.module.mask_id == 7
    with pytest.raises(InputError, match=r"is a P-EAGLE head .* use drafter parallel"):
        catalog.make("drafter", f"eagle3:path={tmp_path}").bind(known)
    with pytest.raises(InputError, match=r"slots must be in 0\.\.256, got -1"):
        replace(path, slots=-1)
    parallel(tmp_path, known)
    assert replace(path, slots=1).bind(known).max_depth == 2
    with pytest.raises(InputError, match="has 3 mask slots, got slots=4"):
        replace(path, slots=4).bind(known)
