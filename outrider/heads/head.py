"""A head as a torch module, and a head on disk before it is bound to a target: `name:path=...`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Drafter, check_longest
from outrider.heads.doubt import Doubt
from outrider.lm.head import HeadLM, head_lm
from outrider.lm.hf.checkpoint import Checkpoint, TargetShape
from outrider.lm.hf.open import as_device, as_dtype
from outrider.lm.target_info import TargetInfo

if TYPE_CHECKING:
    from outrider.heads.objective import HeadContext


HeadFiles = tuple[dict[str, Any], dict[str, Tensor]]
"""A config file, and tensors by name."""


class Head(nn.Module):
    """The mathematics of a head. Drafting and training use the same module.

    A head that can guess some tokens only has an attribute `ids`: these tokens, ascending.
    """

    @classmethod
    def new(cls, options: Any, context: "HeadContext") -> "Head":
        """A new head in float32.

        Args:
            options: Its sizes.
            context: The target that it is made for.

        Raises:
            InputError: A size does not fit the target.
        """
        raise NotImplementedError(f"{cls.__name__} is not trained here")

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: "TrainedHead") -> "Head":
        """The head of a checkpoint, in the checkpoint's dtype.

        Args:
            target: The target that it shall draft for.
            trained: What the user says of the checkpoint.

        Raises:
            InputError: The checkpoint is damaged, of another target, or leaves a question open.
        """
        raise NotImplementedError

    @property
    def num_specialists(self) -> int:
        """How many parts share the draft steps, of which other engines run the first one alone; by default 1."""
        return 1

    @property
    def first_steps(self) -> int | None:
        """How many draft steps the first of several specialists has learnt; None without others."""
        return None

    def reads(self, num_layers: int) -> tuple[int, ...]:
        """The hidden states of a target that the head reads, in order; by default the last one."""
        return (num_layers,)

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """The config and the tensors that are written.

        Args:
            target: The target that it was trained for.
            dtype: Of the written tensors.
            name: The target's directory or hub id.
        """
        raise NotImplementedError

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """The config and the tensors that another engine reads; by default those that are written here.

        Args:
            engine: One of those that the spec's `exports` names.
            target: As in `record`, like the others.

        Raises:
            InputError: The engine does not know such a head.
        """
        return self.record(target, dtype, name)

    def engine_names(self, of_kind: Exports) -> Exports:
        """The names that other engines have for this head; by default those that they have for its kind.

        Args:
            of_kind: The spec's `exports`.
        """
        return of_kind

    @classmethod
    def init_from(cls, place: "TrainedHead", options: Any, context: "HeadContext") -> "Head":
        """The head on disk that is trained further. The arguments are those of `load` and `new`."""
        checkpoint = place.checkpoint
        if not place.spec.published(checkpoint.config, checkpoint.names):
            raise InputError(f"the head in {place.path} is no {place.spec.name} head; give one of this kind")
        return cls.load(checkpoint, context.info, place)

    def doubts(self, target: TargetInfo) -> Sequence[Doubt]:
        """What else the files could mean, for a head that drafts badly; by default nothing."""
        return ()

    def freeze(self) -> None:
        """Let the parts that no training changes stay as they are."""


@dataclass(frozen=True, kw_only=True)
class TrainedHead:
    """A head in a directory or at a hub id. A subclass adds what a user can say of one kind of head.

    Attributes:
        spec: What kind of head it is, a `HeadSpec`. The catalog's name stands for it in `name:path=...`.
        path: Directory or hub id.
        device: Where it runs; by default on the target's device.
        dtype: The dtype that it computes in; by default the target's.
        revision: Branch, tag or commit of a hub id.
        max_context: Longest context; by default the target's.
    """

    spec: Any
    path: str
    device: str | None = None
    dtype: str | None = None
    revision: str | None = None
    max_context: int | None = None

    def __post_init__(self) -> None:
        check_longest(self.max_context)

    @property
    def checkpoint(self) -> Checkpoint:
        """Its files."""
        return Checkpoint(path=self.path, revision=self.revision)

    def check_files(self) -> None:
        """Raise InputError if there is no config of a head."""
        _ = self.checkpoint.config

    def bind(self, target: TargetInfo) -> Drafter:
        """Load the head. Raises InputError if it does not fit the target."""
        if not target.num_layers:
            raise InputError(f"the head in {self.path} reads the target's hidden states, and this target shows none")
        head = self.spec.head.load(self.checkpoint, target, self)
        return self.spec.drafter.of(head, target, self)

    def place(self, target: TargetInfo) -> tuple[torch.device, torch.dtype]:
        """The device and the dtype of the head."""
        kind = target.dtype if self.dtype is None else as_dtype(self.dtype)
        device = target.device if self.device is None else as_device(self.device)
        return device, target.dtype if isinstance(kind, str) else kind

    def longest(self, target: TargetInfo) -> int:
        """The longest context of the head, at most the target's."""
        return min(self.max_context or target.max_context, target.max_context)

    def lm(self, module: nn.Module, target: TargetInfo, *, more: int = 0) -> HeadLM:
        """A head's module, or a part of it, as a language model. Its forwards run as the target's do where they can.

        Args:
            more: Positions that it has beyond the longest context.
        """
        placed = module.to(*self.place(target)).eval().requires_grad_(False)
        return head_lm(
            target.target_forward,
            target.forward,
            placed,
            max_slots=target.max_slots,
            max_context=self.longest(target) + more,
        )

    def check_target(self, shape: TargetShape | None, hidden_size: int, target: TargetInfo) -> None:
        """Check that the head was trained for such a target.

        Args:
            shape: The target that the config names; None if it names none.
            hidden_size: Width of the hidden states that the head reads.

        Raises:
            InputError: The target is of another shape.
        """
        if hidden_size != target.hidden_size:
            raise InputError(
                f"the head in {self.path} reads hidden states of width {hidden_size}, and this target's have width "
                f"{target.hidden_size}; give a head that was trained for this target"
            )
        if shape is not None and (shape.num_layers, shape.hidden_size) != (target.num_layers, hidden_size):
            raise InputError(
                f"the head in {self.path} was trained for a target with {shape.num_layers} layers of width "
                f"{shape.hidden_size}, and this target has {target.num_layers} layers of width {target.hidden_size}"
            )

    def check_vocabulary(self, vocab_size: int, target: TargetInfo) -> None:
        """Raise InputError if the head knows another number of tokens than the target.

        The target's output layer may be wider than its logits, which leave out the padding behind the last token.
        """
        here = target.vocab_size
        widest = target.head(torch.zeros(1, target.hidden_size, device=target.device, dtype=target.dtype)).shape[-1]
        if not here <= vocab_size <= max(here, widest):
            raise InputError(
                f"the head in {self.path} knows {vocab_size:,} tokens, and this target has {here:,}; give a head that "
                "was trained for this target"
            )
