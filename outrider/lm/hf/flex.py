"""`flex_attention`: our masks as torch's `BlockMask`, and the only form of torch's kernel that is right on every
device.

Relied on in transformers (read in 5.23, run in 5.23): a `BlockMask` given as `attention_mask` reaches
`flex_attention_forward` as it is, which calls `torch.compile(flex_attention)`. All models of a process share this
compiled function. Relied on in torch (read and run in 2.13): under `torch.compiler.set_stance("force_eager")` that call
runs `flex_attention` uncompiled, by plain tensor operations over all pairs of queries and keys, on any device, in any
dtype.

The compiled form is not used: `docs/laboratory/decisions/011-flex-attention.md` gives the reasons.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

_BLOCK = 128


class _Stance:
    """Counts the forwards, of all threads, that need torch's stance changed. The stance belongs to the process.

    The first such forward changes the stance, and the end of the last one restores it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._changed: torch.compiler.set_stance | None = None

    def enter(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._changed = torch.compiler.set_stance("force_eager")
            self._inside += 1

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._changed is not None:
                self._changed.__exit__(None, None, None)
                self._changed = None


_STANCE = _Stance()


def block_mask(seen: Bool[Tensor, "rows queries keys"]) -> BlockMask:
    """The mask that lets each query see the keys marked for it, in all heads.

    No block is left out and none is called full, so that `seen` alone decides.

    Example:
        >>> mask = block_mask(torch.ones(3, 2, 200, dtype=torch.bool))
        >>> mask.shape, mask.kv_num_blocks.flatten().tolist()
        ((3, 1, 2, 200), [2, 2, 2])
    """
    rows, queries, keys = seen.shape
    across, down = -(-keys // _BLOCK), -(-queries // _BLOCK)
    numbers = torch.arange(across, dtype=torch.int32, device=seen.device)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        # The same as seen[row, query, key], without torch's detour for such an index, which costs milliseconds a layer.
        return torch.ops.aten.index.Tensor(seen, [row, query, key])

    return BlockMask.from_kv_blocks(
        torch.full((rows, 1, down), across, dtype=torch.int32, device=seen.device),
        numbers.expand(rows, 1, down, across),
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible,
        seq_lengths=(queries, keys),
        compute_q_blocks=False,
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """All functions compiled by torch run uncompiled, in all threads, as long as any thread is in the body."""
    _STANCE.enter()
    try:
        yield
    finally:
        _STANCE.leave()


@contextmanager
def tried(wanted: bool) -> Iterator[None]:
    """Surrounds the trial forwards of a model that is being opened: `uncompiled`, without two warnings.

    Torch warns once per process that uncompiled attention is slow, and that transformers builds its masks in an
    outdated way. Both warnings are useless to a person who opens a model. `wanted` is False for models with another
    attention; then nothing changes.
    """
    if not wanted:
        yield
        return
    with warnings.catch_warnings(), uncompiled():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", "_compile flag on create_block_mask", DeprecationWarning)
        yield
