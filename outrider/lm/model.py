"""A Hugging Face causal language model as the engine sees it: slots, trees of tokens, one forward for all."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.lm import alibi, flex
from outrider.lm.attention import Pending, look, mask_builder, spans, upload
from outrider.lm.cache import Probe, SlotCache, fitting_context, free_bytes
from outrider.lm.compiled import COMPILED, compiled
from outrider.lm.packed import packable, packed
from outrider.lm.protocol import Extension, Segment
from outrider.lm.support import is_recurrent, longest_context, refusal
from outrider.lm.taps import decoder_layers, tapped
from outrider.types import InputError

NOTHING_TAPPED: nullcontext[dict[int, Tensor]] = nullcontext({})
BRANCHES = 512
"""Pending nodes that may lie behind a slot beyond its longest context: side branches, which take room but no depth."""
_TOLERANCE = 1e-2


@dataclass(kw_only=True)
class _Slot:
    """What is known of a slot; replaced or changed by the calls of the model."""

    length: int = 0
    pending: Pending = field(default_factory=Pending)

    @property
    def used(self) -> int:
        return self.length + len(self.pending)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """The padded shape of one forward; rows are sorted by where their slots lie.

    Attributes:
        segments: One per row.
        order: For each segment as the caller gave them, its row.
        counts: New nodes per row.
        width: Columns.
    """

    segments: Sequence[Segment]
    order: Sequence[int]
    counts: Int[np.ndarray, " rows"]
    width: int

    @property
    def full(self) -> bool:
        """Whether no row is padded and all logits are wanted."""
        return all(s.num_wanted == self.width for s in self.segments)

    def wanted(self) -> list[Int[np.ndarray, " _"]]:
        """The columns whose logits each row wants."""
        return [np.arange(n - s.num_wanted, n) for s, n in zip(self.segments, self.counts.tolist(), strict=True)]


def padded_width(count: int, *, doubling: bool = False) -> int:
    """Columns of a forward over `count` nodes: the count itself up to 16, then the next of eight sizes per doubling.

    Kernel libraries keep what they prepare for every shape that they have seen; with few shapes that comes to an end.
    Where every shape is recorded by itself, as CUDA graphs are, the sizes are the powers of two.

    Example:
        >>> [padded_width(n) for n in (5, 16, 17, 33, 100, 512)]
        [5, 16, 18, 36, 104, 512]
        >>> [padded_width(n, doubling=True) for n in (1, 5, 17)]
        [1, 8, 32]
    """
    if doubling:
        return 1 << (count - 1).bit_length()
    step = 1 if count <= 16 else 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


class LanguageModel:
    """An unmodified transformers causal LM behind the `LM` protocol.

    Every node's logits are those of a plain causal run over its slot's committed tokens and its own root path, up to
    rounding. Rows of one forward may be ragged; all are padded to the longest, and long
    ones to one of few sizes. The cache begins small and grows;
    at construction its worst case is compared with free memory. The model is put into evaluation mode and otherwise
    left alone: it may be trained, or called by others, between calls. All methods run in inference mode.

    Attributes:
        model: The model.
        vocab_size: Width of the logits.
        max_context: Most tokens of one slot, pending nodes included.
        max_slots: Most slots at once.
        crops: True: dropping pending nodes costs nothing.
        device: Where the model is.
        dtype: Its floating type.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_forwards: Forwards made so far.

    Args:
        model: The model, on one device.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot. None takes as many as the model's `max_position_embeddings`, its rotary
            scheme and free memory allow.
        vocab_size: Cut the logits to this width, where the model's vocabulary is padded.
        pad_to: Rows are padded to at least this many columns, and the LM head computed for as many. On CPUs bfloat16
            products of 2 to 32 rows round alike and those of one row do not, so 2 makes decoding bit-identical to
            verifying.
        compile: Compile forwards of up to `COMPILED` columns with torch.compile: on a CPU with frozen weights, one
            graph for all lengths; on a GPU as CUDA graphs. The first forward of each kind takes long, half a minute
            for a dozen layers. Roundings differ from those without; longer forwards, of prompts, and those with taps
            are not compiled. The weights must not change afterwards.
        prepack: Run a twin of the model whose linear layers are laid out for the CPU's kernels; see `packed`. The
            weights must not change afterwards.

    Raises:
        InputError: The model cannot be supported, or the cache does not fit in memory.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        ...                      num_attention_heads=2, max_position_embeddings=64)
        >>> lm = LanguageModel(LlamaForCausalLM(config), max_slots=2)
        >>> slot = lm.open()
        >>> _ = lm.extend([Segment(slot=slot, tokens=torch.tensor([3, 1, 4]), logits="none")])
        >>> lm.commit({slot: [0, 1, 2]})
        >>> siblings = Segment(slot=slot, tokens=torch.tensor([1, 5]), parents=np.array([-1, -1]))
        >>> lm.extend([siblings]).logits.shape
        torch.Size([2, 32])
        >>> lm.commit({slot: [1]})
        >>> lm.length(slot)
        4
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int = 8,
        max_context: int | None = None,
        vocab_size: int | None = None,
        pad_to: int = 1,
        compile: bool = False,
        prepack: bool = False,
    ) -> None:
        for name, value in (("max_slots", max_slots), ("max_context", max_context), ("pad_to", pad_to)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")
        if (reason := refusal(model, max_context=max_context)) is not None:
            raise InputError(reason)
        if is_recurrent(model):
            raise InputError(f"{model.config.model_type} has recurrent layers; open it with RecurrentModel")
        text = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.device, self.dtype = model.device, model.dtype
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        # A compiler treats one column as a kind of its own, and a tensor made outside inference mode.
        self.max_slots, self.pad_to = max_slots, max(2, pad_to) if compile else pad_to
        self.num_forwards, self.crops = 0, True
        if compile and flex.is_flex(model):
            raise InputError(
                "flex_attention runs uncompiled here, so compile would do nothing; load the model with "
                "attn_implementation='sdpa', or leave compile out"
            )
        if compile and prepack:
            raise InputError("compile lays out weights for the CPU's kernels by itself; leave prepack out")
        if prepack and not packable(model):
            raise InputError("prepack works for bfloat16 models on CPUs with kernels for it, and this is none")
        self._twin = packed(model) if prepack else None
        self._compiled = compiled(model) if compile else None
        self._doubling = compile and model.device.type == "cuda"
        limit = longest_context(model.config)
        if max_context is not None and limit is not None and max_context > limit:
            raise InputError(
                f"max_context must be <= {limit}, the most that {text.model_type} allows, got {max_context}"
            )
        self._builder = mask_builder(model, spans(model), alibi.slopes(model))
        probe = Probe()
        width = self._probe(probe)
        if vocab_size is not None and not 1 <= vocab_size <= width:
            raise InputError(f"vocab_size must be in 1..{width}, the width of the model's logits, got {vocab_size}")
        self.vocab_size = vocab_size or width
        if probe.devices != {self.device}:
            names = ", ".join(sorted(str(d) for d in probe.devices))
            raise InputError(f"the model must be on one device, got {names}")
        self.max_context = fitting_context(
            probe.layers, max_slots=max_slots, max_context=max_context, limit=limit, free=free_bytes(self.device)
        )
        self._cache = SlotCache(
            probe.layers,
            max_slots=max_slots,
            max_context=self.max_context + BRANCHES,
            device=self.device,
            num_rows=2 if compile else 1,
        )
        self._slots: dict[int, _Slot] = {}
        self._layers = decoder_layers(self._runner, self.num_layers)
        if (reason := self._misread()) is not None:
            raise InputError(reason)

    @property
    def num_bytes(self) -> int:
        """Memory that the cache holds now."""
        return self._cache.num_bytes

    @property
    def bytes_moved(self) -> int:
        """Bytes of the cache copied so far, to compact accepted paths and to close holes that released slots left."""
        return self._cache.bytes_moved

    def open(self) -> int:
        """Take a free slot, empty. Raises RuntimeError when none is free."""
        if len(self._slots) == self.max_slots:
            raise RuntimeError(f"all {self.max_slots} slots are taken (max_slots={self.max_slots})")
        slot = next(s for s in range(self.max_slots) if s not in self._slots)
        self._slots[slot] = _Slot()
        self._cache.open(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give the slot back."""
        self._slot(slot)
        with torch.inference_mode():
            self._cache.close(slot)
        del self._slots[slot]

    def length(self, slot: int) -> int:
        """Committed tokens of a slot."""
        return self._slot(slot).length

    def truncate(self, slot: int, length: int) -> None:
        """Forget committed tokens from `length` on, and all pending nodes."""
        state = self._slot(slot)
        if not 0 <= length <= state.length:
            raise ValueError(f"slot {slot} has {state.length} committed tokens, cannot keep {length}")
        state.length, state.pending = length, Pending()
        self._cache.shorten(slot, length)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Per slot, keep the pending nodes of one root path, by number and in order; drop the other pending nodes.

        Slots that are not named keep their pending nodes. A path that lies in place already, such as the accepted
        part of a chain, moves no memory.
        """
        moves = {}
        for slot, path in paths.items():
            state = self._slot(slot)
            if not state.pending.is_path(path):
                raise ValueError(f"{list(path)} is no path from the root through the pending nodes of slot {slot}")
            if state.pending.chain:
                continue
            nodes, places = np.asarray(path, dtype=np.int64), np.arange(len(path))
            away = nodes != places
            if away.any():
                moves[slot] = (state.length + nodes[away], state.length + places[away])
        if moves:
            with torch.inference_mode():
                self._cache.move(moves)
        for slot, path in paths.items():
            state = self._slots[slot]
            state.length, state.pending = state.length + len(path), Pending()
            self._cache.shorten(slot, state.length)

    @torch.inference_mode()
    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        """Append nodes to several slots in one forward. Each slot at most once; lengths and trees may differ.

        Raises:
            RuntimeError: A slot would hold more than `max_context` tokens, pending nodes included.
        """
        if any(not 0 <= k <= self.num_layers for k in taps):
            raise ValueError(f"taps must be in 0..{self.num_layers}, got {list(taps)}")
        grown = self._grown(segments)
        batch = self._batch([s for s in segments if s.tokens.shape[0]])
        if not batch.segments:
            return self._empty(taps)
        slots = [s.slot for s in batch.segments]
        used = [self._slots[s].length + len(grown[s]) for s in slots]
        sight = None
        if len(slots) == 1 and grown[slots[0]].chain and batch.counts[0] == batch.width:
            positions = self._builder.keys(used[0])[used[0] - batch.width :][None]
            written = self._cache.run(slots[0], used[0], positions)
        else:
            places = self._cache.places(slots, used, batch.counts, batch.width)
            sight = look([self._slots[s].length for s in slots], [grown[s] for s in slots], batch.counts, batch.width)
            written, positions = upload([places, sight.positions], self.device)
        if self._compiled is not None:
            # Where a view begins would become part of a graph.
            positions = positions.clone()
        view = self._cache.view(max(used), doubling=self._doubling)
        self._cache.prepare(slots, written, view)
        full = batch.full
        wanted = [] if full else batch.wanted()
        forward = self._forward(batch, taps)
        if full:
            columns = None
        elif forward is self._compiled:
            columns = np.arange(batch.width)
        else:
            columns = self._columns(wanted, batch.width)
        some = None if columns is None or len(columns) == batch.width else columns
        with (
            tapped(self._layers, taps) if taps else NOTHING_TAPPED as seen,
            alibi.bias_in_mask(self._runner) if self._builder.slopes is not None else NOTHING_TAPPED,
            flex.uncompiled() if self._builder.blocks else NOTHING_TAPPED,
        ):
            output = forward(
                input_ids=self._tokens(batch),
                attention_mask=self._builder.masks(sight, positions, view),
                position_ids=positions,
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=0 if some is None else upload([some], self.device)[0],
            )
        self.num_forwards += 1
        for slot in slots:
            self._slots[slot].pending = grown[slot]
        logits = output.logits[..., : self.vocab_size]
        if forward is self._compiled and self._doubling:
            # The next replay of a CUDA graph writes where this one's output lies.
            logits = logits.clone()
        if columns is None:
            return Extension(
                logits=self._rows(logits, batch).flatten(0, 1),
                taps={k: self._rows(seen[k], batch).flatten(0, 1) for k in taps},
            )
        everything, nodes = np.arange(batch.width), [np.arange(n) for n in batch.counts.tolist()]
        return Extension(
            logits=self._packed(logits, batch, columns, wanted),
            taps={k: self._packed(seen[k], batch, everything, nodes) for k in taps},
        )

    @property
    def _runner(self) -> PreTrainedModel:
        """The model, or its packed twin."""
        return self.model if self._twin is None else self._twin

    def _forward(self, batch: _Batch, taps: Sequence[int]) -> Callable[..., Any]:
        """What runs a forward. A compiled graph has no hooks, so what is tapped is not compiled, nor are prompts."""
        prompt = batch.width > COMPILED or all(s.num_wanted == 0 for s in batch.segments)
        return self._runner if self._compiled is None or prompt or taps else self._compiled

    def _slot(self, slot: int) -> _Slot:
        if slot not in self._slots:
            raise RuntimeError(f"slot {slot} is not open; open slots: {sorted(self._slots)}")
        return self._slots[slot]

    def _grown(self, segments: Sequence[Segment]) -> Mapping[int, Pending]:
        """Per slot, the pending nodes with the new ones; nothing is changed."""
        grown: dict[int, Pending] = {}
        for segment in segments:
            state, count = self._slot(segment.slot), segment.tokens.shape[0]
            if segment.slot in grown:
                raise ValueError(f"slot {segment.slot} stands in two segments of one forward")
            pending = state.pending.grown(count, segment.parents)
            deepest = state.length + 1 + int(pending.depths.max(initial=-1))
            if deepest > self.max_context or state.used + count > self.max_context + BRANCHES:
                raise RuntimeError(
                    f"slot {segment.slot} holds {state.length} committed and {len(state.pending)} pending tokens; "
                    f"{count} more pass max_context={self.max_context}"
                )
            grown[segment.slot] = pending
        return grown

    def _batch(self, segments: Sequence[Segment]) -> _Batch:
        by_row = sorted(range(len(segments)), key=lambda i: self._cache.row(segments[i].slot))
        order = [0] * len(segments)
        for row, i in enumerate(by_row):
            order[i] = row
        counts = np.array([segments[i].tokens.shape[0] for i in by_row], dtype=np.int64)
        width = max(self.pad_to, padded_width(int(counts.max(initial=1)), doubling=self._doubling))
        return _Batch(segments=[segments[i] for i in by_row], order=order, counts=counts, width=width)

    def _tokens(self, batch: _Batch) -> Int[Tensor, "rows width"]:
        if len(batch.segments) == 1 and batch.counts[0] == batch.width:
            alone = batch.segments[0].tokens.to(self.device, torch.long, non_blocking=True)[None]
            return alone if self._compiled is None else alone.clone()
        tokens = torch.cat([s.tokens.to(self.device, torch.long, non_blocking=True) for s in batch.segments])
        if (batch.counts == batch.width).all():
            return tokens.view(-1, batch.width)
        first = np.cumsum(batch.counts) - batch.counts
        source = first[:, None] + np.minimum(np.arange(batch.width), batch.counts[:, None] - 1)
        return tokens[upload([source], self.device)[0]]

    def _columns(self, wanted: Sequence[Int[np.ndarray, " _"]], width: int) -> Int[np.ndarray, " columns"]:
        """The columns for which the LM head runs: those that any row wants, at least `pad_to` if there are any."""
        if len(wanted) == 1 and len(wanted[0]) >= self.pad_to:
            return wanted[0]
        marked = np.zeros(width, dtype=bool)
        for columns in wanted:
            marked[columns] = True
        if 0 < (count := int(marked.sum())) < self.pad_to:
            marked[np.flatnonzero(~marked)[: self.pad_to - count]] = True
        return np.flatnonzero(marked)

    def _rows(self, values: Float[Tensor, "rows columns dim"], batch: _Batch) -> Float[Tensor, "rows columns dim"]:
        """The rows in the caller's order of segments."""
        if all(row == i for i, row in enumerate(batch.order)):
            return values
        return values.index_select(0, torch.tensor(batch.order).to(values.device))

    def _packed(
        self,
        values: Float[Tensor, "rows columns dim"],
        batch: _Batch,
        columns: Int[np.ndarray, " columns"],
        wanted: Sequence[Int[np.ndarray, " _"]],
    ) -> Float[Tensor, "wanted dim"]:
        """What is wanted of each row, one behind the other in the caller's order of segments."""
        if len(wanted) == 1 and len(wanted[0]) == len(columns):
            return values[0]
        places = [row * len(columns) + np.searchsorted(columns, wanted[row]) for row in batch.order]
        index = np.concatenate(places)
        flat = values.flatten(0, 1)
        if len(index) == 0 or (index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all()):
            first = int(index[0]) if len(index) else 0
            return flat[first : first + len(index)]
        return flat.index_select(0, upload([index], self.device)[0])

    def _empty(self, taps: Sequence[int]) -> Extension:
        logits = torch.empty(0, self.vocab_size, dtype=self.dtype, device=self.device)
        hidden = torch.empty(0, self.hidden_size, dtype=self.dtype, device=self.device)
        return Extension(logits=logits, taps=dict.fromkeys(taps, hidden))

    @torch.inference_mode()
    def _probe(self, probe: Probe) -> int:
        """Show the probe what layers keep, by a forward of two tokens; returns the width of the logits."""
        sight = look([0], [Pending().grown(2, None)], np.array([2]), 2)
        (positions,) = upload([sight.positions], self.device)
        try:
            with alibi.bias_in_mask(self.model), flex.tried(self.model):
                output = self.model(
                    input_ids=torch.zeros_like(positions),
                    attention_mask=self._builder.masks(sight, positions, 2),
                    position_ids=positions,
                    past_key_values=probe,
                    use_cache=True,
                )
        except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
            name = self.model.config.model_type
            raise InputError(f"{name} cannot be run with masks and a cache of our own: {error}") from error
        return int(output.logits.shape[-1])

    @torch.inference_mode()
    def _misread(self) -> str | None:
        """Why this model cannot be trusted with trees, found by trying one; None if it can.

        The last of two siblings must say what a plain run says that has never seen the other. Roundings of less than
        float32 are too coarse to judge by, and pass.
        """
        if self.dtype not in (torch.float32, torch.float64):
            return None
        low, high = (n % self.vocab_size for n in (3, 5))
        slot = self.open()
        siblings = np.array([-1, 0, 0, 2])
        tree = torch.tensor([low, high, low, high], device=self.device)
        ours = self.extend([Segment(slot=slot, tokens=tree, parents=siblings, logits="last")]).logits[0]
        self.release(slot)
        self.num_forwards = 0
        with flex.tried(self.model):
            plain = self.model(input_ids=tree[None, [0, 2, 3]], use_cache=False).logits[0, -1, : self.vocab_size]
        difference, spread = float((ours - plain).abs().max()), float(plain.max() - plain.min())
        if difference <= _TOLERANCE * spread:
            return None
        return (
            f"{self.model.config.model_type} does not read a tree of tokens as it reads a text (logits differ by "
            f"{difference:.2g} in a range of {spread:.2g}), so its masks or positions work in a way unknown here"
        )
