"""A model's forward compiled ahead of time; see `libraries`."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.lm.fingerprint import shape_of, weights_of
from outrider.lm.forwards.grouped import group, laid_out
from outrider.lm.forwards.libraries import MANY, Library
from outrider.lm.forwards.merged import merge
from outrider.lm.forwards.runner import Runner
from outrider.lm.forwards.twin import twin
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.taps import attach
from outrider.lm.slots.batch import upload
from outrider.lm.slots.layout import Layout, NodeOrder
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.slotted import Inputs, Outputs
from outrider.lm.slots.window import Window

ROWS, WIDTH, VIEW, CAPACITY = 3, 5, 192, 256
"""Sizes of the forward that the graph is made from."""
COUNTS = (5, 2, 4)
"""Nodes of its rows, where they are not padded."""
OWN_MASKS = frozenset({"doge"})
"""Models whose layers change the mask by the values of their keys."""
GATHERED = 16
"""Most tokens of a forward that copies the weights of each token's experts."""
log = logging.getLogger("outrider")


@dataclass(frozen=True, kw_only=True)
class Package(Library):
    """A model's forward, with the hidden states that are tapped.

    Attributes:
        model: The model.
        builder: Makes its masks.
        storages: The slot cache's storages, of any size.
        entries: For each layer that keeps keys and values, the indices of their tensors in the storages.
        taps: The hidden states that the forward returns behind the logits.
    """

    model: PreTrainedModel
    builder: MaskBuilder
    storages: Sequence[Tensor]
    entries: Mapping[int, tuple[int, int]]
    taps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return Anatomy.of(self.model.config).name

    @property
    def num_layers(self) -> int:
        return len(self.entries)

    @property
    def module(self) -> nn.Module:
        return self.model

    @property
    def shape(self) -> str:
        return shape_of(self.model)

    @property
    def weights(self) -> str | None:
        return weights_of(self.model)

    @property
    def widest(self) -> int | None:
        """Most tokens of a forward; None: any number. With experts the graph copies the weights of each token's ones:
        transformers' other ways to compute them cannot be exported.
        """
        return GATHERED if self.model._can_set_experts_implementation() else None

    @property
    def unpadded(self) -> bool:
        """Whether the forward computes for nodes alone what is not attention: it can where attention is a function that
        the model looks up, and has the mask that it is given.
        """
        looked_up = Anatomy.of(self.model.config).attention == "sdpa" and self.model._supports_attention_backend
        return looked_up and self.model.config.model_type not in OWN_MASKS

    @property
    def choices(self) -> Mapping[str, Any]:
        entries, spans = sorted(self.entries.items()), repr(self.builder.spans)
        return {"taps": self.taps, "entries": entries, "spans": spans, "unpadded": self.unpadded}

    def traced(self) -> tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]:
        from torch.export import Dim

        rows, width, count, columns, view, capacity = (
            Dim(name, min=1, max=MANY) for name in ("rows", "width", "count", "columns", "view", "capacity")
        )
        positions = torch.arange(WIDTH).expand(ROWS, -1).contiguous()
        masks = flat(self.builder.masks(None, positions, VIEW))
        storages = [s.new_zeros(ROWS, CAPACITY, *s.shape[2:]) for s in self.storages]
        nodes, laid, laid_sizes = positions, [], []
        if self.unpadded:
            order = NodeOrder.of(np.array(COUNTS), range(ROWS), WIDTH)
            laid, laid_sizes = upload([order.nodes, order.places], positions.device), [{0: rows, 1: width}, {0: count}]
            nodes = positions.reshape(1, -1)[:, laid[1]]
        node_sizes = {1: count} if self.unpadded else {0: rows, 1: width}
        inputs = (
            # Three tensors: the exporter would take one tensor for one input.
            nodes,
            nodes.clone(),
            nodes.clone(),
            torch.arange(WIDTH - 1),
            laid,
            masks,
            storages,
        )
        sizes = (
            node_sizes,
            node_sizes,
            node_sizes,
            {0: columns},
            laid_sizes,
            [{0: rows, 2: width, 3: view}] * len(masks),
            [{0: rows, 1: capacity}] * len(storages),
        )
        traced = _Traced(self)
        merge(traced, lambda: traced(*inputs))
        return traced, inputs, sizes


