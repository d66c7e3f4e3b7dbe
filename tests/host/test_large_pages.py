"""Memory in large pages: tensors apart from each other, freed with the last of a region, plain where there is none."""

import gc
import mmap
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.host import large_pages


def noted(regions: list["weakref.ref[mmap.mmap]"], region: mmap.mmap) -> mmap.mmap:
    regions.append(weakref.ref(region))
    return region


def test_tensors_of_a_region_lie_apart_and_begin_at_lines():
    tensors = [large_pages.empty(rows, 70_001) for rows in (1, 3, 2)]
    for i, tensor in enumerate(tensors):
        tensor.fill_(i)
        assert tensor.data_ptr() % large_pages.LINE == 0
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_a_tensor_may_be_larger_than_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "REGION", 1 << 20)
    large = large_pages.empty(3, 1 << 20)
    large.fill_(7)
    assert int(large.sum(dtype=torch.int64)) == 7 * large.numel()


def test_a_region_is_freed_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_pages, "_newest", None)
    first, second = large_pages.empty(1, 1 << 20), large_pages.empty(1, 1 << 20)
    region = large_pages._newest
    assert isinstance(region, weakref.ref)
    del first
    gc.collect()
    assert region() is not None
    second.fill_(1)
    del second
    gc.collect()
    assert region() is None


@pytest.mark.parametrize(("size", "large"), [((2, 1024, 1024), True), ((2, 1024, 255), False), ((0, 7), False)])
def test_zeros_that_fill_a_large_page_have_memory_of_their_own_which_goes_with_them(
    monkeypatch: pytest.MonkeyPatch, size: Sequence[int], large: bool
) -> None:
    regions = []
    monkeypatch.setattr(large_pages, "_region", lambda count, make=large_pages._region: noted(regions, make(count)))
    tensor = large_pages.zeros(size, torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == (size, torch.bfloat16)
    assert not tensor.any()
    assert len(regions) == large
    assert not large or tensor.data_ptr() % large_pages.LARGE == 0
    tensor.fill_(3)
    del tensor
    gc.collect()
    assert not any(region() for region in regions)


@pytest.mark.parametrize("missing", ["memory", "advice"])
def test_where_the_system_has_none_memory_is_plain(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def fails(*arguments: object, **named: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(large_pages, "_newest", None)
    if missing == "memory":
        monkeypatch.setattr(mmap, "mmap", fails)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert large_pages.empty(2, 1 << 20).fill_(3).shape == (2, 1 << 20)
    assert large_pages.zeros((2, 1 << 20), torch.float32).fill_(3).shape == (2, 1 << 20)


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="the system knows no large pages")
def test_the_system_is_asked_for_large_pages():
    tensor = large_pages.empty(16, 1 << 20).fill_(1)
    place = tensor.data_ptr()
    flags = ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(maxsplit=1)[0]
        if "-" in first and ":" not in first:
            begin, end = (int(each, 16) for each in first.split("-"))
            inside = begin <= place < end
        elif inside and first == "VmFlags:":
            flags = line
    assert " hg" in flags
