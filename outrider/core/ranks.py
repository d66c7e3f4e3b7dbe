"""The processes that hold one target together (tensor parallel). Each runs the same engine on the same requests.

They stay in step as long as all decide alike. So what one process would draw, measure or round by itself comes from the
first one: seeds of requests, free memory, logits and hidden states. What is chosen by a clock is refused.
"""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor

_TOGETHER: dict[str, int] = {}


def together() -> int:
    """How many processes hold one target; 1 if this one is alone.

    Example:
        >>> together()
        1
    """
    return _TOGETHER.get("count", 1) if dist.is_available() and dist.is_initialized() else 1


def join(count: int) -> None:
    """Note that this process holds a target together with others, until torch's group of processes ends."""
    _TOGETHER["count"] = count


def is_first() -> bool:
    """Whether this is the first of the processes that hold one target, or the only one."""
    return together() == 1 or dist.get_rank() == 0


def of_first(value: Any) -> Any:
    """A value of the first process, in every process."""
    if together() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def least(number: int | None) -> int | None:
    """The least of the processes' numbers; None if any is None."""
    if together() == 1:
        return number
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, number)
    return None if None in numbers else min(numbers)


def rows_of_first(rows: Tensor, others: Mapping[int, Tensor]) -> tuple[Tensor, dict[int, Tensor]]:
    """Tensors of the first process, in every process: roundings may differ, and then choices would."""
    shared = [tensor.contiguous() for tensor in (rows, *others.values())]
    for tensor in shared:
        if tensor.numel():
            dist.broadcast(tensor, src=0)
    return shared[0], dict(zip(others, shared[1:], strict=True))
