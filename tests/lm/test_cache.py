"""The slot cache: what fits in memory, where slots lie, what is copied."""

import numpy as np
import pytest
import torch

from outrider.core.types import InputError
from outrider.lm.model import LanguageModel
from outrider.lm.slots.cache import Layer, SlotCache, StateShape, fitting_context, free_bytes, worst_bytes
from tests.world.zoo import tiny

LAYERS = {
    0: Layer(
        keys=StateShape(heads=2, dim=3, dtype=torch.float32), values=StateShape(heads=2, dim=5, dtype=torch.float32)
    ),
    2: Layer(
        keys=StateShape(heads=2, dim=3, dtype=torch.float32), values=StateShape(heads=2, dim=3, dtype=torch.float32)
    ),
}


def slot_cache(max_slots: int = 4, max_context: int = 600) -> SlotCache:
    return SlotCache(LAYERS, max_slots=max_slots, max_context=max_context, device=torch.device("cpu"))


def write(cache: SlotCache, used: dict[int, int], counts: list[int], width: int) -> list[torch.Tensor]:
    """Write numbers that name slot and position; returns what attention would read of the first layer's keys."""
    slots = list(used)
    places = cache.places(slots, list(used.values()), np.array(counts), width)
    view = cache.view(max(used.values()))
    window = cache.window(slots, torch.from_numpy(places), view)
    columns = torch.arange(width, dtype=torch.float32)
    rows = [100 * s + (used[s] - n) + columns for s, n in zip(slots, counts, strict=True)]
    keys = torch.stack(rows)[:, None, :, None].expand(-1, 2, -1, 3)
    values = keys[..., :1].expand(-1, -1, -1, 5)
    read, other = window.update(keys, values, 0)
    assert torch.equal(read[..., 0], other[..., 0])
    assert read.shape[2] == view
    return list(read[:, 0, :, 0])


def test_the_shapes_of_keys_and_values_may_differ_and_each_layer_has_tensors_of_its_own() -> None:
    cache = slot_cache()
    assert sorted(tuple(s.shape) for s in cache.storages) == [(1, 256, 2, 3)] * 3 + [(1, 256, 2, 5)]
    assert cache.num_bytes == 256 * 4 * 2 * (3 * 3 + 5)


def test_slots_keep_their_content_while_rows_move_and_storage_grows() -> None:
    cache = slot_cache()
    for slot in range(4):
        cache.open(slot)
    write(cache, {0: 3, 1: 5, 2: 2, 3: 4}, [3, 5, 2, 4], 6)
    cache.close(1)
    assert [cache.row(s) for s in (0, 3, 2)] == [0, 1, 2]
    assert cache.bytes_moved == 4 * 4 * 2 * (3 * 3 + 5)
    write(cache, {0: 500}, [1], 1)
    read = write(cache, {0: 501, 3: 5, 2: 3}, [1, 1, 1], 1)
    assert read[0][:3].tolist() == [0, 1, 2]
    assert read[0][499:501].tolist() == [499, 500]
    assert read[1][:5].tolist() == [300, 301, 302, 303, 304]
    assert read[2][:3].tolist() == [200, 201, 202]
    assert write(cache, {0: 502, 2: 4}, [1, 1], 1)[1][:4].tolist() == [200, 201, 202, 203]


def test_rows_that_are_neighbours_are_read_without_a_copy() -> None:
    cache = slot_cache()
    for slot in range(4):
        cache.open(slot)
    write(cache, dict.fromkeys(range(4), 1), [1, 1, 1, 1], 1)
    pointer = cache.storages[0].data_ptr()
    size = cache.storages[0].nbytes
    together = write(cache, {1: 2, 2: 2}, [1, 1], 1)[0].data_ptr()
    apart = write(cache, {1: 3, 3: 2}, [1, 1], 1)[0].data_ptr()
    assert pointer <= together < pointer + size
    assert not pointer <= apart < pointer + size


def test_moves_of_several_slots_are_made_at_once_and_counted() -> None:
    cache = slot_cache()
    cache.open(0)
    cache.open(1)
    write(cache, {0: 6, 1: 6}, [6, 6], 6)
    cache.move({0: (np.array([3, 5]), np.array([1, 2])), 1: (np.array([4]), np.array([3]))})
    read = write(cache, {0: 7, 1: 7}, [1, 1], 1)
    assert read[0][:4].tolist() == [0, 3, 5, 3]
    assert read[1][:5].tolist() == [100, 101, 102, 104, 104]
    assert cache.bytes_moved == 3 * 4 * 2 * (3 * 3 + 5)


def test_storage_stays_within_the_worst_case() -> None:
    cache = slot_cache(max_slots=3, max_context=600)
    for slot in range(3):
        cache.open(slot)
        write(cache, {slot: 600}, [1], 2)
    assert cache.num_bytes <= worst_bytes(LAYERS, 3, 600)


