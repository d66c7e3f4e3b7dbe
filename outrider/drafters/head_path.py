"""The base of trained heads before they are bound to a target: `name:path=...`."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.core.types import InputError
from outrider.drafters.protocol import Drafter, check_longest
from outrider.lm.head import HeadLM, beside
from outrider.lm.hf.checkpoint import TargetShape
from outrider.lm.hf.open import as_device, as_dtype
from outrider.lm.target_info import TargetInfo


@dataclass(frozen=True, kw_only=True)
class HeadPath:
    """A head in a directory or at a hub id.

    Attributes:
        path: Directory or hub id.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default the target's.
    """

    path: str
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        check_longest(self.max_context)

    @classmethod
    def recognises(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Whether a checkpoint is of this kind.

        Args:
            config: Its config.
            names: The names of its tensors.
        """
        return False

    @abstractmethod
    def bind(self, target_info: TargetInfo) -> Drafter:
        """Load the head."""

    def place(self, target_info: TargetInfo) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype of the head."""
        kind = target_info.dtype if self.dtype is None else as_dtype(self.dtype)
        device = target_info.device if self.device is None else as_device(self.device)
        return device, target_info.dtype if isinstance(kind, str) else kind

    def longest(self, target_info: TargetInfo) -> int:
        """The longest context of the head, at most the target's."""
        return min(self.max_context or target_info.max_context, target_info.max_context)

    def check_target(self, shape: TargetShape | None, hidden_size: int, target_info: TargetInfo) -> None:
        """Check that a head was trained for such a target.

        Args:
            shape: The target that the config names; None if it names none.
            hidden_size: Width of the hidden states that the head reads.

        Raises:
            InputError: The target shows no hidden states, or is of another shape.
        """
        if not target_info.num_layers:
            raise InputError(f"the head in {self.path} reads the target's hidden states, and this target shows none")
        if hidden_size != target_info.hidden_size:
            raise InputError(
                f"the head in {self.path} reads hidden states of width {hidden_size}, and this target's have width "
                f"{target_info.hidden_size}; give a head that was trained for this target"
            )
        if shape is not None and (shape.num_layers, shape.hidden_size) != (target_info.num_layers, hidden_size):
            raise InputError(
                f"the head in {self.path} was trained for a target with {shape.num_layers} layers of width "
                f"{shape.hidden_size}, and this target has {target_info.num_layers} layers of width "
                f"{target_info.hidden_size}"
            )

    def check_vocabulary(self, vocab_size: int, target_info: TargetInfo) -> None:
        """Raise InputError if a head knows another number of tokens than the target.

        The target's output layer may be wider than its logits, which leave out the padding behind the last token.
        """
        here = target_info.vocab_size
        widest = target_info.head(
            torch.zeros(1, target_info.hidden_size, device=target_info.device, dtype=target_info.dtype)
        ).shape[-1]
        if not here <= vocab_size <= max(here, widest):
            raise InputError(
                f"the head in {self.path} knows {vocab_size:,} tokens, and this target has {here:,}; give a head that "
                "was trained for this target"
            )


def running_head(module: nn.Module, target_info: TargetInfo, *, max_context: int) -> HeadLM:
    """A head's module as a language model whose forwards run as the target's do, where they can."""
    return beside(
        target_info.target_forward,
        target_info.forward,
        module,
        max_slots=target_info.max_slots,
        max_context=max_context,
    )
