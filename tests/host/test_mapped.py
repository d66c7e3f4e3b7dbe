"""Pages of files that are mapped go and come back; what was written in memory stays."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from outrider.host.mapped import release_heap, release_pages

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self")


@pytest.fixture
def mapped(tmp_path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in a mapped file, whose bytes have all been read, and its values."""
    values = torch.arange(1 << 20, dtype=torch.float32)
    save_file({"values": values}, tmp_path / "values.safetensors")
    found = load_file(tmp_path / "values.safetensors")["values"]
    assert torch.equal(found, values)
    return found, values


def resident(tensor: torch.Tensor) -> int:
    """Bytes in memory of the mapping that a tensor lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            begin, end = (int(word, 16) for word in words[0].split("-"))
            inside = begin <= tensor.data_ptr() < end
        elif inside and words[0] == "Rss:":
            return 1024 * int(words[1])
    raise AssertionError("no mapping holds the tensor")


@linux
def test_a_mapped_tensor_takes_no_memory_until_it_is_read_again(mapped):
    tensor, values = mapped
    assert resident(tensor) >= tensor.nbytes
    assert release_pages([tensor]) >= tensor.nbytes
    assert resident(tensor) == 0
    assert torch.equal(tensor, values)


@linux
def test_a_tensor_that_was_changed_in_memory_keeps_its_values(mapped):
    tensor, values = mapped
    tensor[12345] = -1
    assert release_pages([tensor]) == 0
    assert tensor[12345] == -1
    assert torch.equal(tensor[:12345], values[:12345])


@linux
def test_memory_that_no_file_holds_stays():
    tensor = torch.ones(1 << 20)
    assert release_pages([tensor]) == 0
    assert bool((tensor == 1).all())


def test_a_system_that_lists_no_mappings_keeps_all(mapped, tmp_path):
    tensor, _ = mapped
    assert release_pages([tensor], process=tmp_path) == 0


@linux
def test_memory_that_was_freed_between_pieces_in_use_is_given_back():
    pieces = [torch.ones(1 << 13) for _ in range(4000)]
    held = pieces[::100]
    pieces.clear()
    before = anonymous()
    release_heap()
    assert before - anonymous() > 60 << 20
    assert all(bool((piece == 1).all()) for piece in held)


def anonymous() -> int:
    """Bytes of this process's memory that no file holds."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
