"""An engine on a GPU: the same greedy tokens, one wait a step, no compiler, flat memory. Most of it runs on CPUs."""

import copy
import warnings
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch._dynamo.utils import counters

from outrider import catalog
from outrider.assembly import why_not
from outrider.core.types import Sampling, Timing
from outrider.decoding.clock import LateTiming
from outrider.decoding.pearl import PearlDecoding
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.proof.identity import identity
from outrider.refusals import verifiers
from outrider.verifiers.match import MatchVerifier
from tests.world.parts import parts_of
from tests.world.zoo import tiny

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
GREEDY = Sampling(temperature=0.0, seed=0)
PROMPTS = [[5, 9, 4, 30, 9, 4, 11], [8, 3, 21], [7] * 12]
SLOTS = 4


def lms(device: str) -> tuple[LanguageModel, LanguageModel]:
    """The target, and a draft model that often agrees with it."""
    model = tiny("llama").float()
    draft, dice = copy.deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.add_(0.02 * weight.std() * torch.randn(weight.shape, generator=dice))
    target, other = (LanguageModel(each.to(device), max_slots=SLOTS) for each in (model, draft))
    return target, other


shared_lms = cache(lms)


def engine(device: str, **parts: object) -> Engine:
    target, draft = shared_lms(device)
    usual = parts_of(target, ModelDrafter(lm=draft), verifier=MatchVerifier())
    return Engine(replace(usual, **parts), max_slots=SLOTS)


@on_each
@pytest.mark.parametrize("verifier", verifiers())
def test_in_float32_every_verifier_says_what_plain_decoding_says(verifier: str, device: str) -> None:
    seen = set()
    for tree in catalog.rows("tree"):
        made = engine(device, tree=catalog.make("tree", tree), verifier=catalog.make("verifier", verifier))
        branches = made.parts.tree.structure != "chain"
        if branches not in seen and why_not(made.parts) is None:
            seen.add(branches)
            found = identity(made, PROMPTS, 8)
            assert found.num_tokens == 8 * len(PROMPTS)
            assert found.holds, (tree, found.differences)
    assert seen


@on_each
def test_a_cache_that_grows_while_pearl_drafts_keeps_what_it_held(device: str) -> None:
    target, draft = lms(device)
    made = engine(device, target=target, drafter=ModelDrafter(lm=draft), decoding=PearlDecoding())
    # The first storage is for 256 tokens, so both caches grow in a step that runs both models.
    prompts = [[5 + (i * k) % 20 for k in range(240)] for i in range(1, 3)]
    made.generate(prompts, max_new_tokens=1, sampling=GREEDY)
    before = draft.num_bytes
    found = identity(made, prompts, 30)
    assert found.num_tokens == 60
    assert found.holds, found.differences
    assert draft.num_bytes > before


@on_each
def test_memory_is_flat_over_many_requests(device: str) -> None:
    made, seen = engine(device), list[int]()
    # What a CPU holds is counted by the cache itself, so fewer tell as much.
    count = 200 if device == "cuda" else 40
    for number in range(count):
        made.add(PROMPTS[number % len(PROMPTS)], max_new_tokens=3, sampling=GREEDY, ignore_eos=True)
        if (number + 1) % (count // 4) == 0:
            while made.busy:
                made.step()
            made.rest()
            lm = made.parts.target
            seen.append(torch.cuda.memory_allocated() if device == "cuda" else lm.num_bytes)
    assert len(set(seen[1:])) == 1, seen


@on_each
def test_parts_of_steps_are_there_and_no_graph_is_skipped(device: str) -> None:
    before = counters["inductor"]["cudagraph_skips"]
    [output] = engine(device).generate(PROMPTS[:1], max_new_tokens=40, sampling=GREEDY, ignore_eos=True)
    timings = [step.timing for step in output.steps]
    assert {type(timing) for timing in timings} == {LateTiming if device == "cuda" else Timing}
    assert all(timing.target > 0 and timing.drafter > 0 for timing in timings)
    assert counters["inductor"]["cudagraph_skips"] == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_greedy_step_of_a_chain_waits_once() -> None:
    made = engine("cuda")
    for prompt in PROMPTS:
        made.add(prompt, max_new_tokens=60, sampling=GREEDY, ignore_eos=True)
    for _ in range(4):
        made.step()
    counted = []
    for _ in range(4):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                made.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        counted.append(sum("synchronizing CUDA operation" in str(each.message) for each in told))
    assert counted == [1] * 4
