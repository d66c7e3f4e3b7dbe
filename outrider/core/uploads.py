"""Small arrays from the host to a device, without waiting for the device."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """A host array on the device. On a CPU it is the same memory."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers as a column on the device."""
    return torch.tensor(values, dtype=dtype)[:, None].to(device, non_blocking=True)


def row_type(scores: Tensor) -> torch.dtype:
    """The type of rows that are made of these scores: float64 of float64, otherwise float32."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32