def test_a_context_that_does_not_fit_is_refused_with_the_numbers() -> None:
    free = 10**6
    with pytest.raises(InputError, match=r"8 slots of 4096 tokens.*0\.00 GB free.*lower max_slots or max_context"):
        fitting_context(LAYERS, max_slots=8, max_context=4096, limit=8192, free=free)
    fits = fitting_context(LAYERS, max_slots=8, max_context=None, limit=8192, free=free)
    assert worst_bytes(LAYERS, 8, fits) <= 0.8 * free < worst_bytes(LAYERS, 8, fits + 64)
    assert fitting_context(LAYERS, max_slots=8, max_context=None, limit=100, free=10**9) == 100
    assert fitting_context(LAYERS, max_slots=8, max_context=77, limit=None, free=None) == 77
    with pytest.raises(InputError, match="lower max_slots"):
        fitting_context(LAYERS, max_slots=8, max_context=None, limit=8192, free=100)
    assert fitting_context(LAYERS, max_slots=8, max_context=None, limit=None, free=free) == fits


def test_a_model_refuses_more_slots_than_memory_holds() -> None:
    assert (free_bytes(torch.device("cpu")) or 1) > 0
    with pytest.raises(InputError, match="lower max_slots or max_context"):
        LanguageModel(tiny("llama"), max_slots=10**9, max_context=384)


def opened(count: int, max_slots: int = 16) -> SlotCache:
    """A cache with this many slots of one position, whose keys name their slots."""
    cache = slot_cache(max_slots=max_slots, max_context=100)
    for slot in range(count):
        cache.open(slot)
    write(cache, dict.fromkeys(range(count), 1), [1] * count, 1)
    return cache


def test_slots_move_to_the_front_only_if_more_than_half_of_the_rows_would_be_idle() -> None:
    cache = opened(8)
    for slots, rows in (([3], [0]), ([1], [1]), ([4, 1, 7], [4, 1, 7]), ([7, 1], [0, 1])):
        moved, before = cache.bytes_moved, [cache.row(slot) for slot in slots]
        cache.gather_in_front(slots)
        assert [cache.row(slot) for slot in slots] == rows
        assert (cache.bytes_moved > moved) == (before != rows)
    assert sorted(cache.row(slot) for slot in range(8)) == list(range(8))
    assert [float(cache.keys_values(slot, 0, 1)[0][0, 0, 0]) for slot in range(8)] == [100 * n for n in range(8)]


def test_a_replayed_forward_has_a_power_of_two_rows_and_never_more_than_there_are() -> None:
    cache = opened(5, max_slots=6)
    assert cache.num_rows == 6
    assert [cache.bucket([row]) for row in range(5)] == [1, 2, 4, 4, 6]


def test_all_storage_is_taken_at_once_if_that_is_a_small_share_of_free_memory() -> None:
    cache = slot_cache()
    cache.reserve_all(0.0)
    assert (cache.num_rows, cache.generation) == (1, 1)
    cache.open(0)
    write(cache, {0: 5}, [5], 5)
    cache.reserve_all(0.5)
    assert (cache.num_rows, cache.capacity, cache.generation) == (4, 640, 2)
    cache.reserve_all(0.5)
    assert write(cache, {0: 600}, [1], 1)[0][:5].tolist() == [0, 1, 2, 3, 4]
    assert cache.generation == 2


def test_a_long_prompt_gets_an_eighth_more_than_it_needs_and_what_follows_doubles() -> None:
    cache = SlotCache(LAYERS, max_slots=1, max_context=10_000, device=torch.device("cpu"))
    cache.open(0)
    found = []
    for used in (200, 256, 300, 1024, 1215, 1216, 5000, 9999):
        write(cache, {0: used}, [1], 1)
        found.append((used, cache.capacity))
    assert found == [
        (200, 256),
        (256, 512),
        (300, 512),
        (1024, 1216),
        (1215, 1216),
        (1216, 2432),
        (5000, 5632),
        (9999, 10_048),
    ]


def test_rows_and_places_change_with_need_where_memory_is_short_and_contents_stay() -> None:
    position = 4 * 2 * (3 * 3 + 5)
    cache = SlotCache(LAYERS, max_slots=4, max_context=2000, device=torch.device("cpu"), most_bytes=position * 64 * 40)
    cache.open(0)
    write(cache, {0: 1500}, [1], 1)
    write(cache, {0: 1501}, [1], 1)
    assert (cache.num_rows, cache.capacity) == (1, 1728)
    assert cache.holds(1, 2000)
    assert cache.holds(2, 1279)
    assert not cache.holds(2, 1280)
    cache.shorten(0, 10)
    for slot in range(1, 4):
        cache.open(slot)
    write(cache, dict.fromkeys(range(4), 20), [20] * 4, 20)
    assert (cache.num_rows, cache.capacity) == (4, 640)
    for slot in range(1, 3):
        cache.close(slot)
    read = write(cache, {0: 1100, 3: 21}, [1, 1], 1)
    assert (cache.num_rows, cache.capacity) == (2, 1280)
    assert [row[:20].tolist() for row in read] == [[*range(20)], [*range(300, 320)]]
    with pytest.raises(RuntimeError, match="2 slots of 1300 tokens do not fit"):
        write(cache, {0: 1300}, [1], 1)
    assert cache.num_bytes <= position * 64 * 40


def test_padding_is_the_last_place_of_each_row() -> None:
    cache = opened(4)
    places = cache.places([1, 3], [2, 3], np.array([1, 2]), 3)
    assert places[:, -1].tolist() == cache.padding(4)[[1, 3]].tolist()
