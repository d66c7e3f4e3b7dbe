"""Captured states are those of the model itself, in memory as on disk, and only of the target and corpus they name."""

import json
import shutil
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.learning.batch import Document
from outrider.learning.top_rows import TopRows
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import find_embedding_and_head
from outrider.lm.hf.taps import tapped
from outrider.training.data.batches import Batches
from outrider.training.data.capture import CaptureMode, capture
from outrider.training.data.shards import MANIFEST, Captured, Contents
from tests.world.forked import printed, telling
from tests.world.full_disk import small_files
from tests.world.zoo import VOCAB, tiny

SMALL = CaptureMode(tokens_at_once=40, shard_bytes=20_000)
"""A way with several forwards and several shards."""


def corpus(count: int = 12, seed: int = 5) -> list[Document]:
    draws = np.random.default_rng(seed)
    return [Document(tokens=draws.integers(3, 30, size=int(draws.integers(2, 25))), start=1) for _ in range(count)]


def alone(model: PreTrainedModel, document: Document) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """All taps and the logits of one document, by a forward of its own."""
    anatomy = Anatomy.of(model)
    with torch.no_grad(), tapped(anatomy.layers, range(anatomy.num_layers + 1)) as seen:
        logits = model(input_ids=torch.from_numpy(document.tokens)[None], use_cache=False).logits[0]
    return {tap: states[0] for tap, states in seen.items()}, logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral", "gpt2"])
def test_states_are_those_of_each_document_alone(name: str, tmp_path: Path) -> None:
    model, documents = tiny(name), corpus()
    last = Anatomy.of(model).num_layers
    taps = (0, last - 1, last)
    kept = capture(model, documents, Contents(taps=taps, logits="all"))
    stored = capture(model, documents, Contents(taps=taps, logits="all"), out=tmp_path, way=SMALL)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    for captured in (kept, stored, Captured.open(tmp_path, model=model, documents=documents)):
        for number, document in enumerate(documents):
            hidden, logits = alone(model, document)
            found = captured.states(number)
            for tap in taps:
                assert torch.allclose(found.hidden[tap], hidden[tap], atol=1e-9), (name, number, tap)
            assert found.logits is not None
            assert torch.allclose(found.logits, logits, atol=1e-9)
            # States may become part of a graph, which states of inference mode may not.
            assert not found.logits.is_inference()


@pytest.mark.usefixtures("float64_stays_float64")
def test_logits_can_be_computed_from_the_last_tap(tmp_path: Path) -> None:
    model, documents = tiny("gemma2"), corpus()
    ends, last = find_embedding_and_head(model, Anatomy.of(model)), Anatomy.of(model).num_layers
    captured = capture(model, documents, Contents(taps=(1, last)), out=tmp_path).with_logits(ends)
    for number, document in enumerate(documents):
        found, (_, logits) = captured.states(number, 1), alone(model, document)
        assert found.logits is not None
        assert torch.allclose(found.logits, logits[1:], atol=1e-9)
        assert not found.logits.requires_grad
    with pytest.raises(InputError, match="logits are computed from tap 2, and the captured taps are 1"):
        capture(model, documents, Contents(taps=(1,))).with_logits(ends)


def test_some_of_the_captured_taps_are_read_alone() -> None:
    documents = corpus(3)
    whole = capture(tiny("llama"), documents, Contents(taps=(0, 1, 2)))
    some = whole.only((1,))
    assert set(some.states(2).hidden) == {1}
    assert torch.equal(some.states(2).hidden[1], whole.states(2).hidden[1])
    with pytest.raises(InputError, match="tap 3 was not captured"):
        whole.only((1, 3))


def test_top_rows_are_those_of_the_logits_and_batches_carry_them(tmp_path: Path) -> None:
    model, documents = tiny("llama"), corpus()
    captured = capture(model, documents, Contents(taps=(2,), logits=4), out=tmp_path, vocab_size=31, way=SMALL)
    for number, document in enumerate(documents):
        wanted, found = TopRows.of(alone(model, document)[1][:, :31], 4), captured.states(number).rows
        assert found is not None
        assert torch.equal(found.tokens, wanted.tokens)
        assert torch.allclose(found.outcomes, wanted.outcomes, atol=1e-5)
    batch = Batches(documents, batch_size=5, max_length=12, seed=0, captured=captured).batch(3)
    assert batch.hidden[2].shape == (*batch.tokens.shape, 32)
    assert batch.rows_of_target is not None
    assert batch.rows_of_target.tokens.shape == (*batch.tokens.shape, 4)


def capturing(said: Connection, out: Path) -> None:
    """Capture states, and tell how many documents are done."""
    capture(tiny("llama"), corpus(40), Contents(taps=(1, 3)), out=out, way=SMALL, progress=said.send)


