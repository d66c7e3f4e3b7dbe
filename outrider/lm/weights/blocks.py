"""Matrices of packed weights: the blocks of a GGUF file, laid out as the kernels read them.

A weight is a small whole number, its code, times a scale, plus an offset for some kinds; 16 or 32 neighbours in a row
share scale and offset. Sixteen rows of the matrix make a panel. A panel holds, block by block along the rows, first
the scales of the sixteen rows as the file has them and then their codes, so that a product reads one stream of bytes.

Codes in a panel, for each group of 32 weights of a row:

- four bits: four vectors of 64 bytes. The code of row `c` at `8 q + 2 j + p` is in byte `16 (c // 4) + 8 (j // 2) +
  2 (c % 4) + p` of vector `q`, in the lower four bits for even `j`, otherwise in the upper four;
- a fifth bit: 64 bytes behind them; the same byte has the bit of `q` and `j` at position `2 q + j % 2`;
- a fifth and a sixth bit: 128 bytes, 64 for each half of the group, likewise at position `4 (q % 2) + 2 (j % 2)`;
- eight bits and bfloat16: for each pair of weights, those of row 0, those of row 1, and so on.

The formats of the file: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn import functional as F

from outrider.host import large_pages
from outrider.lm.weights.panels import fill

PANEL = 16
"""Rows of a matrix that lie together."""
GROUP = 32
"""Weights of a row whose codes lie together."""
SLICE = 1024
"""Rows that are laid out or unpacked at once."""


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """One of the formats of blocks in a file.

    Attributes:
        name: As GGUF names it.
        number: As GGUF numbers it.
        weights: Weights of a block.
        size: Bytes of a block in a file.
        header: Bytes of a block's scales in a panel, of one row.
        halves: Scales of 16 bits among them.
        bits: Bits of a code.
        zero: The code of zero.
    """

    name: str
    number: int
    weights: int
    size: int
    header: int
    halves: int
    bits: int
    zero: int = 0

    @property
    def chunk(self) -> int:
        """Bytes of a block of sixteen rows in a panel."""
        return PANEL * (self.header + self.weights * self.bits // 8)


KINDS = {
    kind.name: kind
    for kind in (
        BlockKind(name="Q4_0", number=2, weights=32, size=18, header=2, halves=1, bits=4, zero=8),
        BlockKind(name="Q4_1", number=3, weights=32, size=20, header=4, halves=2, bits=4),
        BlockKind(name="Q5_0", number=6, weights=32, size=22, header=2, halves=1, bits=5, zero=16),
        BlockKind(name="Q5_1", number=7, weights=32, size=24, header=4, halves=2, bits=5),
        BlockKind(name="Q8_0", number=8, weights=32, size=34, header=2, halves=1, bits=8),
        BlockKind(name="Q4_K", number=12, weights=256, size=144, header=20, halves=2, bits=4),
        BlockKind(name="Q5_K", number=13, weights=256, size=176, header=20, halves=2, bits=5),
        BlockKind(name="Q6_K", number=14, weights=256, size=210, header=18, halves=1, bits=6, zero=32),
        BlockKind(name="BF16", number=30, weights=32, size=64, header=0, halves=0, bits=16),
    )
}
"""The formats that can stay packed, by their names."""
NAMES = {kind.number: kind.name for kind in KINDS.values()}


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockWeight:
    """A matrix of packed weights.

    Attributes:
        kind: The format of its blocks, a name in `KINDS`.
        out_features: Its rows.
        in_features: Its columns.
        data: Its panels. The last one is filled up with rows of zeros.
    """

    kind: str
    out_features: int
    in_features: int
    data: UInt8[Tensor, "panels bytes"]

    @classmethod
    def of_gguf(
        cls,
        blocks: UInt8[np.ndarray, "rows bytes"] | UInt8[Tensor, "rows bytes"],
        kind: str,
        order: Int[Tensor, " rows"] | None = None,
    ) -> "BlockWeight":
        """A matrix from the bytes of a file.

        Args:
            blocks: The bytes of each row.
            kind: The format of the blocks, a name in `KINDS`.
            order: Which row of the file each row of the matrix is; None means the order of the file.

        Example:
            >>> import numpy as np
            >>> weight = BlockWeight.of_gguf(np.zeros((3, 18), dtype=np.uint8), "Q4_0")
            >>> weight.out_features, weight.in_features, weight.dequantised(torch.float32).abs().max().item()
            (3, 32, 0.0)
        """
        layout = KINDS[kind]
        given = torch.from_numpy(blocks) if isinstance(blocks, np.ndarray) else blocks
        rows, size = given.shape
        num_blocks = size // layout.size
        data = large_pages.empty(-(-rows // PANEL), num_blocks * layout.chunk)
        if not fill(data, given, layout.number, num_blocks, order):
            _fill(data, given, layout, num_blocks, order)
        return cls(kind=kind, out_features=rows, in_features=num_blocks * layout.weights, data=data)

    @property
    def number(self) -> int:
        """The format of its blocks as the kernels know it."""
        return KINDS[self.kind].number

    def dequantised(
        self, dtype: torch.dtype, rows: Int[Tensor, " rows"] | None = None
    ) -> Float[Tensor, "rows in_features"]:
        """Its weights as plain numbers, computed in float32 as `gguf` does, then rounded.

        Args:
            dtype: Of the result.
            rows: Which rows; None means all.
        """
        if rows is not None:
            layout = KINDS[self.kind]
            chunks = self.data[rows // PANEL].unflatten(1, (-1, layout.chunk))
            return _dequantised(layout, chunks, rows % PANEL).to(dtype)
        weights = torch.empty(self.out_features, self.in_features, dtype=dtype, device=self.data.device)
        for first, part in self.slices():
            weights[first : first + len(part)] = part
        return weights

    def cut(self, rows: Int[Tensor, " rows"]) -> "BlockWeight":
        """The matrix of some of its rows, in this order. Their blocks stay what they are."""
        data = self.data.new_empty(-(-len(rows) // PANEL), self.data.shape[1])
        for first in range(0, len(rows), SLICE):
            panels = _taken(KINDS[self.kind], self.data, rows[first : first + SLICE])
            data[first // PANEL : first // PANEL + len(panels)] = panels
        return BlockWeight(kind=self.kind, out_features=len(rows), in_features=self.in_features, data=data)

    def slices(self) -> Iterator[tuple[int, Float[Tensor, "rows in_features"]]]:
        """Its weights in float32, some rows at a time, each time with the number of the first row."""
        layout = KINDS[self.kind]
        for first in range(0, self.out_features, SLICE):
            panels = self.data[first // PANEL : (first + SLICE) // PANEL]
            part = _dequantised(layout, panels.unflatten(1, (-1, layout.chunk)), None)
            yield first, part[: self.out_features - first]


def _fill(
    data: UInt8[Tensor, "panels panel_bytes"],
    blocks: UInt8[Tensor, "file_rows row_bytes"],
    kind: BlockKind,
    num_blocks: int,
    order: Int[Tensor, " rows"] | None,
) -> None:
    """What `fill` does, by torch."""
    for first in range(0, len(blocks), SLICE):
        part = blocks[first : first + SLICE] if order is None else blocks[order[first : first + SLICE]]
        part = F.pad(part, (0, 0, 0, -len(part) % PANEL))
        panels = _panels(kind, part.reshape(len(part), num_blocks, kind.size))
        data[first // PANEL : first // PANEL + len(panels)] = panels


def _panels(kind: BlockKind, blocks: UInt8[Tensor, "rows blocks size"]) -> UInt8[Tensor, "panels bytes"]:
    """Rows of blocks as panels; their number is a multiple of sixteen."""
    parts = _parts(kind, blocks)
    halves = parts.halves.unflatten(0, (-1, PANEL)).permute(0, 2, 3, 1, 4)
    small = parts.small.unflatten(0, (-1, PANEL)).permute(0, 2, 3, 1)
    codes = _packed(kind, parts.codes.unflatten(0, (-1, PANEL)))
    return torch.cat([halves.flatten(2), small.flatten(2), codes], dim=2).flatten(1)


def _taken(
    kind: BlockKind, data: UInt8[Tensor, "panels panel_bytes"], rows: Int[Tensor, " rows"]
) -> UInt8[Tensor, "panels_of_rows panel_bytes"]:
    """The panels of some rows, the last one filled up with zeros."""
    chunks = data[rows // PANEL].unflatten(1, (-1, kind.chunk))
    each, taken = torch.arange(len(rows), device=data.device), list[Tensor]()
    # So many rows have so many times, in turn, so many bytes; then come the next rows.
    codes = (4, 2, 2) if kind.bits < 8 else (PANEL, 1, kind.bits // 4)
    for part, turn in zip(_split(kind, chunks), ((PANEL, 1, 2), (PANEL, 1, 1), codes), strict=True):
        together, times, width = turn
        turns = part.reshape(*part.shape[:2], -1, PANEL // together, times, together, width)
        own = turns[each, :, :, rows % PANEL // together, :, rows % together]
        own = F.pad(own, (0, 0, 0, 0, 0, 0, 0, 0, 0, -len(rows) % PANEL))
        ordered = own.unflatten(0, (-1, PANEL // together, together)).permute(0, 3, 4, 1, 5, 2, 6)
        taken.append(ordered.flatten(2))
    return torch.cat(taken, dim=2).flatten(1)


def _split(kind: BlockKind, chunks: UInt8[Tensor, "panels blocks chunk"]) -> tuple[Tensor, ...]:
    """Scales of 16 bits, other scales, and codes of the blocks of panels."""
    halves, header = PANEL * 2 * kind.halves, PANEL * kind.header
    return chunks.split([halves, header - halves, kind.chunk - header], dim=2)


def _dequantised(
    kind: BlockKind, chunks: UInt8[Tensor, "panels blocks chunk"], columns: Int[Tensor, " panels"] | None
) -> Float[Tensor, "rows in_features"]:
    """All rows of some panels, or one row of each, in float32."""
    num_panels, num_blocks, _ = chunks.shape
    halves, small, codes = _split(kind, chunks)
    parts = _Parts(
        halves=halves.reshape(num_panels, num_blocks, -1, PANEL, 2).permute(0, 3, 1, 2, 4),
        small=small.reshape(num_panels, num_blocks, -1, PANEL).permute(0, 3, 1, 2),
        codes=_unpacked(kind, codes),
    )
    if columns is None:
        return _weights(kind, parts.map(lambda part: part.flatten(0, 1))).flatten(1)
    each = torch.arange(num_panels, device=chunks.device)
    return _weights(kind, parts.map(lambda part: part[each, columns])).flatten(1)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Blocks of rows, taken apart.

    Attributes:
        halves: The bytes of scales of 16 bits: of all weights of a block, then, if there are two, of offsets.
        small: Scales of 6 or 8 bits; of six bits, each is followed by that of the offset.
        codes: One byte each; of bfloat16 two.
    """

    halves: UInt8[Tensor, "*rows blocks halves 2"]
    small: UInt8[Tensor, "*rows blocks small"]
    codes: UInt8[Tensor, "*rows blocks codes"]

    def map(self, function: Callable[[Tensor], Tensor]) -> "_Parts":
        """A function of each part."""
        return _Parts(halves=function(self.halves), small=function(self.small), codes=function(self.codes))


