"""A hybrid or recurrent causal language model as the engine sees it: chains only, with saved states and tokens fed
again."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.option import Bounds
from outrider.core.types import InputError
from outrider.host.meanwhile import hand_over
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.cache_keyword import cache_keyword
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead, find_embedding_and_head
from outrider.lm.hf.mtp import load_mtp
from outrider.lm.hf.spread import check_devices
from outrider.lm.hf.states import State, StateCache
from outrider.lm.hf.support import CHAINS_ONLY, refusal
from outrider.lm.hf.taps import tapped
from outrider.lm.hf.weights import check_logits
from outrider.lm.model import check_context, checked_width
from outrider.lm.protocol import Extension, Segment
from outrider.lm.slots.batch import joined, upload
from outrider.lm.slots.budget import SlotRoom, activation_bytes, available_bytes, promise
from outrider.lm.slots.cache import Probe, SlotCache
from outrider.lm.slots.masks import MaskBuilder, mask_builder
from outrider.lm.slots.replay import BORDERS, ReplaySegment, StatefulSlot, pieces
from outrider.lm.slots.slots import OverSlots, SlotTable

_TOLERANCE = 1e-2


class RecurrentModel(OverSlots[StatefulSlot]):
    """An unmodified transformers causal LM with recurrent layers behind the `LM` protocol, for chains.

    A recurrent layer's state is a fold over all tokens so far, so it cannot drop a rejected token. The states
    at some *borders* are kept: after the committed tokens where that is known, and after every `extend` since. A commit
    that ends at a border adopts its state (a draft model, fed token by token, always finds one). Otherwise the newest
    state before it stays, and the tokens behind it are fed again with the next segment, so that
    a rejection costs no forward of its own unless many tokens have come together. Keys and values of the attention
    layers lie in slots as in `LanguageModel`; feeding a token again writes the same ones.

    Recurrent layers never see padding: rows of equal length share a forward, others get their own. Models that cannot
    continue a state by more than one token (see `support.STEPWISE`) are fed one token at a time behind the prompt,
    which is fed in one piece as soon as a logit is wanted.

    Attributes:
        model: The model.
        vocab_size: Width of the logits.
        max_context: Most tokens of one slot, pending ones included.
        max_slots: Most slots at once.
        crops: False: after a rejection the accepted tokens are fed again.
        device: Where the model is.
        dtype: Its floating type.
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        pad_to: Always 1: nothing is padded.
        stepwise: Whether a state is continued by one token at a time.
        least: Fewest tokens that continue a state.
        num_forwards: Forwards made so far.
        num_replays: Segments so far before which tokens had to be fed again.
        num_replayed_tokens: Tokens fed again so far.

    Args:
        model: The model, on one device.
        max_slots: Most slots at once.
        max_context: Most tokens of one slot. None takes as many as the model and free memory allow.
        vocab_size: Cut the logits to this width, where the model's vocabulary is padded.
        overcommit: Whether a `max_context` may be asked for that does not fit for all slots at once. Whoever opens
            slots then asks `holds` first.

    Raises:
        InputError: The model cannot be supported, or its cache does not fit in memory.

    Example:
        >>> from transformers import Mamba2Config, Mamba2ForCausalLM
        >>> config = Mamba2Config(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_heads=4, head_dim=8,
        ...                       state_size=4, n_groups=1, chunk_size=8)
        >>> lm = RecurrentModel(Mamba2ForCausalLM(config), max_slots=2)
        >>> slot = lm.open()
        >>> _ = lm.extend([Segment(slot=slot, tokens=torch.tensor([3, 1, 4]))])
        >>> lm.commit({slot: [0]})
        >>> lm.extend([Segment(slot=slot, tokens=torch.tensor([5]))]).logits.shape
        torch.Size([1, 32])
        >>> lm.num_forwards, lm.num_replayed_tokens
        (2, 1)
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_slots: int = 8,
        max_context: int | None = None,
        vocab_size: int | None = None,
        overcommit: bool = False,
    ) -> None:
        Bounds(least=1).check("max_slots", max_slots)
        self.anatomy = Anatomy.of(model)
        if (reason := refusal(self.anatomy, max_context=max_context)) is not None:
            raise InputError(reason)
        if not self.anatomy.recurrent:
            raise InputError(f"{self.anatomy.name} has no recurrent layers; open it with LanguageModel")
        check_context(self.anatomy, max_context)
        self.model = model.eval()
        self.device, self.dtype = model.device, model.dtype
        self.num_layers, self.hidden_size = self.anatomy.num_layers, self.anatomy.hidden_size
        self.pad_to, self.crops = 1, False
        self._ends: EmbeddingAndHead | None = None
        self.stepwise, self.least = self.anatomy.stepwise, 2 if self.anatomy.clamps else 1
        spans = self.anatomy.spans
        self._masks = None if spans is None else mask_builder(model, self.anatomy, spans)
        self._cache = cache_keyword(type(model))
        self._asked = frozenset(inspect.signature(type(model).forward).parameters)
        probe = Probe()
        self._states = StateCache(model, probe)
        self.num_forwards = self.num_replays = self.num_replayed_tokens = 0
        width, state = self._probe()
        self.vocab_size = checked_width(width, vocab_size)
        check_devices(model, probe.devices | {tensor.device for tensor in state}, alone=True)
        activations = activation_bytes(
            self.device,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            dtype=self.dtype,
            max_slots=max_slots,
        )
        free = available_bytes(self.device, activations)
        taken = max_slots * (BORDERS + 1) * sum(tensor.nbytes for tensor in state)
        room = SlotRoom.of(
            probe.layers,
            max_slots=max_slots,
            max_context=max_context,
            limit=self.anatomy.longest_context,
            free=None if free is None else max(0, free - taken),
            overcommit=overcommit,
        )
        self.max_context = room.max_context
        cache = SlotCache(
            probe.layers,
            max_slots=max_slots,
            max_context=self.max_context,
            device=self.device,
            most_bytes=room.most_bytes,
        )
        promise(cache, {self.device: 1.0}, taken + room.promised(probe.layers, max_slots), activations)
        self._slots = SlotTable(cache, max_slots=max_slots, room=room)
        if (reason := self._misread()) is not None:
            raise InputError(reason)

    @property
    def chains_only(self) -> str:
        """Why it cannot read a branching tree."""
        return f"{self.anatomy.name} {CHAINS_ONLY}"

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The model."""
        return {"model": self.model}

    def embedding_and_head(self) -> EmbeddingAndHead:
        """Its embedding, final norm and output layer. Raises InputError if a drafter cannot use them."""
        if self._ends is None:
            self._ends = find_embedding_and_head(self.model, self.anatomy)
        return self._ends

    def mtp(self, path: str | None) -> Any:
        """Its multi-token-prediction layers, loaded from a checkpoint, by default its own; see `load_mtp`."""
        return load_mtp(self.model, path)

    def cast(self, dtype: torch.dtype) -> "RecurrentModel":
        """A copy in another dtype, with as long a context as the model and the memory allow. Returns itself if it
        already has that dtype or is quantised.
        """
        if self.dtype in (dtype, torch.float64) or getattr(self.model, "is_quantized", False):
            return self
        return RecurrentModel(copy.deepcopy(self.model).to(dtype), max_slots=self.max_slots, vocab_size=self.vocab_size)

    @property
    def num_bytes(self) -> int:
        """Memory that keys, values and states hold now."""
        states = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for slot in self._slots.contents()
            for state in slot.borders.values()
            for tensor in state or ()
        }
        return self.cache.num_bytes + sum(states.values())

    def open(self) -> int:
        """Take a free slot, empty. Raises RuntimeError when none is free."""
        return self._slots.open(StatefulSlot(tokens=torch.empty(0, dtype=torch.long, device=self.device)))

    def copy(self, source: int, length: int) -> int:
        """A new slot with the first `length` committed tokens of another. Raises RuntimeError when none is free.

        The newest state that is known before its end comes with it; tokens behind that are fed again with the next
        segment.
        """
        state = self._slots[source]
        if not 0 <= length <= state.length:
            raise ValueError(f"slot {source} has {state.length} committed tokens, cannot copy {length}")
        copied = StatefulSlot(tokens=state.tokens, length=length, borders={0: None, **state.borders}, fed=state.fed)
        copied.shorten(length, self.least)
        slot = self._slots.open(copied)
        with torch.inference_mode():
            self.cache.copy(source, slot, length)
        return slot

    def truncate(self, slot: int, length: int) -> None:
        """Forget committed tokens from `length` on, and all pending ones.

        Where no state is known there, the next `extend` feeds the tokens that are left again from the newest state
        before, which may be the beginning.
        """
        state = self._slots[slot]
        if not 0 <= length <= state.length:
            raise ValueError(f"slot {slot} has {state.length} committed tokens, cannot keep {length}")
        state.borders.setdefault(0, None)
        state.shorten(length, self.least)
        self.cache.shorten(slot, length)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Per slot, keep the first pending tokens, as many as the path has; drop the others.

        Slots that are not named keep theirs. No memory moves and nothing is computed.
        """
        for slot, path in paths.items():
            state = self._slots[slot]
            if len(path) > state.used - state.length or list(path) != list(range(len(path))):
                raise ValueError(f"{list(path)} is no path from the root through the pending nodes of slot {slot}")
        for slot, path in paths.items():
            state = self._slots[slot]
            state.shorten(state.length + len(path), self.least)
            self.cache.shorten(slot, state.length)

    @torch.inference_mode()
    def extend(self, segments: Sequence[Segment], taps: Sequence[int] = ()) -> Extension:
        """Append chains to several slots: one forward per distinct length. Each slot at most once.

        Raises:
            ValueError: A segment branches.
            RuntimeError: A slot would hold more than `max_context` tokens, pending ones included.
        """
        if any(not 0 <= k <= self.num_layers for k in taps):
            raise ValueError(f"taps must be in 0..{self.num_layers}, got {list(taps)}")
        jobs = self._jobs(segments, taps)
        for left in range(max((len(job.pieces) for job in jobs), default=0), 0, -1):
            groups: dict[tuple[int, bool], list[ReplaySegment]] = {}
            for job in jobs:
                if len(job.pieces) >= left:
                    start, end = job.pieces[-left]
                    groups.setdefault((end - start, job.state is None), []).append(job)
            for group in groups.values():
                self._forward(group, [job.pieces[-left] for job in group], taps)
        for job in jobs:
            self._finish(job)
        logits = [part for job in jobs for part in job.logits]
        hidden = {k: [part for job in jobs for part in job.taps.get(k, ())] for k in taps}
        return Extension(
            logits=joined(logits, self._nothing(self.vocab_size)),
            taps={k: joined(parts, self._nothing(self.hidden_size)) for k, parts in hidden.items()},
        )

    def _jobs(self, segments: Sequence[Segment], taps: Sequence[int]) -> list[ReplaySegment]:
        """What each segment needs; nothing is changed."""
        jobs: list[ReplaySegment] = []
        for segment in segments:
            slot, state, count = segment.slot, self._slots[segment.slot], len(segment.tokens)
            if any(job.slot == slot for job in jobs):
                raise ValueError(f"slot {slot} stands in two segments of one forward")
            chain = np.arange(state.used - state.length - 1, state.used - state.length + count - 1)
            if segment.parents is not None and not np.array_equal(segment.parents, chain):
                raise ValueError(f"{self.chains_only}, got parents {segment.parents}")
            if state.used + count > self.max_context:
                raise RuntimeError(
                    f"slot {slot} holds {state.length} committed and {state.used - state.length} pending tokens; "
                    f"{count} more pass max_context={self.max_context}"
                )
            if count == 0:
                continue
            if segment.wanted.stop != count:
                raise ValueError(f"logits can be had of the last nodes only, got {segment.logits} of {count}")
            end, new = state.used + count, segment.tokens.to(self.device, torch.long, non_blocking=True)
            start = state.start(end, self.least)
            waits = self.stepwise and start == 0 and segment.num_wanted == 0 and not taps
            jobs.append(
                ReplaySegment(
                    slot=slot,
                    tokens=torch.cat([state.tokens, new]),
                    first=state.used,
                    wanted=segment.num_wanted,
                    pieces=[] if waits else pieces(start, state.used, end, self.least, self.stepwise),
                    state=state.borders[start],
                )
            )
        return jobs

    def _finish(self, job: ReplaySegment) -> None:
        """Take a job's tokens and borders into its slot."""
        state = self._slots[job.slot]
        if job.pieces and (again := min(state.fed, job.first) - job.pieces[0][0]) > 0:
            self.num_replays += 1
            self.num_replayed_tokens += again
        state.tokens = job.tokens
        state.fed = max(state.fed, len(job.tokens) if job.pieces else 0)
        state.borders |= job.borders
        state.prune(self.least)

    def _forward(self, jobs: Sequence[ReplaySegment], bounds: Sequence[tuple[int, int]], taps: Sequence[int]) -> None:
        """One forward over a piece of each job; all pieces have one length, and all jobs a state or none."""
        by_row = sorted(zip(jobs, bounds, strict=True), key=lambda pair: self.cache.row(pair[0].slot))
        width, rows = bounds[0][1] - bounds[0][0], len(jobs)
        keep = max(job.columns(end) for job, (_, end) in by_row)
        inputs = {
            "input_ids": torch.stack([job.tokens[start:end] for job, (start, end) in by_row]),
            self._cache: self._states,
            "use_cache": True,
            "logits_to_keep": keep or torch.empty(0, dtype=torch.long, device=self.device),
        }
        if self._masks is not None:
            inputs |= self._placed(self._masks, [job.slot for job, _ in by_row], [e for _, (_, e) in by_row], width)
        self._states.put([job.state for job, _ in by_row])
        hand_over()
        with tapped(self.anatomy.layers, taps) as seen:
            logits = self.model(**{k: v for k, v in inputs.items() if k in self._asked}).logits[..., : self.vocab_size]
        self.num_forwards += 1
        for row, ((job, (start, end)), state) in enumerate(zip(by_row, self._states.take(rows), strict=True)):
            job.state = job.borders[end] = state
            if count := job.columns(end):
                job.logits.append(logits[row, keep - count :])
            if (old := max(0, job.first - start)) < width:
                for k in taps:
                    job.taps.setdefault(k, []).append(seen[k][row, old:])

    def _placed(self, masks: MaskBuilder, slots: Sequence[int], used: Sequence[int], width: int) -> dict[str, object]:
        """Positions and masks of a forward over the last `width` of each slot's first `used` tokens."""
        places = self.cache.places(slots, used, np.full(len(slots), width), width)
        numbers = np.asarray(used)[:, None] - width + np.arange(width)
        written, positions = upload([places, numbers], self.device)
        view = self.cache.view(max(used))
        self._states.kv_cache = self.cache.window(slots, written, view)
        return {"position_ids": positions, "attention_mask": masks.masks(None, positions, view)}

    def _nothing(self, width: int) -> Float[Tensor, "none width"]:
        return torch.empty(0, width, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def _probe(self) -> tuple[int, State]:
        """Show the probe what attention layers keep, by a forward of two tokens; logits' width and a state."""
        positions = torch.arange(2, device=self.device)[None]
        inputs = {
            "input_ids": torch.zeros_like(positions),
            self._cache: self._states,
            "use_cache": True,
        }
        if self._masks is not None:
            inputs |= {"position_ids": positions, "attention_mask": self._masks.masks(None, positions, 2)}
        self._states.put([None])
        try:
            output = self.model(**{k: v for k, v in inputs.items() if k in self._asked})
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            raise InputError(f"{self.anatomy.name} cannot be run with masks and a cache of our own: {error}") from error
        check_logits(output.logits, self.model, self.anatomy.name)
        return int(output.logits.shape[-1]), self._states.take(1)[0]

    @torch.inference_mode()
    def _misread(self) -> str | None:
        """Why this model gives wrong logits after a rejection, found by trying one; None if they are right.

        Below float32, roundings are too coarse for this test, and the model passes. A model that continues its state
        wrongly by several tokens gets a second chance, one token at a time.
        """
        if self.dtype not in (torch.float32, torch.float64):
            return None
        difference, spread = self._difference()
        if difference > _TOLERANCE * spread and not self.stepwise:
            self.stepwise = True
            difference, spread = self._difference()
        if difference <= _TOLERANCE * spread:
            return None
        return (
            f"{self.anatomy.name} does not continue a text as it reads it whole (logits differ by "
            f"{difference:.2g} in a range of {spread:.2g}), so its states work in a way unknown here"
        )

    def _difference(self) -> tuple[float, float]:
        """The largest difference between the logits after a rejection and those of a plain run, and the range of the
        latter.
        """
        text = torch.arange(3, 11, device=self.device) % self.vocab_size
        slot = self.open()
        self.extend([Segment(slot=slot, tokens=text[:3], logits="none")])
        self.commit({slot: range(3)})
        self.extend([Segment(slot=slot, tokens=text[[3, 4, 0, 1]])])
        self.commit({slot: range(2)})
        ours = self.extend([Segment(slot=slot, tokens=text[5:], logits="last")]).logits[0]
        self.release(slot)
        self.num_forwards = self.num_replays = self.num_replayed_tokens = 0
        plain = self.model(input_ids=text[None], use_cache=False).logits[0, -1, : self.vocab_size]
        return float((ours - plain).abs().max()), float(plain.max() - plain.min())