def test_a_capture_killed_in_the_middle_continues_with_the_next_shard(tmp_path: Path) -> None:
    model, documents, contents = tiny("llama"), corpus(40), Contents(taps=(1, 3))
    whole = capture(model, documents, contents, way=SMALL)
    with telling(capturing, tmp_path) as (_, told):
        done = [told.recv() for _ in range(3)]
    assert done[0] == 0 < done[2] < 40
    held = Captured.open(tmp_path, model=model)
    assert done[2] <= len(held) < 40
    with pytest.raises(InputError, match=rf"have {len(held)} of 40 documents; run the capture again to complete them"):
        Captured.open(tmp_path, documents=documents)
    (tmp_path / ".shard-00003.safetensors.123").write_text("half")
    seen: list[int] = []
    capture(model, documents, contents, out=tmp_path, way=SMALL, progress=seen.append)
    assert seen[0] == len(held)
    assert {path.name.split("-")[0] for path in tmp_path.iterdir()} == {"manifest.json", "shard"}
    stored = Captured.open(tmp_path, model=model, documents=documents)
    for number in range(40):
        for tap in (1, 3):
            assert torch.equal(stored.states(number).hidden[tap], whole.states(number).hidden[tap])
    # A shard that is gone is captured again, and all that follow.
    (tmp_path / "shard-00001.safetensors").unlink()
    with pytest.raises(InputError, match=r"shard-00001\.safetensors is missing"):
        Captured.open(tmp_path)
    capture(model, documents, contents, out=tmp_path, way=SMALL)
    assert torch.equal(Captured.open(tmp_path).states(39).hidden[3], whole.states(39).hidden[3])


def test_shards_of_another_target_corpus_or_content_are_refused(tmp_path: Path) -> None:
    model, documents, contents = tiny("llama"), corpus(), Contents(taps=(1,))
    capture(model, documents, contents, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = tiny("llama", seed=1)
    for run, words in [
        (lambda: Captured.open(tmp_path, model=other), "the shards in .* are of another target; give another folder"),
        (lambda: Captured.open(tmp_path, documents=corpus(seed=6)), "the shards in .* are of another corpus"),
        (lambda: capture(other, documents, contents, out=tmp_path), "are of another target"),
        (lambda: capture(model, documents[1:], contents, out=tmp_path), "are of another corpus"),
        (
            lambda: capture(model, documents, Contents(taps=(2,), logits=3), out=tmp_path),
            f"hold taps 1 and no logits of {VOCAB} tokens in float64, and taps 2 and the 3 likeliest tokens of {VOCAB}",
        ),
        (lambda: Captured.open(tmp_path / "none"), r"there are no captured states in .*none: it has no manifest\.json"),
    ]:
        with pytest.raises(InputError, match=words):
            run()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_shards_that_number_taps_otherwise_are_refused(tmp_path: Path) -> None:
    capture(tiny("llama"), corpus(), Contents(taps=(1,)), out=tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    (tmp_path / MANIFEST).write_text(json.dumps(manifest | {"convention": "tap k leaves layer k"}))
    with pytest.raises(InputError, match="numbers hidden states otherwise \\('tap k leaves layer k'"):
        Captured.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest)[:-20])
    with pytest.raises(InputError, match=r"manifest\.json is damaged; capture the states again"):
        Captured.open(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    shard = tmp_path / manifest["entries"][0]["file"]
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(InputError, match="missing or damaged"):
        Captured.open(tmp_path).states(0)


def filling(out: Path) -> None:
    """Capture states where a limit on the size of files lets writes fail in the middle, as on a full disk."""
    long = [Document(tokens=np.full(90, 5), start=1)]
    with small_files(60_000):
        capture(tiny("llama"), corpus(4) + 3 * long, Contents(taps=(0, 1, 2)), out=out, way=SMALL)


def test_a_disk_that_fills_up_gives_a_sentence_and_leaves_no_half_shard(tmp_path: Path) -> None:
    status, _, err = printed(filling, tmp_path)
    assert status == 1
    said = err.splitlines()[-1]
    assert said.startswith("outrider.core.inputs.InputError: ")
    assert said.endswith("shard-00001.safetensors cannot be written: File too large"), said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "shard-00000.safetensors"]
    assert len(Captured.open(tmp_path)) == 3


def test_a_disk_that_is_too_small_is_refused_before_the_first_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = 32 * 8 * sum(len(document.tokens) for document in corpus())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    with pytest.raises(InputError, match=r"the states need .* GB and .* has .* GB left; give a folder with more"):
        capture(tiny("llama"), corpus(), Contents(taps=(1,)), out=tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    assert len(capture(tiny("llama"), corpus(), Contents(taps=(1,)), out=tmp_path / "new" / "deep")) == 12


def test_wrong_contents_are_named() -> None:
    model = tiny("llama")
    for contents, words in [
        ({}, "nothing is captured; name taps, logits or both"),
        ({"taps": (4,)}, r"taps must be in 0\.\.3 for this target, got 4"),
        ({"taps": (-1,)}, "taps must be >= 0, got -1"),
        ({"logits": 0}, "the number of likeliest tokens must be >= 1, got 0"),
        (
            {"logits": VOCAB},
            rf"the number of likeliest tokens must be in 1\.\.{VOCAB - 1} for this target, got {VOCAB}",
        ),
    ]:
        with pytest.raises(InputError, match=words):
            capture(model, corpus(), Contents(**contents))
    with pytest.raises(InputError, match=rf"vocab_size must be in 1\.\.{VOCAB}"):
        capture(model, corpus(), Contents(taps=(1,)), vocab_size=VOCAB + 1)
    long = [replace(corpus()[0], tokens=np.full(385, 5))]
    with pytest.raises(InputError, match="document 0 has 385 tokens and the target's context 384; read the corpus"):
        capture(model, long, Contents(taps=(1,)))
