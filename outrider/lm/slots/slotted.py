"""A language model over slots: everything of the `LM` protocol except the forward itself."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.batch import ForwardBatch, OneEach, Padded, padded_width, upload
from outrider.lm.slots.buckets import bucket_width
from outrider.lm.slots.cache import SlotCache
from outrider.lm.slots.chain import ChainNoise, DrawnTokens, Links
from outrider.lm.slots.layout import Layout, NodeOrder
from outrider.lm.slots.masks import MaskBuilder, look
from outrider.lm.slots.slots import Content, Pending, Slot, Slots, SlotTable
from outrider.lm.slots.split import ForwardPrice, in_order, rows_apart
from outrider.lm.slots.window import Window


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one forward.

    Attributes:
        batch: The new nodes, padded.
        positions: Position of each column's node.
        masks: Which keys each column sees.
        window: What the forward reads and extends.
        columns: The columns whose logits are computed, at least.
        causal: Whether the nodes are the last ones of what is read, so that layers that see all before need no mask.
        rows: The row of the cache of each row, where the forward may be replayed.
        places: Where the new nodes go, counted from the begin of the cache; None: the forward is not to be replayed.
        layout: Where the nodes of a forward without padding stand in the rows of the masks. Such a forward has one row,
            and its columns are the nodes of all slots. None: the nodes are padded.
    """

    batch: ForwardBatch | OneEach | Padded
    positions: Int[Tensor, "rows width"]
    masks: object
    window: Window
    columns: Int[np.ndarray, " columns"]
    causal: bool = False
    rows: Sequence[int] = ()
    places: Int[Tensor, "rows width"] | None = None
    layout: Layout | None = None


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The results of one forward, padded.

    Attributes:
        logits: Logits of the columns.
        columns: The columns that were computed, at least the wanted ones.
        taps: The hidden states that were asked for.
        features: A head's output features.
    """

    logits: Float[Tensor, "rows columns vocab"]
    columns: Int[np.ndarray, " columns"]
    taps: Mapping[int, Float[Tensor, "rows width hidden"]] = field(default_factory=dict)
    features: Float[Tensor, "rows width features"] | None = None


@dataclass(frozen=True, kw_only=True)
class WholeChain:
    """The inputs of a chain that is drawn in one go. Its rows are the first ones of the cache.

    Attributes:
        positions: Per forward, the position of each column's node.
        places: Where they go, counted from the begin of the cache.
        masks: Which keys each column sees, all forwards one after another.
        view: How many keys they read.
        rows: For each of the caller's slots, its row.
        features: The vector that each slot's first token is read with; None where tokens are read alone.
    """

    positions: Int[Tensor, "steps rows width"]
    places: Int[Tensor, "steps rows width"]
    masks: object
    view: int
    rows: Sequence[int]
    features: Float[Tensor, "n dim"] | None


@runtime_checkable
class Replaying(Protocol):
    """Records forwards and chains of forwards, and replays them.

    Attributes:
        works: Whether it can; False once something could not be recorded.
    """

    @property
    def works(self) -> bool: ...

    def draw_chain(
        self, chain: WholeChain, tokens: Int[Tensor, " n"], links: Links, noise: ChainNoise | None
    ) -> DrawnTokens | None:
        """Run all forwards and draws of a chain; None where they cannot be recorded."""
        ...


class OverSlots(Generic[Content]):
    """The base of all models over slots.

    Attributes:
        max_slots: Most slots at once.
    """

    _slots: SlotTable[Content]

    @property
    def cache(self) -> SlotCache:
        """Where keys and values lie."""
        return self._slots.cache

    @property
    def max_slots(self) -> int:
        return self._slots.max_slots

    @property
    def bytes_moved(self) -> int:
        """Bytes of the cache copied so far: accepted paths moved into place, slots moved or copied."""
        return self.cache.bytes_moved

    @property
    def possible_context(self) -> int:
        """The largest `max_context` that may be asked for; more than `max_context` if memory is short for all slots."""
        return self._slots.room.possible_context

    @property
    def overcommitted(self) -> bool:
        """Whether slots of `max_context` tokens do not fit all at once."""
        return self._slots.room.most_bytes is not None

    def holds(self, lengths: Sequence[int]) -> bool:
        """Whether slots of so many tokens each, and their pending nodes, fit in memory at once."""
        return self._slots.holds(lengths)

    def release(self, slot: int, *, clean: bool = False) -> None:
        """Release the slot; with `clean` overwrite its cache, which may hold NaN."""
        self._slots.release(slot, clean=clean)

    def length(self, slot: int) -> int:
        """Committed tokens of a slot."""
        return self._slots[slot].length

    def keys_values(
        self, slot: int, layer: int
    ) -> tuple[Float[Tensor, "length heads dim"], Float[Tensor, "length heads value_dim"]]:
        """A slot's committed keys and values in a layer: read-only views, valid until the model's next call.

        Raises:
            KeyError: The layer keeps none of its own.
        """
        return self.cache.keys_values(slot, layer, self.length(slot))


class SlottedLM(OverSlots[Slot]):
    """Slots, batches and masks around one forward, which a subclass computes.

    Every node's logits are those of a plain causal run over its slot's committed tokens and its own root path, up to
    rounding. Rows of one forward may be ragged. All are padded to the longest, and long ones to one of few sizes,
    unless the forward can do without. All methods run in inference mode.

    Attributes:
        vocab_size: Width of the logits.
        max_context: Most tokens of one slot, pending nodes included.
        max_slots: Most slots at once.
        crops: True: dropping pending nodes costs nothing.
        device: Where the model is.
        dtype: Its floating type.
        num_taps: Taps are numbered below this.
        hidden_size: Width of the hidden states.
        pad_to: Rows are padded to at least this many columns.
        num_forwards: Forwards made so far.
    """

    crops = True
    chains_only: str | None = None
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    num_taps: int
    hidden_size: int
    pad_to: int
    num_forwards: int
    _slots: Slots
    _builder: MaskBuilder
    _replaying: Replaying | None = None
    _maskless_from: int | None = None
    """Fewest columns of a forward over chains that has no mask; None where all have one."""
    _price: ForwardPrice | None = None
    """What a second forward costs; None: there is always one."""

    @property
    @abstractmethod
    def modules(self) -> Mapping[str, nn.Module]:
        """The modules that it computes with, by name."""

    @abstractmethod
    def _forward(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        """Compute logits of at least `inputs.columns`, the taps, and a head's output features."""

    @property
    def max_context(self) -> int:
        return self._slots.max_context

    @property
    def num_bytes(self) -> int:
        """Memory that the cache holds now."""
        return self.cache.num_bytes

    def open(self) -> int:
        """Take a free slot, empty. Raises RuntimeError when none is free."""
        return self._slots.open(Slot())

    def truncate(self, slot: int, length: int) -> None:
        """Forget committed tokens from `length` on, and all pending nodes."""
        self._slots.truncate(slot, length)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Per slot, keep the pending nodes of one root path, by number and in order; drop the other pending nodes.

        Slots that are not named keep their pending nodes. If the path is already in place, as the accepted part of a
        chain is, no memory moves.
        """
        self._slots.commit(paths)

    def copy(self, source: int, length: int) -> int:
        """A new slot with the first `length` committed tokens of another. Raises RuntimeError when none is free."""
        return self._slots.copy(source, length)

    @torch.inference_mode()
    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        """Append nodes to several slots in one forward. Each slot at most once; lengths and trees may differ.

        Where some slots are so much longer than the others that two forwards read less, there are two.

        Raises:
            RuntimeError: A slot would hold more than `max_context` tokens, pending nodes included.
        """
        if any(not 0 <= k < self.num_taps for k in taps):
            raise ValueError(f"taps must be in 0..{self.num_taps - 1}, got {list(taps)}")
        grown = self._slots.grown(segments)
        filled = [s for s in segments if s.tokens.shape[0]]
        if not filled:
            return self._empty(taps)
        apart: Sequence[int] = ()
        price, most = self._price, len(filled) * self._slots.cache.capacity
        if price is not None and len(filled) > 1 and most > price.least:
            apart = self._apart(filled, grown, price)
        extension = self._parted(filled, grown, taps, apart) if apart else self._run(self._batch(filled), grown, taps)
        for segment in filled:
            self._slots.keep(segment.slot, grown[segment.slot])
        return extension

    def _run(self, batch: ForwardBatch, grown: Mapping[int, Pending], taps: Sequence[int]) -> Extension:
        """One forward over a batch; `grown` is what will be pending."""
        if len(batch.segments) > 1 and self._runs_unpadded(batch, taps):
            return self._run_unpadded(batch, grown, taps)
        outputs = self._forward(self._inputs(batch, grown), taps)
        self.num_forwards += 1
        logits = outputs.logits[..., : self.vocab_size]
        return Extension(
            logits=batch.packed(logits, outputs.columns, batch.wanted()),
            taps=batch.packed_taps(outputs.taps),
            features=None if outputs.features is None else batch.all_nodes(outputs.features),
        )

    def _runs_unpadded(self, batch: ForwardBatch, taps: Sequence[int]) -> bool:
        """Whether a forward over such a batch is computed for its nodes alone, and not for padding."""
        return False

    def _run_unpadded(self, batch: ForwardBatch, grown: Mapping[int, Pending], taps: Sequence[int]) -> Extension:
        """One forward without padding. Its nodes stand in the caller's order of segments."""
        count, wanted = int(batch.counts.sum()), sum(s.num_wanted for s in batch.segments)
        outputs = self._forward(self._unpadded_inputs(batch, grown), taps)
        self.num_forwards += 1
        return Extension(
            logits=outputs.logits[0, :wanted, : self.vocab_size],
            taps={tap: states[0, :count] for tap, states in outputs.taps.items()},
        )

    def _unpadded_inputs(self, batch: ForwardBatch, grown: Mapping[int, Pending]) -> Inputs:
        """The inputs of a forward without padding. As many nodes more as make up one of few sizes repeat the last."""
        slots, cache = batch.slots, self.cache
        used = [self._slots[s].length + len(grown[s]) for s in slots]
        lengths, pendings = [self._slots[s].length for s in slots], [grown[s] for s in slots]
        sight = look(lengths, pendings, batch.counts, batch.width, [s.sees for s in batch.segments])
        written = cache.places(slots, used, batch.counts, batch.width)
        order = NodeOrder.of(batch.counts, batch.order, batch.width)
        count = len(order.places)
        more = np.full(self._width(count) - count, order.places[-1])
        places = np.concatenate([order.places, more])
        where = written.ravel()[places]
        where[count:] = cache.row(slots[0]) * cache.capacity + cache.capacity - 1
        by_caller = [batch.segments[row] for row in batch.order]
        tokens = torch.cat([segment.tokens.to(self.device, torch.long) for segment in by_caller])
        columns = np.concatenate(
            [start + np.array(s.wanted, dtype=np.int64) for start, s in zip(order.first, by_caller, strict=True)]
        )
        positions = sight.positions
        seen_from, nodes, at, where_at, node_positions = upload(
            [positions, order.nodes, places, where, positions.ravel()[places]], self.device
        )
        view = cache.view(max(used))
        return Inputs(
            batch=Padded(ids=torch.cat([tokens, tokens[-1:].expand(len(more))])[None], vectors=None),
            positions=node_positions[None],
            masks=self._builder.masks(sight, seen_from, view),
            window=cache.window(slots, where_at, view),
            columns=np.concatenate([columns, np.zeros(max(0, self.pad_to - len(columns)), dtype=np.int64)]),
            layout=Layout(nodes=nodes, places=at),
        )

    @torch.inference_mode()
    def repeated(self, segments: Sequence[Segment]) -> Callable[[], Outputs]:
        """The forward that `extend` would make over these segments, to be made again and again; the slots stay as they
        are. For measurements.
        """
        batch, grown = self._batch(segments), self._slots.grown(segments)
        inputs = self._unpadded_inputs(batch, grown) if self._runs_unpadded(batch, ()) else self._inputs(batch, grown)
        return torch.inference_mode()(lambda: self._forward(inputs, ()))

    def _batch(self, segments: Sequence[Segment]) -> ForwardBatch:
        """The batch of a forward over segments that are not empty."""
        slots, cache = [s.slot for s in segments], self.cache
        if (width := self._common_width(segments, len(segments))) is not None:
            cache.gather_in_front(slots)
            return ForwardBatch.of(segments, cache.row, lambda _: width)
        cache.gather(slots)
        return ForwardBatch.of(segments, cache.row, self._width)

    def _common_width(self, segments: Sequence[Segment], rows: int) -> int | None:
        """Columns of a forward over these segments, if it is replayed with so many rows; otherwise None."""
        if self._replaying is None or not any(s.num_wanted for s in segments):
            return None
        return self._replayed_width(max(s.tokens.shape[0] for s in segments), rows)

    def _apart(self, segments: Sequence[Segment], grown: Mapping[int, Pending], price: ForwardPrice) -> Sequence[int]:
        """Which segments get a forward of their own, because their slots are much longer than the others; often none.

        Replayed forwards stay among the few sizes that are recorded.
        """
        used = [self._slots[s.slot].length + len(grown[s.slot]) for s in segments]
        replayed = self._common_width(segments, len(segments)) is not None
        longest = sorted(range(len(segments)), key=lambda i: -used[i])
        views = [self.cache.view(used[i], doubling=replayed) for i in longest]
        return sorted(longest[: rows_apart(views, price.keys(replayed=replayed), replayed=replayed)])

    def _parted(
        self, segments: Sequence[Segment], grown: Mapping[int, Pending], taps: Sequence[int], apart: Sequence[int]
    ) -> Extension:
        """The results of two forwards, the first of them over the segments `apart`."""
        cache, parts = self.cache, [apart, [i for i in range(len(segments)) if i not in apart]]
        parted = [[segments[i] for i in part] for part in parts]
        widths = [self._common_width(part, len(segments)) for part in parted]
        slots = [[s.slot for s in part] for part in parted]
        cache.line_up(slots[0], slots[1], in_front=any(width is not None for width in widths))
        extensions = []
        for part, width in zip(parted, widths, strict=True):
            columns = self._width if width is None else lambda _, width=width: width
            extensions.append(self._run(ForwardBatch.of(part, cache.row, columns), grown, taps))
        return in_order(extensions, parts, segments)

    @property
    def replays(self) -> bool:
        """Whether forwards, and whole chains of them, are replayed."""
        return self._replaying is not None and self._replaying.works

    def _replayed_width(self, count: int, rows: int) -> int | None:
        """Columns of a forward that is replayed; None where it is not."""
        return bucket_width(max(self.pad_to, count), rows) if self.replays else None

    def _inputs(self, batch: ForwardBatch, grown: Mapping[int, Pending]) -> Inputs:
        """The inputs of a forward over a batch; `grown` is what will be pending."""
        slots, cache = batch.slots, self.cache
        used = [self._slots[s].length + len(grown[s]) for s in slots]
        sight = None
        if batch.fills_one_row and grown[slots[0]].chain and batch.segments[0].sees is None:
            positions = self._builder.keys(used[0])[used[0] - batch.width :][None]
            written = cache.run(slots[0], used[0], positions)
        else:
            places = cache.places(slots, used, batch.counts, batch.width)
            lengths, pendings = [self._slots[s].length for s in slots], [grown[s] for s in slots]
            sight = look(lengths, pendings, batch.counts, batch.width, [s.sees for s in batch.segments])
            written, positions = upload([places, sight.positions], self.device)
        replayed = self._replaying is not None and not batch.prefill_only
        replayed = replayed and self._replayed_width(batch.width, len(slots)) == batch.width
        # A recorded forward has a place for a mask.
        masked = replayed or self._maskless_from is None or batch.width < self._maskless_from
        end = None if masked else self._maskless_end(batch, used, grown)
        view = cache.view(max(used), doubling=replayed) if end is None else end
        return Inputs(
            batch=batch,
            positions=positions,
            masks=self._builder.masks(sight, positions, view, causal=end is not None),
            window=cache.window(slots, written, view),
            columns=batch.columns(self.pad_to),
            causal=end is not None,
            rows=[cache.row(slot) for slot in slots] if replayed else (),
            places=written if replayed else None,
        )

    def _runs_without_mask(self, batch: ForwardBatch) -> bool:
        """Whether a forward over such a batch may run without masks, if its nodes are chains."""
        return False

    def _maskless_end(self, batch: ForwardBatch, used: Sequence[int], grown: Mapping[int, Pending]) -> int | None:
        """How many keys there are up to the last column, if the forward needs no masks: the new nodes of each row are a
        chain behind equally many keys. Otherwise None.
        """
        if not self._runs_without_mask(batch):
            return None
        if any(not grown[segment.slot].chain or segment.sees is not None for segment in batch.segments):
            return None
        begins = {number - count for number, count in zip(used, batch.counts.tolist(), strict=True)}
        end = min(begins) + batch.width
        fits = len(begins) == 1 and end <= self.cache.storages[0].shape[1]
        return end if fits and self._builder.needs_none(end) else None

    def chain(self, slots: Sequence[int], counts: Sequence[int]) -> "SlotChain":
        """Get ready to extend each slot by `counts[i]` nodes, one per forward, each the child of the one before.

        The nodes of a slot are pending once its chain has come to its end.

        Raises:
            RuntimeError: A slot would hold more than `max_context` tokens.
            ValueError: The pending nodes of a slot branch.
        """
        for slot, count in zip(slots, counts, strict=True):
            if not self._slots.longer(slot, count).chain:
                raise ValueError(f"the pending nodes of slot {slot} branch, and a chain cannot continue them")
        return SlotChain(self, slots, counts)

    @torch.inference_mode()
    def draw_chain(
        self,
        slots: Sequence[int],
        counts: Sequence[int],
        tokens: Int[Tensor, " n"],
        features: Float[Tensor, "n dim"] | None,
        links: Links,
        noise: ChainNoise | None,
    ) -> DrawnTokens | None:
        """Extend each slot by a chain of `counts[i]` nodes and draw the tokens in between, without any Python in
        between. None where forwards are not replayed; then nothing has changed.

        The nodes are pending afterwards. The token behind the last one is drawn too.

        Args:
            tokens: The first token of each chain.
            features: The vector that each of them is read with; None where tokens are read alone.
            links: What the drafter does between two forwards.
            noise: How the tokens are drawn; None takes the likeliest ones.
        """
        grown = {slot: self._slots.longer(slot, count) for slot, count in zip(slots, counts, strict=True) if count}
        width, branches = self._replayed_width(1, len(slots)), not all(each.chain for each in grown.values())
        if self._replaying is None or width is None or branches:
            return None
        self.cache.gather_in_front(slots)
        chain = self._whole_chain(slots, counts, width, features)
        drawn = self._replaying.draw_chain(chain, tokens, links, noise)
        if drawn is not None:
            self.num_forwards += max(counts)
            for slot, pending in grown.items():
                self._slots.keep(slot, pending)
        return drawn

    def _whole_chain(
        self, slots: Sequence[int], counts: Sequence[int], width: int, features: Float[Tensor, "n dim"] | None
    ) -> WholeChain:
        """The inputs of a chain behind some slots, in one transfer. Rows whose chain has ended, and the rows of other
        slots, write to the place that belongs to no slot.
        """
        steps, used = max(counts), [self._slots[slot].used for slot in slots]
        ends = [n + count for n, count in zip(used, counts, strict=True)]
        nodes = self.cache.places(slots, ends, np.array(counts), steps)
        rows = [self.cache.row(slot) for slot in slots]
        num_rows = self.cache.bucket(rows)
        places = np.broadcast_to(self.cache.padding(num_rows)[:, None], (steps, num_rows, width)).copy()
        places[:, rows, 0] = nodes.T
        positions = np.zeros((steps, num_rows, width), dtype=np.int64)
        # No position lies behind the end of its chain: the model may have none.
        last = np.maximum(np.array(ends) - 1, 0)
        positions[:, rows] = np.minimum(np.array(used) + np.arange(steps)[:, None], last)[:, :, None]
        written, where = upload([places, positions], self.device)
        view = self.cache.view(max(ends), doubling=True)
        return WholeChain(
            positions=where,
            places=written,
            masks=self._builder.masks(None, where.flatten(0, 1), view),
            view=view,
            rows=rows,
            features=features,
        )

    def _stretch(self, slots: Sequence[int], steps: int) -> "_Stretch":
        """Get the next `steps` forwards over the same slots ready; one transfer to the device."""
        cache = self.cache
        if (width := self._replayed_width(1, len(slots))) is None:
            width = self._width(1)
            cache.gather(slots)
        else:
            cache.gather_in_front(slots)
        order = sorted(range(len(slots)), key=lambda i: cache.row(slots[i]))
        by_row = [slots[i] for i in order]
        used = [self._slots[slot].used for slot in by_row]
        if len(slots) == width == 1:
            run = self._builder.keys(used[0] + steps)[used[0] :][:, None]
            written = cache.run(slots[0], used[0] + steps, run)
            return self._ready(by_row, max(used), written[:, None], run[:, None])
        # One column per forward; padding is written to the place of the column behind them.
        places = cache.places(by_row, [n + steps for n in used], np.full(len(slots), steps), steps + 1)
        number = np.arange(steps)[:, None]
        column = np.where(np.arange(width) == 0, number, steps)
        moved = order != list(range(len(order)))
        arrays = [
            np.ascontiguousarray(places[:, column].swapaxes(0, 1)),
            np.broadcast_to((np.array(used) + number)[:, :, None], (steps, len(slots), width)),
            *([np.array(order), np.argsort(order)] if moved else []),
        ]
        written, positions, *orders = upload(arrays, self.device)
        return self._ready(by_row, max(used), written, positions, *orders)

    def _ready(
        self,
        slots: Sequence[int],
        used: int,
        written: Int[Tensor, "steps rows width"],
        positions: Int[Tensor, "steps rows width"],
        order: Int[Tensor, " rows"] | None = None,
        back: Int[Tensor, " rows"] | None = None,
    ) -> "_Stretch":
        replayed = self._replayed_width(1, len(slots)) is not None
        views = [self.cache.view(used + k, doubling=replayed) for k in range(1, len(positions) + 1)]
        return _Stretch(
            slots=slots,
            rows=[self.cache.row(slot) for slot in slots] if replayed else (),
            places=written.unbind(0),
            positions=positions.unbind(0),
            views=views,
            masks=self._builder.chained(positions, views),
            columns=np.arange(positions.shape[2]),
            order=order,
            back=back,
        )

    def _chained(
        self, stretch: "_Stretch", step: int, tokens: Int[Tensor, " n"], features: Float[Tensor, "n dim"] | None
    ) -> Extension:
        """One forward of a chain."""
        if stretch.order is not None:
            tokens = tokens.to(self.device, non_blocking=True)[stretch.order]
            features = None if features is None else features[stretch.order]
        positions, view = stretch.positions[step], stretch.views[step]
        inputs = Inputs(
            batch=OneEach(nodes=tokens, vectors=features, width=len(stretch.columns)),
            positions=positions,
            masks=stretch.masks[step],
            window=self.cache.window(stretch.slots, stretch.places[step], view),
            columns=stretch.columns,
            rows=stretch.rows,
            places=stretch.places[step] if stretch.rows else None,
        )
        outputs = self._forward(inputs, ())
        self.num_forwards += 1
        if step == len(stretch.views) - 1:
            for slot in stretch.slots:
                self._slots.keep(slot, self._slots.longer(slot, step + 1))
        logits, vectors = outputs.logits[:, 0, : self.vocab_size], outputs.features
        if vectors is not None:
            vectors = vectors[:, 0] if stretch.back is None else vectors[stretch.back, 0]
        return Extension(logits=logits if stretch.back is None else logits[stretch.back], taps={}, features=vectors)

    def _width(self, count: int) -> int:
        """Number of columns of a forward over this many nodes that is not replayed."""
        return max(self.pad_to, padded_width(count))

    def _empty(self, taps: Sequence[int]) -> Extension:
        logits = torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
        hidden = torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return Extension(logits=logits, taps=dict.fromkeys(taps, hidden))


