"""One budget for all caches of a GPU."""

from weakref import WeakKeyDictionary

import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.model import LanguageModel
from outrider.lm.slots import budget
from outrider.lm.slots.budget import activation_bytes, available_bytes, promise
from outrider.lm.slots.cache import Layer, StateShape, worst_bytes
from outrider.lm.slots.slots import BRANCHES, Slots
from tests.world.card import DEVICE, MEMORY, gpu
from tests.world.zoo import tiny

LAYERS = {
    0: Layer(
        keys=StateShape(heads=64, dim=128, dtype=torch.bfloat16),
        values=StateShape(heads=64, dim=128, dtype=torch.bfloat16),
    )
}


@pytest.fixture(autouse=True)
def nothing_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that other tests left alive have no share of the memory."""
    monkeypatch.setattr(budget, "_PROMISED", WeakKeyDictionary())


def fitted(max_context: int | None = None, device: torch.device = DEVICE) -> Slots:
    return Slots.fitting(LAYERS, max_slots=8, max_context=max_context, limit=None, device=device, num_rows=1)


def test_two_caches_of_a_gpu_together_need_no_more_than_is_free() -> None:
    with gpu():
        target, drafter = fitted(), fitted()
        worst = [worst_bytes(LAYERS, 8, slots.max_context + BRANCHES) for slots in (target, drafter)]
    assert drafter.max_context < target.max_context
    assert sum(worst) <= MEMORY


def test_a_cache_that_would_not_fit_beside_another_is_refused_before_it_starts() -> None:
    with gpu():
        target = fitted()
        with pytest.raises(InputError, match="lower max_slots or max_context"):
            fitted(max_context=target.max_context)


def test_what_forwards_need_is_no_room_for_caches_and_counts_once_because_models_take_turns() -> None:
    need = activation_bytes(DEVICE, hidden_size=4096, vocab_size=128256, dtype=torch.bfloat16, max_slots=32)
    # Logits of 32 requests with 33 nodes each, in bfloat16 and five times in float32, and a chunk of 2,048 tokens.
    assert need == 32 * 33 * 128256 * 22 + 2048 * 4096 * 16 * 2
    with gpu():
        assert available_bytes(DEVICE, need) == MEMORY - need
        cache = fitted().cache
        promise(cache, {DEVICE: 1.0}, cache.num_bytes + 10**9, need)
        assert available_bytes(DEVICE) == available_bytes(DEVICE, need // 2) == MEMORY - 10**9 - need
        assert available_bytes(DEVICE, 2 * need) == MEMORY - 10**9 - 2 * need
    assert available_bytes(torch.device("cpu"), 10**18) != 0


def test_models_on_a_gpu_leave_room_for_their_forwards() -> None:
    with gpu():
        before = available_bytes(DEVICE)
        lm = LanguageModel(tiny("llama").to(DEVICE), max_slots=4)
        assert before - available_bytes(DEVICE) > activation_bytes(
            DEVICE, hidden_size=lm.hidden_size, vocab_size=lm.vocab_size, dtype=lm.dtype, max_slots=4
        )


def test_a_cache_that_is_gone_needs_nothing() -> None:
    with gpu():
        before = available_bytes(DEVICE)
        slots = fitted()
        assert available_bytes(DEVICE) < before
        del slots
        assert available_bytes(DEVICE) == before


def test_on_a_cpu_what_is_free_now_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.lm.slots.budget.free_bytes", lambda device: 10**12)
    slots = fitted(device=torch.device("cpu"), max_context=100)
    assert slots.cache.num_bytes > 0
    assert available_bytes(torch.device("cpu")) == 10**12
