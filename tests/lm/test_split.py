"""Batches of very different lengths run as two forwards where that reads fewer keys, and say the same."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider.lm.forwards.forward import Forward
from outrider.lm.forwards.recorder import RECORDERS
from outrider.lm.model import LanguageModel
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots import split
from outrider.lm.slots.buckets import WIDTHS, bucket_rows
from outrider.lm.slots.split import ForwardPrice, rows_apart
from tests.world.counting import CountingModel, texts, whole
from tests.world.models import llama
from tests.world.recorder import CheckedRecorder
from tests.world.zoo import VOCAB

CONTEXT = 2048


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.integers(0, 60), st.booleans())
def test_the_parting_reads_least_and_pays(views: list[int], price: int, replayed: bool) -> None:
    views = sorted(views, reverse=True)
    rows = bucket_rows if replayed else int
    count = len(views)

    def read(apart: int) -> int:
        behind = rows(count) if replayed else count - apart
        return rows(apart) * views[0] + behind * views[apart] if apart else rows(count) * views[0]

    apart = rows_apart(views, price, replayed=replayed)
    least = min(map(read, range(count)))
    if apart:
        assert read(apart) == least < read(0) - price
    else:
        assert read(0) - least <= price


def test_thirty_one_short_requests_do_not_read_what_one_of_32k_reads() -> None:
    views = [32768, *[1024] * 31]
    llama_8b = ForwardPrice(weights=16 * 10**9, num_layers=32, position=131072, device=torch.device("cuda"))
    assert rows_apart(views, llama_8b.keys(replayed=True), replayed=True) == 1
    assert rows_apart(views, llama_8b.keys(replayed=False)) == 1
    # A few thousand keys are read sooner than the weights.
    assert rows_apart([4096, *[1024] * 7], llama_8b.keys(replayed=True), replayed=True) == 0


def extended(lm: LanguageModel, branching: bool) -> list[Extension]:
    """The results of a few forwards over slots of very different lengths, in an order that is not theirs."""
    prompts = texts([30, 900, 20, 25, 1000, 28])
    slots = [lm.open() for _ in prompts]
    for slot, prompt in zip(slots, prompts, strict=True):
        lm.extend([Segment(slot=slot, tokens=torch.tensor(prompt), logits="none")])
        lm.commit({slot: range(len(prompt))})
    parents = np.array([-1, 0, 0, 1]) if branching else None
    found = []
    for i in range(3):
        tokens = torch.tensor([7, 8, 9, 10 + i])
        segments = [
            Segment(slot=slots[k], tokens=tokens[: 4 if branching else 2 + k % 3], parents=parents)
            for k in (5, 4, 0, 1, 3)
        ]
        segments[2] = Segment(slot=slots[0], tokens=torch.tensor([5, 6, 11]), logits=1)
        found.append(lm.extend(segments, (0, 2)))
        lm.commit({segment.slot: [0, 1] if i else [0] for segment in segments})
    return found


@pytest.mark.parametrize("branching", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize("forward", ["eager", "replayed"])
def test_results_come_in_the_order_of_the_segments(
    branching: bool, forward: Forward, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", CheckedRecorder)
    monkeypatch.setitem(split.LAUNCH, "cpu", 0)
    apart = CountingModel(llama(context=CONTEXT), max_slots=6, forward=forward)
    together = whole(CountingModel(llama(context=CONTEXT), max_slots=6, forward=forward))
    for one, other in zip(extended(apart, branching), extended(together, branching), strict=True):
        assert torch.allclose(one.logits, other.logits, atol=1e-10)
        assert all(torch.allclose(one.taps[k], other.taps[k], atol=1e-10) for k in (0, 2))
    assert apart.num_forwards == together.num_forwards + 3
    assert apart.num_keys < together.num_keys


def test_replayed_forwards_stay_among_the_recorded_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECORDERS, "cpu", CheckedRecorder)
    monkeypatch.setitem(split.LAUNCH, "cpu", 0)
    lm = CountingModel(llama(context=CONTEXT), max_slots=8, forward="replayed")
    extended(lm, branching=False)
    assert {view for _, _, view in lm.shapes} == {256, 1024}
    assert all(bucket_rows(rows) == rows and width in WIDTHS for rows, width, _ in lm.shapes), lm.shapes


def test_rows_move_once_and_then_lie_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(split.LAUNCH, "cpu", 0)
    lm = LanguageModel(llama(context=CONTEXT), max_slots=4)
    slots = [lm.open() for _ in range(4)]
    lm.extend([Segment(slot=slots[2], tokens=torch.arange(1200) % VOCAB, logits="none")])
    lm.commit({slots[2]: range(1200)})
    moved = []
    for _ in range(3):
        lm.extend([Segment(slot=slot, tokens=torch.tensor([5])) for slot in slots])
        lm.commit({slot: [0] for slot in slots})
        moved.append(lm.bytes_moved)
    assert 0 < moved[0] == moved[1] == moved[2]
    assert lm.cache.row(slots[2]) == 0
