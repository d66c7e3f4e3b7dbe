"""Which keys each new node sees, as the explicit 4-D masks and positions that a transformers causal LM takes.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23):

- `forward` takes a 4-D `attention_mask` `[batch, 1, queries, keys]` as it is, for sliding layers too; where the text
  config has `layer_types` it takes a dict with one mask per distinct type (`masking_utils.create_masks_for_generate`);
- `config._attn_implementation`: "sdpa" reads a bool mask, "eager" ADDS the mask (a bool mask is silently wrong),
  "flex_attention" takes a `BlockMask` (see `flex`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from outrider.lm.hf import alibi, flex
from outrider.lm.hf.anatomy import Anatomy, Span, Spans
from outrider.lm.slots.batch import upload
from outrider.lm.slots.slots import Pending


@dataclass(frozen=True, kw_only=True)
class VisibleKeys:
    """The keys that every query of a padded batch sees, as arrays on the host. Column c of a row with n new nodes
    stands for its node `min(c, n - 1)`, so that padding repeats the last node.

    A key's *index* is its place in its slot: committed tokens first, then pending nodes by number. A query sees the
    keys below `base`. In a *marked* row it also sees the pending nodes that `marks` selects. A row is marked if its
    pending nodes branch, or if its segment states what they see.

    Attributes:
        positions: Position of each query.
        base: Keys with a lower index are visible.
        start: Index of the first pending node in a marked row; -1 in other rows.
        depths: Per marked row, the depth of each pending node; 0 elsewhere.
        marks: Per query of a marked row, the pending nodes that it sees: its ancestors and itself, unless its segment
            states other nodes. None where no row is marked.
    """

    positions: Int[np.ndarray, "rows queries"]
    base: Int[np.ndarray, "rows queries"]
    start: Int[np.ndarray, " rows"]
    depths: Int[np.ndarray, "rows pending"]
    marks: Bool[np.ndarray, "rows queries pending"] | None


def look(
    lengths: Sequence[int],
    pendings: Sequence[Pending],
    counts: Int[np.ndarray, " rows"],
    width: int,
    sees: Sequence[Bool[np.ndarray, "_ _"] | None] | None = None,
) -> VisibleKeys:
    """The sight of the last `counts[r]` pending nodes of each row, padded to `width` columns.

    Args:
        sees: Per row, which pending nodes each new node sees; None is its ancestors and itself.

    Raises:
        ValueError: An array of `sees` does not have one line per new node and one column per pending node.
    """
    sees = [None] * len(pendings) if sees is None else sees
    first = np.array([len(p) for p in pendings]) - counts
    numbers = first[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
    behind = np.asarray(lengths)[:, None]
    plain = np.array([p.chain and s is None for p, s in zip(pendings, sees, strict=True)])
    if plain.all():
        positions = behind + numbers
        none = np.zeros((len(pendings), 0), dtype=np.int64)
        return VisibleKeys(positions=positions, base=positions + 1, start=none.sum(1) - 1, depths=none, marks=None)
    size = max(len(p) for p, alone in zip(pendings, plain.tolist(), strict=True) if not alone)
    parents = np.full((len(pendings), size), -1, dtype=np.int64)
    depths = np.zeros((len(pendings), size), dtype=np.int64)
    for r in np.flatnonzero(~plain).tolist():
        parents[r, : len(pendings[r])] = pendings[r].parents
        depths[r, : len(pendings[r])] = pendings[r].depths
    marks = np.zeros((len(pendings), width, size), dtype=bool)
    rows, columns = np.nonzero(~plain[:, None] & (numbers >= 0))
    nodes = numbers[rows, columns]
    while len(nodes):
        marks[rows, columns, nodes] = True
        nodes = parents[rows, nodes]
        rows, columns, nodes = rows[nodes >= 0], columns[nodes >= 0], nodes[nodes >= 0]
    for r, visible in enumerate(sees):
        if visible is not None:
            if visible.shape != (counts[r], len(pendings[r])):
                raise ValueError(
                    f"sees must be of shape {(int(counts[r]), len(pendings[r]))}, one line per new node and one column "
                    f"per pending node, got {visible.shape}"
                )
            marks[r, :, : visible.shape[1]] = visible[np.minimum(np.arange(width), counts[r] - 1)]
    within = np.where(plain[:, None], 0, numbers)
    positions = behind + np.where(plain[:, None], numbers, np.take_along_axis(depths, within, axis=1))
    return VisibleKeys(
        positions=positions,
        base=np.where(plain[:, None], positions + 1, behind),
        start=np.where(plain, -1, behind[:, 0]),
        depths=depths,
        marks=marks,
    )


@dataclass(frozen=True, kw_only=True)
class MaskBuilder:
    """Makes the `attention_mask` argument of one model.

    Attributes:
        spans: How far layers look back. It is a mapping if the model takes a dict of masks; there None stands for
            layers that need no mask.
        additive: The dtype of additive masks; None gives bool masks, True where a key is seen.
        device: Where masks are wanted.
        blocks: Whether bool masks are wrapped as `BlockMask`s.
        slopes: Per head, the bias per position of a key (ALiBi); the mask then has a head axis. A constant does not
            change a softmax, so a bias by the key's position acts like a bias by its distance.
    """

    spans: Spans
    additive: torch.dtype | None
    device: torch.device
    blocks: bool = False
    slopes: Float[Tensor, " heads"] | None = None
    _keys: Int[Tensor, " numbers"] = field(default_factory=lambda: torch.arange(0), repr=False)

    def keys(self, count: int) -> Int[Tensor, " keys"]:
        """The numbers below `count`, as a view of a tensor that is kept."""
        if self._keys.shape[0] < count:
            fresh = torch.arange(1 << (count - 1).bit_length(), device=self.device)
            object.__setattr__(self, "_keys", fresh)
        return self._keys[:count]

    @cached_property
    def _zero(self) -> Float[Tensor, ""]:
        return torch.zeros((), dtype=self.additive, device=self.device)

    def masks(
        self, sight: VisibleKeys | None, positions: Int[Tensor, "rows queries"], view: int, *, causal: bool = False
    ) -> Tensor | BlockMask | Mapping[str, Tensor | BlockMask | None] | None:
        """Masks over the keys with an index below `view`; `positions` are the sight's, on the device.

        Without a sight, each query sees the keys up to its own position.

        Args:
            causal: Whether attention without a mask lets each query see the keys up to its own position. Layers that
                look back to the beginning of these keys then get none.
        """
        if causal and all(self._reaches(span, view) for span in self._each_span()):
            return None if isinstance(self.spans, Span) else dict.fromkeys(self.spans)
        keys = self.keys(view)
        if sight is None or sight.marks is None:
            seen, logical = keys <= positions[:, :, None], keys[None]
        else:
            seen, logical = self._marked(sight, sight.marks, keys)
        if isinstance(self.spans, Span):
            return self._masked(seen, positions, logical, self.spans)
        return {
            kind: None
            if span is None or (causal and self._reaches(span, view))
            else self._masked(seen, positions, logical, span)
            for kind, span in self.spans.items()
        }

    def needs_none(self, view: int) -> bool:
        """Whether any layers look back to the beginning of so many keys, so that a chain needs no mask there."""
        return any(self._reaches(span, view) for span in self._each_span())

    def _each_span(self) -> Sequence[Span]:
        spans = [self.spans] if isinstance(self.spans, Span) else self.spans.values()
        return [span for span in spans if span is not None]

    @staticmethod
    def _reaches(span: Span, view: int) -> bool:
        """Whether the last of so many keys sees the first."""
        return all(limit is None or view <= limit for limit in (span.window, span.chunk))

    def chained(self, positions: Int[Tensor, "steps rows width"], views: Sequence[int]) -> Sequence[object]:
        """The masks of several forwards without sights. They are parts of one tensor if all read as many keys."""
        if self.blocks or len(set(views)) > 1:
            return [self.masks(None, step, view) for step, view in zip(positions, views, strict=True)]
        together, sizes = self.masks(None, positions.flatten(0, 1), views[0]), positions.shape[:2]
        if isinstance(together, Tensor):
            return together.unflatten(0, sizes).unbind(0)
        assert isinstance(together, Mapping)
        each = {kind: mask.unflatten(0, sizes) if isinstance(mask, Tensor) else None for kind, mask in together.items()}
        return [{kind: None if mask is None else mask[k] for kind, mask in each.items()} for k in range(len(views))]

    def _marked(
        self, sight: VisibleKeys, marks: Bool[np.ndarray, "rows queries pending"], keys: Int[Tensor, " keys"]
    ) -> tuple[Bool[Tensor, "rows queries keys"], Int[Tensor, "rows keys"]]:
        """The keys that each query sees, and the position of each key."""
        base, start, depths = upload([sight.base, sight.start, sight.depths], self.device)
        number = keys - start[:, None]
        inside = (start[:, None] >= 0) & (number >= 0) & (number < depths.shape[1])
        number = number.clamp(0, depths.shape[1] - 1)
        marked = torch.from_numpy(marks).to(self.device, non_blocking=True)
        marked = marked.gather(2, number[:, None, :].expand(-1, base.shape[1], -1))
        seen = (keys < base[:, :, None]) | (marked & inside[:, None, :])
        return seen, torch.where(inside, start[:, None] + depths.gather(1, number), keys)

    def _masked(
        self,
        seen: Bool[Tensor, "rows queries keys"],
        positions: Int[Tensor, "rows queries"],
        logical: Int[Tensor, "#rows keys"],
        span: Span,
    ) -> Bool[Tensor, "rows 1 queries keys"] | Float[Tensor, "rows heads queries keys"] | BlockMask:
        if span.window is not None:
            seen = seen & (logical[:, None, :] > positions[:, :, None] - span.window)
        if span.chunk is not None:
            seen = seen & (logical[:, None, :] // span.chunk == positions[:, :, None] // span.chunk)
        if self.blocks:
            return flex.block_mask(seen)
        seen = seen[:, None]
        if self.additive is None:
            return seen
        hidden = torch.finfo(self.additive).min
        if self.slopes is None:
            return torch.where(seen, self._zero, hidden)
        bias = self.slopes[:, None, None] * logical[:, None, None, :]
        return torch.where(seen, bias.to(self.additive), hidden)


def mask_builder(model: PreTrainedModel, anatomy: Anatomy, spans: Spans) -> MaskBuilder:
    """A builder of the masks that a model's attention implementation takes.

    On GPUs `sdpa` gets additive masks: there torch makes one of a bool mask in every layer.
    """
    bools = anatomy.flex or (anatomy.attention == "sdpa" and model.device.type == "cpu")
    return MaskBuilder(
        spans=spans,
        additive=None if bools else model.dtype,
        device=model.device,
        blocks=anatomy.flex,
        slopes=alibi.slopes(model),
    )
