"""CUDA graphs on a card: recorded, replayed, recorded anew, and saying what eager forwards say."""

import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.core.types import InputError, Sampling
from outrider.engine.engine import Engine
from outrider.lm.choice import choose
from outrider.lm.forwards import replayed
from outrider.lm.forwards.recorder import CudaRecorder
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Segment
from tests.lm.test_replayed import drafting, farthest, prompted, said
from tests.world.models import llama

CASTS = True
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICE = torch.device("cuda", 0)


def on_gpu(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """The tiny target."""
    return llama().to(DEVICE, dtype)


def test_a_replay_reads_what_its_inputs_hold_then() -> None:
    given = torch.tensor([1.0, 2.0], device=DEVICE)
    kept = CudaRecorder(DEVICE).record(lambda: [given * 2], [given])
    for numbers in ([5.0, 7.0], [-1.0, 0.5]):
        given.copy_(torch.tensor(numbers))
        kept.replay()
        assert kept.outputs[0].tolist() == [2 * number for number in numbers]


def test_what_waits_for_the_card_cannot_be_recorded_and_later_work_goes_on() -> None:
    given, recorder = torch.ones(1, device=DEVICE), CudaRecorder(DEVICE)
    with pytest.raises(RuntimeError):
        recorder.record(lambda: [given * given.item()], [given])
    assert (given + 1).item() == 2


@pytest.mark.parametrize("reserved", [0.5, 0.0])
def test_replayed_forwards_say_what_eager_ones_say_while_slots_come_and_storage_grows(monkeypatch, reserved) -> None:
    monkeypatch.setattr(replayed, "RESERVED", reserved)
    lms = [LanguageModel(on_gpu(), max_slots=4, forward=forward) for forward in ("eager", "replayed")]
    worst, before = [], lms[1].num_compiled_forwards
    for text in ([3, 1, 4], [1, 5], [9, 2, 6, 5]):
        slots = {prompted(lm, [text])[0] for lm in lms}
        for width in (1, 6):
            batch = [Segment(slot=slot, tokens=torch.arange(width) + slot) for slot in range(max(slots) + 1)]
            worst.append(farthest([lm.extend(batch, (0, 2)) for lm in lms]))
            for lm in lms:
                lm.commit({segment.slot: range(len(segment.tokens)) for segment in batch})
    assert max(worst) < 1e-4
    assert lms[1].num_compiled_forwards - before == 6


def test_a_chain_is_one_graph_and_memory_stays_flat() -> None:
    engine = drafting("model", "replayed", DEVICE)
    assert said(engine, 0.0) == said(drafting("model", "eager", DEVICE), 0.0)
    assert said(engine, 0.8) == said(drafting("model", "eager", DEVICE), 0.8)
    used = torch.cuda.memory_allocated(DEVICE)
    for _ in range(20):
        said(engine, 0.0)
    assert torch.cuda.memory_allocated(DEVICE) <= used + 2**20


def greedy(engine: Engine) -> list[int]:
    """A greedy text."""
    sampling = Sampling(temperature=0)
    [output] = engine.generate([[3, 1, 4, 1, 5]], max_new_tokens=40, sampling=sampling, ignore_eos=True)
    return output.tokens


@pytest.mark.parametrize("drafter", ["eagle", "eagle3", "jakiro", "poss", "dflash"])
def test_drafts_of_replayed_heads_are_accepted_as_those_of_eager_ones(drafter) -> None:
    assert greedy(drafting(drafter, "replayed", DEVICE)) == greedy(drafting(drafter, "eager", DEVICE))


def test_the_probe_times_graphs_and_a_compiler_is_refused(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    found = choose(LanguageModel(on_gpu(torch.bfloat16)), forward=None, pad_to=None)
    assert list(found.milliseconds) == ["eager", "replayed"]
    assert found.pad_to in (1, 2, 8, 16)
    with pytest.raises(InputError, match="forward=compiled is for CPUs"):
        LanguageModel(on_gpu(), forward="compiled")
