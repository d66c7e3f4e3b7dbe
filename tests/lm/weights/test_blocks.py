"""Panels hold what a file holds: unpacked, they are the numbers that gguf reads."""

import gguf
import numpy as np
import pytest
import torch

from outrider.lm.weights.blocks import KINDS, BlockWeight
from outrider.lm.weights.panels import fill

CASTS = True
KIND_NAMES = pytest.mark.parametrize("kind", KINDS)


def file_bytes(kind: str, rows: int, features: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a file, with scales that are numbers of an ordinary size."""
    layout = KINDS[kind]
    random = np.random.default_rng(seed)
    blocks = random.integers(0, 256, (rows, features // layout.weights, layout.size), dtype=np.uint8)
    scales = random.uniform(-0.02, 0.02, (*blocks.shape[:2], max(1, layout.halves))).astype(np.float16).view(np.uint8)
    if kind == "BF16":
        plain = torch.from_numpy(random.normal(size=(rows, features))).to(torch.bfloat16)
        return plain.view(torch.uint8).numpy().reshape(rows, -1)
    if kind == "Q6_K":
        blocks[..., -2:] = scales
    else:
        blocks[..., : 2 * layout.halves] = scales
    return blocks.reshape(rows, -1)


def read_by_gguf(kind: str, blocks: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])).float()


@KIND_NAMES
@pytest.mark.parametrize("rows", [1, 16, 37, 2050])
def test_weights_are_those_that_gguf_reads(kind: str, rows: int) -> None:
    features = 2 * KINDS[kind].weights if rows > 100 else 3 * 256
    blocks = file_bytes(kind, rows, features)
    weight = BlockWeight.of_gguf(blocks, kind)
    assert (weight.out_features, weight.in_features) == (rows, features)
    assert torch.equal(weight.dequantised(torch.float32), read_by_gguf(kind, blocks))


@KIND_NAMES
def test_some_rows_are_rows_of_all(kind: str) -> None:
    weight = BlockWeight.of_gguf(file_bytes(kind, 40, 512), kind)
    rows = torch.tensor([39, 0, 17, 17, 16])
    assert torch.equal(weight.dequantised(torch.bfloat16, rows), weight.dequantised(torch.bfloat16)[rows])


@KIND_NAMES
def test_rows_that_are_taken_out_keep_their_blocks(kind: str) -> None:
    blocks = file_bytes(kind, 40, 512)
    # More rows than are moved at once, some of them twice.
    rows = torch.randint(40, (1050,), generator=torch.Generator().manual_seed(1))
    for some in (rows, rows[:16], rows[:1]):
        cut, wanted = BlockWeight.of_gguf(blocks, kind).cut(some), BlockWeight.of_gguf(blocks[some.numpy()], kind)
        assert (cut.kind, cut.out_features, cut.in_features) == (kind, len(some), 512)
        assert torch.equal(cut.data, wanted.data)


@KIND_NAMES
@pytest.mark.parametrize("rows", [16, 37])
@pytest.mark.parametrize("moved", [False, True])
def test_panels_in_c_are_those_of_torch(kind: str, rows: int, moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = file_bytes(kind, rows, 768, seed=3)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)) if moved else None
    layout = KINDS[kind]
    filled = torch.empty(-(-rows // 16), 768 // layout.weights * layout.chunk, dtype=torch.uint8)
    if not fill(filled, torch.from_numpy(blocks), layout.number, 768 // layout.weights, order):
        pytest.skip("no C++ compiler is here")
    assert torch.equal(filled, BlockWeight.of_gguf(blocks, kind, order).data)
    monkeypatch.setattr("outrider.lm.weights.blocks.fill", lambda *given: False)
    assert torch.equal(filled, BlockWeight.of_gguf(blocks, kind, order).data)


@KIND_NAMES
def test_rows_are_moved_without_a_change_of_their_weights(kind: str) -> None:
    blocks = file_bytes(kind, 40, 256)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    moved = BlockWeight.of_gguf(blocks, kind, order)
    assert torch.equal(moved.dequantised(torch.float32), read_by_gguf(kind, blocks)[order])


@KIND_NAMES
def test_panels_take_about_the_bytes_of_the_file(kind: str) -> None:
    blocks = file_bytes(kind, 48, 512)
    assert blocks.nbytes <= BlockWeight.of_gguf(blocks, kind).data.nbytes <= 1.03 * blocks.nbytes
