"""A draft model: whose tokenizer is the target's, and what it reads in one forward."""

import os
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.core.types import Request, Running, Sampling
from outrider.drafters.model import BACKLOG, ModelDrafter, ModelPath
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.lm.forwards.packed import keeps_bits
from outrider.lm.slots import budget
from outrider.lm.tabular import TabularLM, random_rows
from tests.world.gguf_files import write_gguf


@pytest.fixture
def reads(monkeypatch):
    """The directories whose tokenizers were read for a draft model."""
    seen, read = [], ModelPath.read_tokenizer
    monkeypatch.setattr(ModelPath, "read_tokenizer", lambda self: seen.append(self.path) or read(self))
    return seen


def test_the_very_files_of_the_targets_tokenizer_are_not_read_again(reads):
    drafter = outrider.load(drafter=f"model:path={EMBEDDED_DRAFT}", max_slots=1).parts.drafter
    assert reads == []
    assert drafter.short_list is None


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "added_tokens.json"])
def test_another_file_is_read(name, reads, tmp_path):
    shutil.copytree(EMBEDDED_DRAFT, tmp_path, dirs_exist_ok=True)
    file = tmp_path / name
    file.write_text((file.read_text() if file.exists() else "{}") + "\n")
    outrider.load(drafter=f"model:path={tmp_path}", max_slots=1)
    assert reads == [str(tmp_path)]


def test_the_tokenizer_of_a_gguf_file_is_read_once_where_the_targets_is_the_same(reads, tmp_path):
    pytest.importorskip("gguf")
    tokenizer, files = AutoTokenizer.from_pretrained(EMBEDDED_TARGET), []
    for name, folder in (("target", EMBEDDED_TARGET), ("draft", EMBEDDED_DRAFT)):
        files.append(write_gguf(tmp_path / f"{name}.gguf", AutoModelForCausalLM.from_pretrained(folder), tokenizer))
        # What was written just now is not kept.
        os.utime(files[-1], (1e9, 1e9))
    for _ in range(2):
        outrider.load(str(files[0]), drafter=f"model:path={files[1]}", max_slots=1)
    assert reads == [str(files[1])]


BFLOAT16 = keeps_bits(torch.device("cpu"), torch.bfloat16)
NO_KERNELS = pytest.mark.skipif(not BFLOAT16, reason="this CPU has no kernels for bfloat16")


@pytest.mark.parametrize("forward", ["eager", pytest.param("packed", marks=NO_KERNELS)])
def test_a_text_may_hold_tokens_for_which_the_draft_model_has_no_row(forward, tmp_path):
    shutil.copytree(EMBEDDED_DRAFT, tmp_path, dirs_exist_ok=True)
    narrow = AutoModelForCausalLM.from_pretrained(EMBEDDED_DRAFT)
    narrow.resize_token_embeddings(8000)
    narrow.save_pretrained(tmp_path)
    prompt, texts = [500, 8100, 8191, 501, 8001], []
    for drafter in ("none", f"model:path={tmp_path}"):
        engine = outrider.load(EMBEDDED_TARGET, drafter=drafter, forward=forward, length="fixed:3", max_slots=2)
        [output] = engine.generate([prompt], max_new_tokens=16, sampling=Sampling(temperature=0), ignore_eos=True)
        texts.append(output.tokens)
    assert output.num_draft_tokens > 0
    assert texts[0] == texts[1]


class CountedTable(TabularLM):
    """A table that notes how many tokens each forward reads."""

    def extend(self, segments, taps=()):
        self.read = [*getattr(self, "read", []), sum(len(segment.tokens) for segment in segments)]
        return super().extend(segments, taps)


def test_tokens_that_are_read_late_share_forwards_as_large_as_those_of_prompts(monkeypatch):
    monkeypatch.setattr(budget, "WIDE_CHUNK", 50)
    drafter = ModelDrafter(lm=CountedTable(random_rows(3, seed=1), 3))
    lengths = [BACKLOG - 1, 40, 70, 31]
    states = []
    for i, length in enumerate(lengths):
        request = Request(id=str(i), prompt=(1,) * length, max_new_tokens=4, sampling=Sampling())
        state = Running(request=request, tokens=list(request.prompt), slot=i, drafter=drafter)
        state.drafter_state = drafter.open(request)
        states.append(state)
    guess = drafter.begin(states, [1] * len(states))
    *late, last = drafter.lm.read
    assert late == [50, 50, 38]  # The anchors are left for the draft's own forward, and all of the shortest request.
    assert last == BACKLOG - 1 + 3
    assert [drafter.lm.length(state.drafter_state.slot) for state in states] == lengths
    assert len(guess.logits) == len(states)
