"""A language model over slots: everything of the `LM` protocol except the forward itself."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.batch import ForwardBatch, padded_width
from outrider.lm.slots.buckets import bucket_width
from outrider.lm.slots.chain import ChainNoise, DrawnTokens, Links
from outrider.lm.slots.inputs import Inputs, Outputs, PreparedForward
from outrider.lm.slots.masks import MaskBuilder
from outrider.lm.slots.padded import PaddedForward
from outrider.lm.slots.slots import OverSlots, Pending, Slot, Slots
from outrider.lm.slots.split import ForwardPrice, in_order
from outrider.lm.slots.stretch import Stretch
from outrider.lm.slots.unpadded import UnpaddedForward
from outrider.lm.slots.whole_chain import Replaying, WholeChain


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
        if taps and any(not 0 <= k < self.num_taps for k in taps):
            raise ValueError(f"taps must be in 0..{self.num_taps - 1}, got {list(taps)}")
        grown = self._slots.grown(segments)
        filled = [s for s in segments if s.tokens.shape[0]]
        if not filled:
            return self._empty(taps)
        apart: Sequence[int] = ()
        price = self._price
        if price is not None and len(filled) > 1 and len(filled) * self.cache.capacity > price.least:
            # Replayed forwards stay among the few sizes that are recorded.
            replayed = self._common_width(filled, len(filled)) is not None
            used = [self._slots[s.slot].length + len(grown[s.slot]) for s in filled]
            apart = price.apart(used, self.cache, replayed=replayed)
        if apart:
            extension = self._parted(filled, grown, taps, apart)
        else:
            extension = self._run(self._prepared(self._batch(filled), grown, taps), taps)
        for segment in filled:
            self._slots.keep(segment.slot, grown[segment.slot])
        return extension

    def _run(self, forward: PreparedForward, taps: Sequence[int] = ()) -> Extension:
        outputs = self._forward(forward.inputs, taps)
        self.num_forwards += 1
        return forward.extension(outputs, self.vocab_size)

    def _prepared(
        self, batch: ForwardBatch, grown: Mapping[int, Pending], taps: Sequence[int] = ()
    ) -> PaddedForward | UnpaddedForward:
        """The forward over a batch, with or without padding; `grown` is what will be pending."""
        slots, builder, pad_to = self._slots, self._builder, self.pad_to
        if len(batch.segments) > 1 and self._runs_unpadded(batch, taps):
            width = self._width(int(batch.counts.sum()))
            return UnpaddedForward.of(batch, grown, slots, builder, pad_to=pad_to, width=width)
        replayed = self._replaying is not None and not batch.prefill_only
        replayed = replayed and self._replayed_width(batch.width, len(batch.segments)) == batch.width
        # A recorded forward has a place for a mask.
        masked = replayed or self._maskless_from is None or batch.width < self._maskless_from
        maskless = not masked and self._runs_without_mask(batch)
        return PaddedForward.of(batch, grown, slots, builder, pad_to=pad_to, replayed=replayed, maskless=maskless)

    def _runs_unpadded(self, batch: ForwardBatch, taps: Sequence[int]) -> bool:
        """Whether a forward over such a batch is computed for its nodes alone, and not for padding."""
        return False

    def _runs_without_mask(self, batch: ForwardBatch) -> bool:
        """Whether a forward over such a batch may run without masks, if its nodes are chains."""
        return False

    @torch.inference_mode()
    def repeated(self, segments: Sequence[Segment]) -> Callable[[], Outputs]:
        """The forward that `extend` would make over these segments, to be made again and again; the slots stay as they
        are. For measurements.
        """
        inputs = self._prepared(self._batch(segments), self._slots.grown(segments)).inputs
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
            forward = self._prepared(ForwardBatch.of(part, cache.row, columns), grown, taps)
            extensions.append(self._run(forward, taps))
        return in_order(extensions, parts, segments)

    @property
    def replays(self) -> bool:
        """Whether forwards, and whole chains of them, are replayed."""
        return self._replaying is not None and self._replaying.works

    def _replayed_width(self, count: int, rows: int) -> int | None:
        """Columns of a forward that is replayed; None where it is not."""
        return bucket_width(max(self.pad_to, count), rows) if self.replays else None

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
        chain = WholeChain.of(slots, counts, features, self._slots, self._builder, width=width)
        drawn = self._replaying.draw_chain(chain, tokens, links, noise)
        if drawn is not None:
            self.num_forwards += max(counts)
            for slot, pending in grown.items():
                self._slots.keep(slot, pending)
        return drawn

    def _stretch(self, slots: Sequence[int], steps: int) -> Stretch:
        """Get the next `steps` forwards over the same slots ready."""
        width = self._replayed_width(1, len(slots))
        if replayed := width is not None:
            self.cache.gather_in_front(slots)
        else:
            self.cache.gather(slots)
        width = self._width(1) if width is None else width
        return Stretch.of(slots, steps, self._slots, self._builder, width=width, replayed=replayed)

    def _width(self, count: int) -> int:
        """Number of columns of a forward over this many nodes that is not replayed."""
        return max(self.pad_to, padded_width(count))

    def _empty(self, taps: Sequence[int]) -> Extension:
        logits = torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
        hidden = torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return Extension(logits=logits, taps=dict.fromkeys(taps, hidden))


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
        self._stretch: Stretch | None = None
        self._step = self._steps = 0

    @torch.inference_mode()
    def __call__(self, tokens: Int[Tensor, " n"], features: Float[Tensor, "n dim"] | None = None) -> Extension:
        """Append the next node to each slot whose chain has not ended. The logits are those after these nodes.

        Args:
            tokens: One token for each of these slots, in their order.
            features: The vector that a head reads with each token.
        """
        lm = self._lm
        if self._stretch is None or self._step == self._steps:
            self._left = {slot: count - self._step for slot, count in self._left.items() if count > self._step}
            self._step, self._steps = 0, min(self._left.values())
            self._stretch = lm._stretch(list(self._left), self._steps)
        extension = lm._run(self._stretch.forward(self._step, tokens, features))
        self._step += 1
        if self._step == self._steps:
            for slot in self._stretch.slots:
                lm._slots.keep(slot, lm._slots.longer(slot, self._step))
        return extension