@dataclass(frozen=True, kw_only=True)
class _Stretch:
    """Forwards of a chain over the same slots. Per forward: where it writes, its positions, how many keys it reads and
    which of them it sees.

    Attributes:
        slots: One per row.
        rows: Their rows of the cache, where the forwards may be replayed.
        columns: The columns of each forward; the nodes are in the first.
        order: For each row, which of the caller's slots lies there; None where rows are in the caller's order.
        back: For each of the caller's slots, its row; None as above.
    """

    slots: Sequence[int]
    rows: Sequence[int]
    places: Sequence[Int[Tensor, "rows width"]]
    positions: Sequence[Int[Tensor, "rows width"]]
    views: Sequence[int]
    masks: Sequence[object]
    columns: Int[np.ndarray, " width"]
    order: Int[Tensor, " rows"] | None
    back: Int[Tensor, " rows"] | None


class SlotChain:
    """Chains behind several slots, one node per slot and forward, ready to be run; changes in place.

    What the forwards read and write is known before any token is. So nothing is asked of the device in between, and it
    gets new numbers only when a slot's chain ends. Valid as long as the model is not used otherwise.

    Args:
        lm: The model.
        slots: The slots.
        counts: How many nodes each of them gets.
    """

    def __init__(self, lm: SlottedLM, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._lm = lm
        self._left = dict(zip(slots, counts, strict=True))
        self._stretch: _Stretch | None = None
        self._step = 0

    @torch.inference_mode()
    def __call__(self, tokens: Int[Tensor, " n"], features: Float[Tensor, "n dim"] | None = None) -> Extension:
        """Append the next node to each slot whose chain has not ended. The logits are those after these nodes.

        Args:
            tokens: One token for each of these slots, in their order.
            features: The vector that a head reads with each token.
        """
        if self._stretch is None or self._step == len(self._stretch.views):
            used = 0 if self._stretch is None else self._step
            self._left = {slot: count - used for slot, count in self._left.items() if count > used}
            self._stretch = self._lm._stretch(list(self._left), min(self._left.values()))
            self._step = 0
        extension = self._lm._chained(self._stretch, self._step, tokens, features)
        self._step += 1
        return extension
