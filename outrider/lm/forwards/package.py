"""A forward of a model or of a head compiled ahead of time; see `libraries`."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.lm.forwards.compilable import CompilableHead, CompilableModel, ForwardKind, returning
from outrider.lm.forwards.grouped import laid_out
from outrider.lm.forwards.libraries import MANY, Library
from outrider.lm.forwards.merged import merge
from outrider.lm.forwards.runner import Runner
from outrider.lm.slots.batch import upload
from outrider.lm.slots.inputs import Inputs, Outputs
from outrider.lm.slots.layout import Layout, NodeOrder
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.window import Window

ROWS, WIDTH, VIEW, CAPACITY = 3, 5, 192, 256
"""Sizes of the forward that the graph is made from."""
COUNTS = (5, 2, 4)
"""Nodes of its rows, where they are not padded."""
log = logging.getLogger("outrider")


@dataclass(frozen=True, kw_only=True)
class Package(Library):
    """One kind of a model's or a head's forwards.

    Attributes:
        of: The model or the head.
        kind: The kind.
        builder: Makes its masks.
        storages: The slot cache's storages, of any size.
        entries: For each layer that keeps keys and values, the indices of their tensors in the storages.
    """

    of: CompilableModel | CompilableHead
    kind: ForwardKind
    builder: MaskBuilder
    storages: Sequence[Tensor]
    entries: Mapping[int, tuple[int, int]]

    @property
    def name(self) -> str:
        return self.of.name

    @property
    def num_layers(self) -> int:
        return len(self.entries)

    @property
    def parts(self) -> Sequence[nn.Module]:
        return self.of.parts

    @property
    def shape(self) -> str:
        return self.of.shape

    @property
    def weights(self) -> str | None:
        return self.of.weights

    @property
    def choices(self) -> Mapping[str, Any]:
        entries, spans = sorted(self.entries.items()), repr(self.builder.spans)
        return {"kind": self.kind, "entries": entries, "spans": spans, "unpadded": self.of.unpadded}

    def traced(self) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
        from torch.export import Dim

        rows, width, count, columns, view, capacity = (
            Dim(name, min=1, max=MANY) for name in ("rows", "width", "count", "columns", "view", "capacity")
        )
        positions = torch.arange(WIDTH).expand(ROWS, -1).contiguous()
        masks = flat(self.builder.masks(None, positions, VIEW))
        storages = [s.new_zeros(ROWS, CAPACITY, *s.shape[2:]) for s in self.storages]
        features = self._features(ROWS, WIDTH) if self.kind.features else None
        nodes, node_sizes, laid, laid_sizes = positions, {0: rows, 1: width}, list[Tensor](), list[Any]()
        if self.of.unpadded:
            order = NodeOrder.of(np.array(COUNTS), range(ROWS), WIDTH)
            laid, laid_sizes = upload([order.nodes, order.places], positions.device), [{0: rows, 1: width}, {0: count}]
            nodes, node_sizes = positions.reshape(1, -1)[:, laid[1]], {1: count}
        inputs = (
            # Three tensors: the exporter would take one tensor for one input.
            nodes,
            features,
            nodes.clone(),
            nodes.clone(),
            torch.arange(WIDTH - 1) if self.kind.logits else None,
            laid,
            masks,
            storages,
        )
        sizes = (
            node_sizes,
            None if features is None else node_sizes,
            node_sizes,
            node_sizes,
            {0: columns} if self.kind.logits else None,
            laid_sizes,
            [{0: rows, 2: width, 3: view}] * len(masks),
            [{0: rows, 1: capacity}] * len(storages),
        )
        function = _OfTensors(self)
        merge(function.traced.twin, lambda: function(*inputs))
        return function, inputs, sizes

    def _features(self, rows: int, width: int) -> Float[Tensor, "rows width dim"]:
        """Features of this many nodes, all of them zero."""
        head = self.parts[0]
        return next(head.parameters()).new_zeros(rows, width, int(head.feature_size))  # type: ignore[arg-type]


class PackagedForward:
    """Runs the libraries of a model or a head, one for each kind of forward. Only `prepare` makes one, so that no
    answer waits for it.

    Attributes:
        num_forwards: Forwards made so far.
        unpadded: Whether forwards without padding are computed.

    Args:
        package: Its package of any kind. Its weights must not change afterwards.
    """

    def __init__(self, package: Package) -> None:
        self.num_forwards = 0
        self._package, self.unpadded = package, package.of.unpadded
        self._numbers = torch.arange(64)
        self._runners: dict[ForwardKind, Runner | None] = {}

    @property
    def folder(self) -> Path:
        """Where the library of the given package lies."""
        return self._package.folder

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        return self.run(inputs, returning(taps))

    def run(self, inputs: Inputs, kind: ForwardKind) -> Outputs:
        """Run the library of a kind, which is open. An output layer that runs computes one column at least."""
        device, shape, module = inputs.positions.device, inputs.positions.shape, self._package.parts[0]
        columns: Any = inputs.columns if len(inputs.columns) else np.zeros(int(kind.logits), dtype=np.int64)
        runner = self._runners[kind]
        if runner is None:
            raise RuntimeError(f"there is no library of {kind}; ask `has` before")
        features = inputs.batch.features(device, next(module.parameters()).dtype) if kind.features else None
        nodes = [inputs.batch.tokens(device).contiguous(), inputs.positions, inputs.window.places.view(shape)]
        chosen, laid = columns, list[Tensor]()
        if self.unpadded:
            layout = inputs.layout or Layout.full(self._numbered(shape.numel()), *shape)
            laid = [layout.nodes, layout.places]
            if inputs.layout is None:
                nodes = [each.reshape(1, -1) for each in nodes]
                chosen = (shape[1] * np.arange(shape[0])[:, None] + columns).ravel()
        outputs = runner.run(
            [
                nodes[0],
                *([] if features is None else [features.contiguous()]),
                *nodes[1:],
                *(upload([chosen], device) if kind.logits else []),
                *laid,
                *flat(inputs.masks),
                *inputs.window.storages,
            ]
        )
        self.num_forwards += 1
        states = [each.view(*shape, -1) for each in outputs[int(kind.logits) :]]
        if kind.logits:
            logits = outputs[0].view(shape[0], len(columns), -1)
        else:
            logits = states[0].new_zeros(shape[0], 0, int(module.vocab_size))  # type: ignore[arg-type]
        return Outputs(
            logits=logits,
            columns=columns,
            taps=dict(zip(kind.taps, states, strict=False)),
            features=states[-1] if len(states) > len(kind.taps) else None,
        )

    def _numbered(self, count: int) -> Tensor:
        """The numbers below `count`, a view of what is kept."""
        if len(self._numbers) < count:
            self._numbers = torch.arange(2 * count)
        return self._numbers[:count]

    def is_open(self, kind: ForwardKind) -> bool:
        """Whether the library of a kind is open."""
        return self._runners.get(kind) is not None

    def has(self, kind: ForwardKind) -> bool:
        """Whether there is a library of this kind, which is then open. The log says once that there is none."""
        if kind not in self._runners:
            self._runners[kind] = self._of(kind).opened()
            if self._runners[kind] is None:
                states = f" and outputs hidden states {', '.join(map(str, kind.taps))}" if kind.taps else ""
                log.warning(
                    "no library computes the forward of %s%s, so it runs without one; `outrider prepare` with this "
                    "target and drafter compiles it, once",
                    self._package.name,
                    states,
                )
        return self._runners[kind] is not None

    def prepare(self, kind: ForwardKind) -> None:
        """Make what is missing, and open it.

        Raises:
            InputError: It cannot be made.
        """
        self._runners[kind] = self._of(kind).open()

    def _of(self, kind: ForwardKind) -> Package:
        """The package of this kind. If it is the given one, its key is known."""
        return self._package if kind == self._package.kind else replace(self._package, kind=kind)


class _OfTensors(nn.Module):
    """A forward as a function of tensors alone."""

    def __init__(self, package: Package) -> None:
        super().__init__()
        self.traced, self._package = package.of.traced(package.kind, package.builder), package

    def forward(
        self,
        tokens: Tensor,
        features: Tensor | None,
        positions: Tensor,
        places: Tensor,
        columns: Tensor | None,
        laid: Sequence[Tensor],
        masks: Sequence[Tensor],
        storages: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        window = Window(self._package.entries, storages, places.reshape(-1), masks[0].shape[-1])
        with laid_out(Layout(nodes=laid[0], places=laid[1])) if laid else nullcontext():
            outputs: tuple[Tensor, ...] = self.traced(tokens, features, positions, columns, masks, window)
        return outputs


def flat(masks: object) -> list[Tensor]:
    """The tensors among a model's masks."""
    if isinstance(masks, Tensor):
        return [masks]
    assert isinstance(masks, Mapping)
    return [mask for mask in masks.values() if mask is not None]
