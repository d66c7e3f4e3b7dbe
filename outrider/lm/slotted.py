"""A language model over slots: everything of the `LM` protocol except the forward itself."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.lm.attention import MaskBuilder, look
from outrider.lm.batch import Batch, padded_width, upload
from outrider.lm.cache import SlotCache
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots import Content, Slot, Slots, SlotTable


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The inputs of one forward. The cache knows where to write.

    Attributes:
        batch: The segments, padded.
        positions: Position of each column's node.
        masks: Which keys each column sees.
        columns: The columns whose logits are computed, at least.
    """

    batch: Batch
    positions: Int[Tensor, "rows width"]
    masks: object
    columns: Int[np.ndarray, " columns"]


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
    rounding. Rows of one forward may be ragged: all are padded to the longest, and long ones to one of few sizes. All
    methods run in inference mode.

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
    _doubling = False

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

        Raises:
            RuntimeError: A slot would hold more than `max_context` tokens, pending nodes included.
        """
        if any(not 0 <= k < self.num_taps for k in taps):
            raise ValueError(f"taps must be in 0..{self.num_taps - 1}, got {list(taps)}")
        grown = self._slots.grown(segments)
        given = [s for s in segments if s.tokens.shape[0]]
        if not given:
            return self._empty(taps)
        self.cache.gather([s.slot for s in given])
        batch = Batch.of(given, self.cache.row, self._width)
        slots = batch.slots
        used = [self._slots[s].length + len(grown[s]) for s in slots]
        sight = None
        if batch.fills_one_row and grown[slots[0]].chain and batch.segments[0].sees is None:
            positions = self._builder.keys(used[0])[used[0] - batch.width :][None]
            written = self.cache.run(slots[0], used[0], positions)
        else:
            places = self.cache.places(slots, used, batch.counts, batch.width)
            lengths, pendings = [self._slots[s].length for s in slots], [grown[s] for s in slots]
            sight = look(lengths, pendings, batch.counts, batch.width, [s.sees for s in batch.segments])
            written, positions = upload([places, sight.positions], self.device)
        view = self.cache.view(max(used), doubling=self._doubling)
        self.cache.prepare(slots, written, view)
        masks = self._builder.masks(sight, positions, view)
        columns = batch.columns(self.pad_to)
        outputs = self._forward(Inputs(batch=batch, positions=positions, masks=masks, columns=columns), taps)
        self.num_forwards += 1
        for slot in slots:
            self._slots.keep(slot, grown[slot])
        logits = outputs.logits[..., : self.vocab_size]
        return Extension(
            logits=batch.packed(logits, outputs.columns, batch.wanted()),
            taps=batch.packed_taps(outputs.taps),
            features=None if outputs.features is None else batch.all_nodes(outputs.features),
        )

    def _width(self, count: int) -> int:
        """Number of columns of a forward over this many nodes."""
        return max(self.pad_to, padded_width(count, doubling=self._doubling))

    def _empty(self, taps: Sequence[int]) -> Extension:
        logits = torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
        hidden = torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return Extension(logits=logits, taps=dict.fromkeys(taps, hidden))