def _parts(kind: BlockKind, blocks: UInt8[Tensor, "rows blocks size"]) -> _Parts:
    """What lies in blocks of a file."""
    rows, num_blocks, _ = blocks.shape
    halves, small, codes = blocks[..., : 2 * kind.halves], blocks[..., :0], blocks[..., 2 * kind.halves :]
    match kind.name:
        case "Q4_0" | "Q4_1":
            codes = _nibbles(codes)
        case "Q5_0" | "Q5_1":
            fifth, low = codes.split([4, 16], dim=-1)
            codes = _nibbles(low) | _bits(fifth, 8).transpose(-1, -2).reshape(rows, num_blocks, -1) << 4
        case "Q4_K" | "Q5_K":
            small, codes = codes[..., :12], codes[..., 12:]
            scale, offset, last = small.split(4, dim=-1)
            scales = torch.cat([scale & 63, last & 15 | scale >> 2 & 48], dim=-1)
            offsets = torch.cat([offset & 63, last >> 4 | offset >> 2 & 48], dim=-1)
            small = torch.stack([scales, offsets], dim=-1).flatten(-2)
            fifth, low = codes.split([kind.size - 144, 128], dim=-1)
            codes = _nibbles(low.unflatten(-1, (4, 32))).flatten(-2)
            if kind.bits == 5:
                codes = codes | _bits(fifth, 8).flatten(-2) << 4
        case "Q6_K":
            low, high, small, halves = blocks.split([128, 64, 16, 2], dim=-1)
            upper = torch.stack([high.unflatten(-1, (2, 32)) >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)
            codes = _nibbles(low.unflatten(-1, (2, 64))).flatten(-2) | upper.flatten(-3) << 4
    return _Parts(halves=halves.unflatten(-1, (kind.halves, 2)), small=small, codes=codes)


def _nibbles(packed: UInt8[Tensor, "*shape bytes"]) -> UInt8[Tensor, "*shape codes"]:
    """Codes of four bits: the lower ones of all bytes, then the upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1)


def _bits(packed: UInt8[Tensor, "*shape bytes"], count: int) -> UInt8[Tensor, "*shape count bytes"]:
    """Each bit of bytes, the lowest first."""
    return torch.stack([packed >> bit & 1 for bit in range(count)], dim=-2)


def _packed(kind: BlockKind, codes: UInt8[Tensor, "panels 16 blocks codes"]) -> UInt8[Tensor, "panels blocks bytes"]:
    """Codes as they lie in panels."""
    num_panels, _, num_blocks, _ = codes.shape
    if kind.bits >= 8:
        # panel, row, block, pair, the codes of two weights
        pairs = codes.reshape(num_panels, PANEL, num_blocks, kind.weights // 2, -1)
        return pairs.permute(0, 2, 3, 1, 4).flatten(2)
    # panel, row // 4, row % 4, block, group, half, q in the half, half of j, j % 2, parity
    split = codes.reshape(num_panels, 4, 4, num_blocks, -1, 2, 2, 2, 2, 2)
    low = split[..., 0, :] & 15 | (split[..., 1, :] & 15) << 4
    packed = [low.permute(0, 3, 4, 5, 6, 1, 7, 2, 8).reshape(num_panels, num_blocks, kind.weights // GROUP, -1)]
    if kind.bits > 4:
        width = kind.bits - 4
        high = split >> 4
        if width == 1:
            shifts = torch.arange(8, dtype=torch.uint8).reshape(2, 2, 2)
            ordered = high.permute(0, 3, 4, 1, 7, 2, 9, 5, 6, 8)
            packed.append((ordered << shifts).sum((-3, -2, -1), dtype=torch.uint8).flatten(3))
        else:
            shifts = 2 * torch.arange(4, dtype=torch.uint8).reshape(2, 2)
            ordered = high.permute(0, 3, 4, 5, 1, 7, 2, 9, 6, 8)
            packed.append((ordered << shifts).sum((-2, -1), dtype=torch.uint8).flatten(3))
    return torch.cat(packed, dim=3).flatten(2)


def _unpacked(kind: BlockKind, packed: UInt8[Tensor, "panels blocks bytes"]) -> UInt8[Tensor, "panels 16 blocks codes"]:
    """Codes from panels: the inverse of `_packed`."""
    num_panels, num_blocks, _ = packed.shape
    if kind.bits >= 8:
        pairs = packed.reshape(num_panels, num_blocks, kind.weights // 2, PANEL, -1)
        return pairs.permute(0, 3, 1, 2, 4).flatten(3)
    groups = packed.reshape(num_panels, num_blocks, kind.weights // GROUP, -1)
    low, high = groups.split([256, groups.shape[3] - 256], dim=3)
    # panel, block, group, half, q in the half, row // 4, half of j, row % 4, parity, j % 2
    nibbles = low.reshape(num_panels, num_blocks, -1, 2, 2, 4, 2, 4, 2)
    codes = torch.stack([nibbles & 15, nibbles >> 4], dim=-1)
    if kind.bits == 5:
        shifts = torch.arange(8, dtype=torch.uint8, device=packed.device).reshape(2, 2, 1, 1, 1, 1, 2)
        bits = high.reshape(num_panels, num_blocks, -1, 1, 1, 4, 2, 4, 2, 1) >> shifts & 1
        codes = codes | bits << 4
    elif kind.bits == 6:
        shifts = 2 * torch.arange(4, dtype=torch.uint8, device=packed.device).reshape(2, 1, 1, 1, 1, 2)
        bits = high.reshape(num_panels, num_blocks, -1, 2, 1, 4, 2, 4, 2, 1) >> shifts & 3
        codes = codes | bits << 4
    return codes.permute(0, 5, 7, 1, 2, 3, 4, 6, 9, 8).reshape(num_panels, PANEL, num_blocks, -1)


def _weights(kind: BlockKind, parts: _Parts) -> Float[Tensor, "rows blocks weights"]:
    """The numbers that blocks stand for, each operation in float32."""
    if kind.name == "BF16":
        return parts.codes.contiguous().view(torch.bfloat16).float()
    halves = parts.halves.contiguous().view(torch.float16).squeeze(-1).float()
    scale, offset = halves[..., :1], halves[..., 1:]
    codes = (parts.codes.view(torch.int8) if kind.bits == 8 else parts.codes).float() - kind.zero
    if kind.name == "Q6_K":
        groups = scale * parts.small.contiguous().view(torch.int8).float()
        return (groups[..., None] * codes.unflatten(-1, (16, 16))).flatten(-2)
    if kind.weights > GROUP:
        small = parts.small.unflatten(-1, (-1, 2)).float()
        groups, offsets = scale * small[..., 0], offset * small[..., 1]
        return (groups[..., None] * codes.unflatten(-1, (-1, GROUP)) - offsets[..., None]).flatten(-2)
    return scale * codes + offset if kind.halves == 2 else scale * codes
