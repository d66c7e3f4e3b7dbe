"""What a process finds of a model, the next one takes over; copies of weights that are not used are gone."""

import gc
import os
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from outrider.lm import choice
from outrider.lm import fingerprint as fingerprints
from outrider.lm.fingerprint import fingerprint, read_from, weights_of
from outrider.lm.forwards import packed as packing
from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.packed import PackedLinear, keeps_bits
from outrider.lm.hf.open import open_model
from outrider.lm.model import RARE, LanguageModel
from outrider.lm.protocol import Segment
from tests.host.test_mapped import resident
from tests.world.models import llama

needs_packing = pytest.mark.skipif(
    not keeps_bits(torch.device("cpu"), torch.bfloat16), reason="this machine has no kernels for packed bfloat16"
)

CASTS = True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder of long ago, and a cache folder of the test's own."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = llama(context=256)
    model.save_pretrained(tmp_path / "model")
    for file in (tmp_path / "model").iterdir():
        os.utime(file, ns=(0, 10**18))
    return tmp_path / "model"


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are hashed, tensor by tensor."""
    found, read = list[int](), fingerprints._bytes
    monkeypatch.setattr(fingerprints, "_bytes", lambda chunk: found.append(chunk.nbytes) or read(chunk))
    return found


def test_weights_of_a_folder_are_hashed_once(folder, hashed):
    first = open_model(str(folder))
    before, size = weights_of(first), sum(weight.nbytes for weight in first.parameters())
    assert sum(hashed) >= size
    hashed.clear()
    second = open_model(str(folder))
    assert weights_of(second) == before
    assert fingerprint(second.model.embed_tokens) == fingerprint(first.model.embed_tokens)
    assert hashed == []


def test_the_kept_hash_is_that_of_the_bytes(folder):
    model = open_model(str(folder))
    own = llama(context=256)
    own.load_state_dict(model.state_dict())
    expected = fingerprint(list(own.parameters()))
    for _ in range(2):
        assert fingerprint(list(model.parameters())) == expected
        model = open_model(str(folder))


@pytest.mark.parametrize("change", ["in place", "another tensor", "the file"])
def test_changed_weights_are_hashed_again(folder, hashed, change):
    model = open_model(str(folder))
    before = weights_of(model)
    if change == "in place":
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1
    elif change == "another tensor":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    else:
        other = llama(context=256)
        other.lm_head.weight.data.mul_(2)
        other.save_pretrained(folder)
        for file in folder.iterdir():
            os.utime(file, ns=(0, 10**18 + 1))
        model = open_model(str(folder))
    hashed.clear()
    assert weights_of(model) != before
    assert hashed
    assert (read_from(model) is None) == (change != "the file")


def test_a_second_process_makes_no_forward_to_check_a_model(folder, monkeypatch):
    for again in (False, True):
        model, calls = open_model(str(folder)), list[int]()
        model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        lm = LanguageModel(model, max_slots=2)
        assert bool(calls) != again
        if not again:
            expected = (lm.vocab_size, lm._maskless_from, [s.shape for s in lm.cache.storages])
    assert (lm.vocab_size, lm._maskless_from, [s.shape for s in lm.cache.storages]) == expected


def test_a_model_that_is_given_or_was_changed_is_checked_each_time(folder):
    changed = open_model(str(folder))
    with torch.no_grad():
        changed.lm_head.weight.mul_(2)
    for model in (llama(), changed):
        for _ in range(2):
            calls = list[int]()
            hook = model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
            LanguageModel(model, max_slots=2)
            hook.remove()
            assert calls


@needs_packing
@pytest.mark.parametrize(("faster", "copies"), [("eager", 0), ("packed", 1)])
def test_a_kind_of_forward_that_was_tried_leaves_no_copy_of_the_weights(folder, monkeypatch, faster, copies):
    made = list[weakref.ref[PackedLinear]]()
    begin = PackedLinear.__init__
    monkeypatch.setattr(PackedLinear, "__init__", lambda own, *a: (begin(own, *a), made.append(weakref.ref(own)))[0])
    monkeypatch.setattr(choice, "_milliseconds", lambda lm, *_: 1.0 if lm.forward == faster else 2.0)
    monkeypatch.setattr(choice, "at_hand", lambda lm, taps: ["eager", "packed"])
    lm = LanguageModel(llama(context=256).to(torch.bfloat16), max_slots=2)
    assert choice.choose(lm, forward=None, pad_to=None).forward == faster
    gc.collect()
    layers = sum(type(module) is nn.Linear for module in lm.model.modules())
    assert len(made) >= layers
    assert sum(each() is not None for each in made) == copies * layers


@needs_packing
@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self")
def test_weights_in_files_take_no_memory_beside_packed_copies(folder, monkeypatch):
    llama(context=256).to(torch.bfloat16).save_pretrained(folder)
    model = open_model(str(folder))
    lm = LanguageModel(model, max_slots=2)
    slot, token = lm.open(), torch.tensor([1])
    lm.extend([Segment(slot=slot, tokens=token)])
    assert resident(model.lm_head.weight) > 0
    monkeypatch.setattr(packing, "AT_ONCE", 1)
    lm.run_by("packed")
    assert resident(model.lm_head.weight) == 0
    for count in range(RARE):
        # A forward reads a row of the embedding.
        lm.commit({slot: []})
        lm.extend([Segment(slot=slot, tokens=token)])
        assert (resident(model.lm_head.weight) == 0) == (count == RARE - 1)


@pytest.mark.parametrize("crowded", [False, True])
def test_a_choice_of_a_busy_machine_is_kept_until_the_machine_is_free(folder, monkeypatch, crowded):
    tries = list[Forward]()
    monkeypatch.setattr(choice, "_milliseconds", lambda lm, *_: float(bool(tries.append(lm.forward))))
    counts = []
    for busy in (True, crowded, True):
        monkeypatch.setattr(choice, "crowded", lambda shares, threads, busy=busy: busy)
        tries.clear()
        found = choice.choose(
            LanguageModel(llama(context=256).to(torch.bfloat16), max_slots=2), forward=None, pad_to=None
        )
        counts.append(len(tries))
    assert counts[0] > 0
    assert (counts[1] > 0) == (not crowded)
    assert counts[2] == 0
    assert found.busy == crowded
    assert ("other processes" in str(found)) == crowded
    choice.choose(
        LanguageModel(llama(context=256).to(torch.bfloat16), max_slots=2), forward=None, pad_to=None, again=True
    )
    assert tries
