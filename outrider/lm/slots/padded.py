"""Forwards over padded rows: one row per slot, all as wide as the longest."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.lm.protocol import Extension
from outrider.lm.slots.batch import ForwardBatch, upload
from outrider.lm.slots.cache import SlotCache
from outrider.lm.slots.inputs import Inputs, Outputs, PreparedForward
from outrider.lm.slots.masks import MaskBuilder, look
from outrider.lm.slots.slots import Pending, Slots


@dataclass(frozen=True, kw_only=True)
class PaddedForward(PreparedForward):
    """A forward over the padded rows of a batch."""

    batch: ForwardBatch

    @classmethod
    def of(
        cls,
        batch: ForwardBatch,
        grown: Mapping[int, Pending],
        slots: Slots,
        builder: MaskBuilder,
        *,
        pad_to: int,
        replayed: bool,
        maskless: bool,
    ) -> "PaddedForward":
        """The forward over a batch.

        Args:
            grown: What will be pending in each slot.
            pad_to: Logits are computed for at least this many columns.
            replayed: Whether the forward may be replayed.
            maskless: Whether the forward may run without masks, if its nodes are chains.
        """
        names, cache, end = batch.slots, slots.cache, None
        used = [slots[s].length + len(grown[s]) for s in names]
        sight = None
        if batch.fills_one_row and grown[names[0]].chain and batch.segments[0].sees is None:
            positions = builder.keys(used[0])[used[0] - batch.width :][None]
            written = cache.run(names[0], used[0], positions)
        else:
            places = cache.places(names, used, batch.counts, batch.width)
            lengths, pendings = [slots[s].length for s in names], [grown[s] for s in names]
            sight = look(lengths, pendings, batch.counts, batch.width, [s.sees for s in batch.segments])
            written, positions = upload([places, sight.positions], builder.device)
        if maskless and (reach := _common_end(batch, used, grown, cache)) is not None and builder.needs_none(reach):
            end = reach
        view = cache.view(max(used), doubling=replayed) if end is None else end
        inputs = Inputs(
            batch=batch,
            positions=positions,
            masks=builder.masks(sight, positions, view, causal=end is not None),
            window=cache.window(names, written, view),
            columns=batch.columns(pad_to),
            causal=end is not None,
            rows=[cache.row(slot) for slot in names] if replayed else (),
            places=written if replayed else None,
        )
        return cls(batch=batch, inputs=inputs)

    def extension(self, outputs: Outputs, vocab_size: int) -> Extension:
        batch = self.batch
        return Extension(
            logits=batch.packed(outputs.logits[..., :vocab_size], outputs.columns, batch.wanted()),
            taps=batch.packed_taps(outputs.taps),
            features=None if outputs.features is None else batch.all_nodes(outputs.features),
        )


def _common_end(batch: ForwardBatch, used: Sequence[int], grown: Mapping[int, Pending], cache: SlotCache) -> int | None:
    """How many keys there are up to the last column, if the new nodes of each row are a chain behind equally many keys;
    otherwise None.
    """
    if any(not grown[segment.slot].chain or segment.sees is not None for segment in batch.segments):
        return None
    begins = {number - count for number, count in zip(used, batch.counts.tolist(), strict=True)}
    end = min(begins) + batch.width
    return end if len(begins) == 1 and end <= cache.storages[0].shape[1] else None
