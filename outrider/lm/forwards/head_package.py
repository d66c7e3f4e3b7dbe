"""A head's forward compiled ahead of time; see `libraries`."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.lm.fingerprint import fingerprint
from outrider.lm.forwards.libraries import MANY, Library
from outrider.lm.forwards.merged import merge
from outrider.lm.forwards.package import CAPACITY, ROWS, VIEW, WIDTH
from outrider.lm.forwards.twin import twin
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.batch import upload
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.slotted import Inputs, Outputs
from outrider.lm.slots.window import Window


class HeadForwardKind(NamedTuple):
    """A kind of a head's forward: whether its nodes have features, and whether logits are wanted."""

    features: bool = True
    logits: bool = True


KINDS = (HeadForwardKind(),)
"""The kinds that a head is compiled for, unless its `kinds` names others."""


@dataclass(frozen=True, kw_only=True)
class HeadPackage(Library):
    """A head's forward of one kind.

    Attributes:
        head: The head.
        builder: Makes its mask.
        storages: The slot cache's storages, of any size.
        entries: For each of its layers, the indices of their tensors in the storages.
        kind: What is given and wanted.
    """

    head: nn.Module
    builder: MaskBuilder
    storages: Sequence[Tensor]
    entries: Mapping[int, tuple[int, int]]
    kind: HeadForwardKind = KINDS[0]

    @property
    def name(self) -> str:
        return type(self.head).__name__

    @property
    def num_layers(self) -> int:
        return len(self.entries)

    @property
    def module(self) -> nn.Module:
        return self.head

    @property
    def shape(self) -> str:
        sizes = [(name, tuple(weight.shape)) for name, weight in self.head.state_dict().items()]
        said = [str(self.head), str(next(self.head.parameters()).dtype), sizes, getattr(self._ends, "target", None)]
        return hashlib.sha256(repr(said).encode()).hexdigest()

    @property
    def weights(self) -> str | None:
        return fingerprint(self.head, None if self._ends is None else self._ends.modules)

    @property
    def parts(self) -> Sequence[nn.Module]:
        return [self.head] if self._ends is None else [self.head, self._ends.modules]

    @property
    def choices(self) -> Mapping[str, Any]:
        return {"kind": self.kind, "entries": sorted(self.entries.items()), "spans": repr(self.builder.spans)}

    @property
    def _ends(self) -> EmbeddingAndHead | None:
        return getattr(self.head, "ends", None)

    def traced(self) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
        from torch.export import Dim

        rows, width, columns, view, capacity = (
            Dim(name, min=1, max=MANY) for name in ("rows", "width", "columns", "view", "capacity")
        )
        positions = torch.arange(WIDTH).expand(ROWS, -1).contiguous()
        features = self._features(ROWS, WIDTH)
        nodes = {0: rows, 1: width}
        inputs = (
            # Three tensors: the exporter would take one tensor for one input.
            positions,
            features,
            positions.clone(),
            positions.clone(),
            torch.arange(WIDTH - 1) if self.kind.logits else None,
            self.builder.masks(None, positions, VIEW),
            [s.new_zeros(ROWS, CAPACITY, *s.shape[2:]) for s in self.storages],
        )
        sizes = (
            nodes,
            None if features is None else nodes,
            nodes,
            nodes,
            {0: columns} if self.kind.logits else None,
            {0: rows, 2: width, 3: view},
            [{0: rows, 1: capacity}] * len(self.storages),
        )
        traced = _Traced(self)
        merge(traced.head, lambda: traced(*inputs))
        return traced, inputs, sizes

    def _features(self, rows: int, width: int) -> Float[Tensor, "rows width dim"] | None:
        """Features of this many nodes, all of them zero."""
        weight = next(self.head.parameters())
        return weight.new_zeros(rows, width, int(self.head.feature_size)) if self.kind.features else None  # type: ignore[arg-type]


class PackagedHead:
    """Runs a head's library of one kind of forward.

    Attributes:
        num_forwards: Forwards made so far.

    Args:
        package: What is run. Its weights must not change afterwards.

    Raises:
        InputError: The library is not there and cannot be made.
    """

    def __init__(self, package: HeadPackage) -> None:
        self.num_forwards = 0
        self._kind, self._runner = package.kind, package.open()

    def __call__(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"] | None,
        inputs: Inputs,
        vocab_size: int,
    ) -> Outputs:
        columns: Any = inputs.columns if self._kind.logits else np.zeros(0, dtype=np.int64)
        masks: Any = inputs.masks
        found = self._runner.run(
            [
                tokens.contiguous(),
                *([] if features is None else [features.contiguous()]),
                inputs.positions,
                inputs.window.places.view(inputs.positions.shape),
                *(upload([columns], inputs.positions.device) if self._kind.logits else []),
                masks,
                *inputs.window.storages,
            ]
        )
        self.num_forwards += 1
        if self._kind.logits:
            return Outputs(logits=found[0], columns=columns, features=found[1])
        return Outputs(logits=found[0].new_zeros(len(tokens), 0, vocab_size), columns=columns, features=found[0])


class _Traced(nn.Module):
    """A head's forward as a function of tensors alone."""

    def __init__(self, package: HeadPackage) -> None:
        super().__init__()
        self.head, self._package = twin(package.head).eval(), package
        if (ends := package._ends) is not None:
            # The exporter looks for weights in modules.
            self.target = ends.modules
            setattr(self.head, "ends", replace(ends, head=ends.unpacked or ends.head))  # noqa: B010

    def forward(
        self,
        tokens: Tensor,
        features: Tensor | None,
        positions: Tensor,
        places: Tensor,
        columns: Tensor | None,
        mask: Tensor,
        storages: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        window = Window(self._package.entries, storages, places.reshape(-1), mask.shape[-1])
        hidden: Tensor = self.head(tokens, features, positions, mask, window)
        if columns is None:
            return (hidden,)
        logits: Tensor = self.head.logits(hidden[:, columns])  # type: ignore[operator]
        return logits, hidden
