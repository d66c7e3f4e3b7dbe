"""Which keys each new node sees, as the explicit 4-D masks and positions that a transformers causal LM takes.

Relied on in transformers (read in 5.17 - 5.23, run in 5.23):

- `forward` takes a 4-D `attention_mask` `[batch, 1, queries, keys]` as it is, for sliding layers too; where the text
  config has `layer_types` it takes a dict with one mask per distinct type (`masking_utils.create_masks_for_generate`);
- `config._attn_implementation`: "sdpa" reads a bool mask, "eager" ADDS the mask (a bool mask is silently wrong),
  "flex_attention" takes a `BlockMask` (see `flex`);
- `config.sliding_window`: a query at position t sees keys at positions above t - window; a model without layer types
  has such layers if its decoder's module imports `create_sliding_window_causal_mask` (for chunks:
  `create_chunked_causal_mask`);
- `config.attention_chunk_size`: a query sees keys of its own chunk of positions only (Llama 4).
"""

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import PreTrainedModel

from outrider.lm import flex

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""The layer types whose masks are known here."""
RECURRENT_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding", "mamba")
"""The layer types that keep a state; in a `hybrid` layer, attention stands beside it."""
NO_ATTENTION = ("linear_attention", "conv", "mamba", "moe", "mlp")
"""The layer types of hybrid models that keep no keys and values."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """How far a kind of layer looks back, in positions; all None looks back to the beginning.

    Attributes:
        window: A query at t sees positions above t - window.
        chunk: A query at t sees positions of chunk t // chunk only.
    """

    window: int | None = None
    chunk: int | None = None


def spans(model: PreTrainedModel) -> Span | Mapping[str, Span]:
    """One span per layer type where the model takes a dict of masks, else the one that all layers share.

    A window or a chunk that stands in a config whose model never asks for such a mask is ignored, as the model does.
    """
    text = model.config.get_text_config(decoder=True)
    window, chunk = getattr(text, "sliding_window", None), getattr(text, "attention_chunk_size", None)
    if hasattr(text, "layer_types"):
        kinds = {
            "full_attention": Span(),
            "sliding_attention": Span(window=window),
            "chunked_attention": Span(chunk=chunk),
        }
        return {kind: kinds[kind] for kind in dict.fromkeys(text.layer_types)}
    asked = vars(sys.modules[type(model.get_decoder()).__module__])
    if window is not None and "create_sliding_window_causal_mask" in asked:
        return Span(window=window)
    if chunk is not None and "create_chunked_causal_mask" in asked:
        return Span(chunk=chunk)
    return Span()


def attention_span(model: PreTrainedModel) -> Span | Mapping[str, Span | None] | None:
    """The span that all attention layers of a hybrid model share; None where it has no attention.

    Hybrids take one 4-D mask for all attention layers as it is, and then give their recurrent layers none. Those with
    two kinds of attention take a dict, in which recurrent layers have no mask.
    """
    text = model.config.get_text_config(decoder=True)
    if not hasattr(text, "layer_types"):
        # RecurrentGemma in older transformers: all its attention looks back by the window.
        return Span(window=text.sliding_window)
    kinds = {t for t in text.layer_types if t not in NO_ATTENTION}
    if not kinds:
        return None
    if {"sliding_attention", "full_attention"} <= kinds:
        recurrent: dict[str, Span | None] = dict.fromkeys(t for t in text.layer_types if t in NO_ATTENTION)
        return recurrent | {"full_attention": Span(), "sliding_attention": Span(window=text.sliding_window)}
    return Span(window=text.sliding_window if "sliding_attention" in kinds else None)


def _nothing() -> Int[np.ndarray, " nodes"]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class Pending:
    """The nodes behind the committed tokens of one slot, in the order in which they were appended.

    Attributes:
        parents: Number of each node's parent; -1 is the newest committed token.
        depths: Distance from the newest committed token, minus one: the node's position is `length + depth`.
        chain: Whether each node is the child of the one before.
    """

    parents: Int[np.ndarray, " nodes"] = field(default_factory=_nothing)
    depths: Int[np.ndarray, " nodes"] = field(default_factory=_nothing)
    chain: bool = True

    def __len__(self) -> int:
        return len(self.parents)

    def grown(self, count: int, parents: Int[np.ndarray, " new"] | None) -> "Pending":
        """With `count` more nodes; without `parents` they continue a chain from the newest one.

        Raises:
            ValueError: A node's parent is not a number below its own, or there is not one parent per node.
        """
        first = len(self)
        if parents is None or (self.chain and len(parents) == count == 1 and parents[0] == first - 1):
            return self._chained(count)
        parents = np.asarray(parents, dtype=np.int64)
        numbers = np.arange(first, first + count)
        if parents.shape != (count,) or (parents < -1).any() or (parents >= numbers).any():
            raise ValueError(f"parents of nodes {first}..{first + count - 1} must stand before them, got {parents}")
        if self.chain and (parents == numbers - 1).all():
            return self._chained(count)
        above, depths = parents, np.zeros(count, dtype=np.int64)
        while (inside := above >= first).any():
            depths += inside
            above = np.where(inside, parents[np.maximum(above - first, 0)], above)
        if first:
            depths += np.where(above >= 0, self.depths[above] + 1, 0)
        depths = np.concatenate([self.depths, depths])
        return Pending(parents=np.concatenate([self.parents, parents]), depths=depths, chain=False)

    def _chained(self, count: int) -> "Pending":
        first = len(self)
        if self.chain:
            return _chain(first + count)
        depth = int(self.depths[-1]) + 1
        return Pending(
            parents=np.concatenate([self.parents, np.arange(first - 1, first + count - 1)]),
            depths=np.concatenate([self.depths, np.arange(depth, depth + count)]),
            chain=False,
        )

    def is_path(self, path: Sequence[int]) -> bool:
        """Whether these nodes lead, one below the other, from the newest committed token."""
        if self.chain:
            return len(path) <= len(self) and all(node == i for i, node in enumerate(path))
        nodes = np.asarray(path, dtype=np.int64)
        if len(nodes) and (nodes.min() < 0 or nodes.max() >= len(self)):
            return False
        return bool((self.parents[nodes] == np.concatenate([[-1], nodes[:-1]])[: len(nodes)]).all())


@functools.lru_cache(maxsize=1024)
def _chain(count: int) -> Pending:
    """Nodes each of which is the child of the one before."""
    return Pending(parents=np.arange(-1, count - 1), depths=np.arange(count))


@dataclass(frozen=True, kw_only=True)
class Sight:
    """What every query of a padded batch sees, on the host. Column c of a row with n new nodes stands for its node
    `min(c, n - 1)`, so that padding repeats the last node.

    A key's *index* is where it lies behind its slot: committed tokens first, then pending nodes by number. A query sees
    the keys below `base` and, in a row whose pending nodes branch, those pending nodes that `ancestors` marks.

    Attributes:
        positions: Position of each query.
        base: Keys with a lower index are visible.
        start: Index of the first pending node in a row that branches; -1 in other rows.
        depths: Per row that branches, the depth of each pending node; 0 elsewhere.
        ancestors: Per query of a row that branches, its ancestors among the pending nodes and itself. None where no
            row branches.
    """

    positions: Int[np.ndarray, "rows queries"]
    base: Int[np.ndarray, "rows queries"]
    start: Int[np.ndarray, " rows"]
    depths: Int[np.ndarray, "rows pending"]
    ancestors: Bool[np.ndarray, "rows queries pending"] | None


def look(lengths: Sequence[int], pendings: Sequence[Pending], counts: Int[np.ndarray, " rows"], width: int) -> Sight:
    """The sight of the last `counts[r]` pending nodes of each row, padded to `width` columns."""
    first = np.array([len(p) for p in pendings]) - counts
    numbers = first[:, None] + np.minimum(np.arange(width), counts[:, None] - 1)
    behind = np.asarray(lengths)[:, None]
    if all(p.chain for p in pendings):
        positions = behind + numbers
        none = np.zeros((len(pendings), 0), dtype=np.int64)
        return Sight(positions=positions, base=positions + 1, start=none.sum(1) - 1, depths=none, ancestors=None)
    chain = np.array([p.chain for p in pendings])
    size = max(len(p) for p in pendings if not p.chain)
    parents = np.full((len(pendings), size), -1, dtype=np.int64)
    depths = np.zeros((len(pendings), size), dtype=np.int64)
    for r, p in enumerate(pendings):
        if not p.chain:
            parents[r, : len(p)] = p.parents
            depths[r, : len(p)] = p.depths
    ancestors = np.zeros((len(pendings), width, size), dtype=bool)
    rows, columns = np.nonzero(~chain[:, None] & (numbers >= 0))
    nodes = numbers[rows, columns]
    while len(nodes):
        ancestors[rows, columns, nodes] = True
        nodes = parents[rows, nodes]
        rows, columns, nodes = rows[nodes >= 0], columns[nodes >= 0], nodes[nodes >= 0]
    within = np.where(chain[:, None], 0, numbers)
    positions = behind + np.where(chain[:, None], numbers, np.take_along_axis(depths, within, axis=1))
    return Sight(
        positions=positions,
        base=np.where(chain[:, None], positions + 1, behind),
        start=np.where(chain, -1, behind[:, 0]),
        depths=depths,
        ancestors=ancestors,
    )


def upload(arrays: Sequence[Int[np.ndarray, "..."]], device: torch.device) -> list[Int[Tensor, "..."]]:
    """Integer arrays on the device, in one transfer."""
    packed = np.concatenate([a.ravel() for a in arrays]).astype(np.int64, copy=False)
    parts = torch.from_numpy(packed).to(device, non_blocking=True).split([a.size for a in arrays])
    return [part.view(a.shape) for part, a in zip(parts, arrays, strict=True)]


@dataclass(frozen=True, kw_only=True)
class MaskBuilder:
    """Makes the `attention_mask` argument of one model.

    Attributes:
        spans: How far layers look back; a mapping where the model takes a dict of masks, None where one needs none.
        additive: The dtype of additive masks; None gives bool masks, True where a key is seen.
        device: Where masks are wanted.
        blocks: Whether bool masks are wrapped as `BlockMask`s.
        slopes: Per head, what is added per position of a key (ALiBi); the mask then has a head axis. Softmax does not
            see a constant, so a bias by the key's position is one by its distance.
    """

    spans: Span | Mapping[str, Span | None]
    additive: torch.dtype | None
    device: torch.device
    blocks: bool = False
    slopes: Float[Tensor, " heads"] | None = None
    _keys: Int[Tensor, " numbers"] = field(default_factory=lambda: torch.arange(0), repr=False)

    def keys(self, count: int) -> Int[Tensor, " keys"]:
        """The numbers below `count`, as a view of ones that are kept."""
        if self._keys.shape[0] < count:
            fresh = torch.arange(1 << (count - 1).bit_length(), device=self.device)
            object.__setattr__(self, "_keys", fresh)
        return self._keys[:count]

    def masks(
        self, sight: Sight | None, positions: Int[Tensor, "rows queries"], view: int
    ) -> Tensor | BlockMask | Mapping[str, Tensor | BlockMask | None]:
        """Masks over the keys with an index below `view`; `positions` are the sight's, on the device.

        Without a sight, each query sees the keys up to its own position.
        """
        keys = self.keys(view)
        if sight is None or sight.ancestors is None:
            seen, logical = keys <= positions[:, :, None], keys[None]
        else:
            seen, logical = self._tree(sight, keys)
        if isinstance(self.spans, Span):
            return self._masked(seen, positions, logical, self.spans)
        return {
            kind: None if span is None else self._masked(seen, positions, logical, span)
            for kind, span in self.spans.items()
        }

    def _tree(
        self, sight: Sight, keys: Int[Tensor, " keys"]
    ) -> tuple[Bool[Tensor, "rows queries keys"], Int[Tensor, "rows keys"]]:
        """What each query sees, and the position of each key."""
        base, start, depths = upload([sight.base, sight.start, sight.depths], self.device)
        number = keys - start[:, None]
        inside = (start[:, None] >= 0) & (number >= 0) & (number < depths.shape[1])
        number = number.clamp(0, depths.shape[1] - 1)
        ancestors = torch.from_numpy(sight.ancestors).to(self.device, non_blocking=True)
        ancestors = ancestors.gather(2, number[:, None, :].expand(-1, base.shape[1], -1))
        seen = (keys < base[:, :, None]) | (ancestors & inside[:, None, :])
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
        zero = torch.zeros((), dtype=self.additive, device=self.device)
        hidden = torch.finfo(self.additive).min
        if self.slopes is None:
            return torch.where(seen, zero, hidden)
        bias = self.slopes[:, None, None] * logical[:, None, None, :]
        return torch.where(seen, bias.to(self.additive), hidden)


def mask_builder(
    model: PreTrainedModel, spans: Span | Mapping[str, Span | None], slopes: Float[Tensor, " heads"] | None = None
) -> MaskBuilder:
    """The builder of the kind of mask that a model's attention implementation takes."""
    blocks = flex.is_flex(model)
    seen = blocks or model.config.get_text_config(decoder=True)._attn_implementation == "sdpa"
    return MaskBuilder(
        spans=spans, additive=None if seen else model.dtype, device=model.device, blocks=blocks, slopes=slopes
    )