class PackagedForward:
    """Runs a model's libraries, one for each choice of taps. Only `prepare` makes one, so that no answer waits for it.

    Attributes:
        num_forwards: Forwards made so far.
        unpadded: Whether forwards without padding are computed.
        folder: Where the library without taps lies.

    Args:
        package: The model's package without taps. Its weights must not change afterwards.
    """

    def __init__(self, package: Package) -> None:
        self.num_forwards = 0
        self._package, self.unpadded = package, package.unpadded
        self.folder = package.folder
        self._numbers = torch.arange(64)
        self._runners: dict[tuple[int, ...], Runner | None] = {}

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        wanted, device, shape = tuple(dict.fromkeys(taps)), inputs.positions.device, inputs.positions.shape
        # The output layer computes one column at least.
        columns = inputs.columns if len(inputs.columns) else np.zeros(1, dtype=np.int64)
        runner = self._runners[wanted]
        if runner is None:
            raise RuntimeError(f"there is no library of taps {list(wanted)}; ask `has` before")
        nodes = [inputs.batch.tokens(device).contiguous(), inputs.positions, inputs.window.places.view(shape)]
        chosen, laid = columns, list[Tensor]()
        if self.unpadded:
            layout = inputs.layout or Layout.full(self._numbered(shape.numel()), *shape)
            laid = [layout.nodes, layout.places]
            if inputs.layout is None:
                nodes = [each.reshape(1, -1) for each in nodes]
                chosen = (shape[1] * np.arange(shape[0])[:, None] + columns).ravel()
        logits, *seen = runner.run(
            [*nodes, *upload([chosen], device), *laid, *flat(inputs.masks), *inputs.window.storages]
        )
        self.num_forwards += 1
        return Outputs(
            logits=logits.view(shape[0], len(columns), -1),
            columns=columns,
            taps={tap: states.view(*shape, -1) for tap, states in zip(wanted, seen, strict=True)},
        )

    def _numbered(self, count: int) -> Tensor:
        """The numbers below `count`, a view of what is kept."""
        if len(self._numbers) < count:
            self._numbers = torch.arange(2 * count)
        return self._numbers[:count]

    def has(self, taps: Sequence[int]) -> bool:
        """Whether there is a library of these taps, which is then open. The log says once that there is none."""
        wanted = tuple(dict.fromkeys(taps))
        if wanted not in self._runners:
            self._runners[wanted] = self._returning(wanted).opened()
            if self._runners[wanted] is None:
                states = f" and outputs hidden states {', '.join(map(str, wanted))}" if wanted else ""
                log.warning(
                    "no library computes the forward of %s%s, so it runs without one; `outrider prepare` with this "
                    "target and drafter compiles it, once",
                    self._package.name,
                    states,
                )
        return self._runners[wanted] is not None

    def prepare(self, taps: Sequence[int] = ()) -> None:
        """Make what is missing, and open it."""
        wanted = tuple(dict.fromkeys(taps))
        self._runners[wanted] = self._returning(wanted).open()

    def _returning(self, taps: tuple[int, ...]) -> Package:
        """The package that returns these taps. Without taps it is the given one, whose key is known."""
        return replace(self._package, taps=taps) if taps else self._package


class _Traced(nn.Module):
    """A model's forward as a function of tensors alone."""

    def __init__(self, package: Package) -> None:
        super().__init__()
        self.model, self._package = twin(package.model), package
        self._cache = cache_keyword(type(self.model))
        group(self.model)
        if package.widest is not None:
            self.model.set_experts_implementation("batched_mm")
        seen: dict[int, Tensor] = {}
        attach(Anatomy.of(self.model).layers, package.taps, seen)
        # The exporter takes a dict that is an attribute for a part of the model's state.
        self._seen = seen.__getitem__
        self.model.eval()

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        places: Tensor,
        columns: Tensor,
        laid: Sequence[Tensor],
        masks: Sequence[Tensor],
        storages: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        package = self._package
        window = Window(package.entries, storages, places.reshape(-1), masks[0].shape[-1])
        with laid_out(Layout(nodes=laid[0], places=laid[1])) if laid else nullcontext():
            logits = self.model(
                input_ids=tokens,
                attention_mask=_shaped(package.builder.spans, masks),
                position_ids=positions,
                use_cache=True,
                logits_to_keep=columns,
                **{self._cache: window},
            ).logits
        return logits, *map(self._seen, package.taps)


def flat(masks: object) -> list[Tensor]:
    """The tensors among a model's masks."""
    if isinstance(masks, Tensor):
        return [masks]
    assert isinstance(masks, Mapping)
    return [mask for mask in masks.values() if mask is not None]


def _shaped(spans: object, masks: Sequence[Tensor]) -> object:
    """Masks as the model takes them, from a flat list."""
    if not isinstance(spans, Mapping):
        return masks[0]
    left = iter(masks)
    return {kind: None if span is None else next(left) for kind, span in spans.items()}
