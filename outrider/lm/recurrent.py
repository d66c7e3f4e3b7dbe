"""A hybrid or recurrent causal language model as the engine sees it: chains, by states kept and tokens fed again."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.lm.attention import MaskBuilder, attention_span, mask_builder, upload
from outrider.lm.cache import Probe, SlotCache, fitting_context, free_bytes
from outrider.lm.protocol import Extension, Segment
from outrider.lm.states import State, StateCache
from outrider.lm.support import is_recurrent, is_stepwise, longest_context, refusal
from outrider.lm.taps import decoder_layers, tapped
from outrider.types import InputError

CHAINS_ONLY = "has recurrent layers, whose state follows one text and cannot read a branching tree; use tree 'chain'"
"""What is said where a tree that branches meets such a model."""

_TOLERANCE = 1e-2
_CHUNK = 512
"""Most tokens that are fed again in one forward."""
_JOIN = 8
"""So many tokens, or fewer, are fed again in the same forward as the new ones; more get a forward of their own."""
_BORDERS = 16
"""Most states kept of one slot's pending tokens."""


@dataclass(kw_only=True)
class _Slot:
    """What is known of a slot; replaced or changed by the calls of the model.

    Attributes:
        tokens: Committed tokens, then pending ones.
        length: Committed tokens.
        borders: What the recurrent layers remember after so many tokens; None before the first.
        fed: How many of the tokens were ever fed.
    """

    tokens: Int[Tensor, " used"]
    length: int = 0
    borders: dict[int, State | None] = field(default_factory=lambda: {0: None})
    fed: int = 0

    @property
    def used(self) -> int:
        return len(self.tokens)

    def shorten(self, length: int, least: int) -> None:
        """Keep so many tokens, all of them committed, and the states from which `least` tokens can be fed to go on."""
        self.tokens, self.length, self.fed = self.tokens[:length], length, min(self.fed, length)
        self.prune(least)

    def prune(self, least: int) -> None:
        """Drop the states that are not needed: behind all tokens, long before the committed ones, or too many."""
        behind = {self.start(self.length + more, least) for more in (1, least)}
        pending = sorted(border for border in self.borders if self.length < border <= self.used)
        self.borders = {border: self.borders[border] for border in sorted(behind | set(pending[-_BORDERS:]))}

    def start(self, end: int, least: int) -> int:
        """The newest border from which at least so many tokens lead to `end`, or the beginning."""
        return max(border for border in self.borders if border == 0 or end - border >= least)


@dataclass(kw_only=True)
class _Job:
    """One segment on its way through one or more forwards.

    Attributes:
        slot: The slot.
        tokens: All its tokens, the new ones last.
        first: Where the new ones begin.
        wanted: How many of the last ones' logits are wanted.
        pieces: Bounds of what is fed, one forward after the other; the first begins at a border.
        state: What the recurrent layers remember where the next piece begins.
        borders: New ones.
        logits: The wanted logits so far.
        taps: Hidden states of the new tokens so far.
    """

    slot: int
    tokens: Int[Tensor, " used"]
    first: int
    wanted: int
    pieces: Sequence[tuple[int, int]]
    state: State | None
    borders: dict[int, State | None] = field(default_factory=dict)
    logits: list[Float[Tensor, "_ vocab"]] = field(default_factory=list)
    taps: dict[int, list[Float[Tensor, "_ hidden"]]] = field(default_factory=dict)

    def columns(self, end: int) -> int:
        """How many of the last columns of the piece that ends there have logits that are wanted."""
        start = next(s for s, e in self.pieces if e == end)
        return max(0, end - max(start, len(self.tokens) - self.wanted))


class RecurrentModel:
    """An unmodified transformers causal LM with recurrent layers behind the `LM` protocol, for chains.

    A recurrent layer's state is a fold over all tokens so far, so it cannot drop a rejected token. The states
    at some *borders* are kept: after the committed tokens where that is known, and after every `extend` since. A commit
    that ends at a border adopts its state (a draft model, fed token by token, always finds one). Otherwise the newest
    state before it stays, and the tokens behind it are fed again with the next segment, so that
    a rejection costs no forward of its own unless many tokens have come together. Keys and values of the attention
    layers lie in slots as in `LanguageModel`; feeding a token again writes the same ones.

    Recurrent layers never see padding: rows of equal length share a forward, others get their own. Models that cannot
    continue a state by more than one token (see `support.STEPWISE`) are fed one token at a time behind the prompt,
    which is digested in one piece as soon as a logit is wanted.

    Attributes:
        model: The model.
        vocab_size: Width of the logits.
        max_context: Most tokens of one slot, pending ones included.
        max_slots: Most slots at once.
        crops: False: a rejected token's state is found again by feeding what was accepted.
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
    ) -> None:
        for name, value in (("max_slots", max_slots), ("max_context", max_context)):
            if value is not None and value < 1:
                raise InputError(f"{name} must be >= 1, got {value}")
        if (reason := refusal(model, max_context=max_context)) is not None:
            raise InputError(reason)
        if not is_recurrent(model):
            raise InputError(f"{model.config.model_type} has no recurrent layers; open it with LanguageModel")
        text = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.device, self.dtype = model.device, model.dtype
        self.num_layers, self.hidden_size = text.num_hidden_layers, text.hidden_size
        self.max_slots, self.pad_to, self.crops = max_slots, 1, False
        self.stepwise, self.least = is_stepwise(model.config), 2 if _clamps(model) else 1
        limit = longest_context(model.config)
        if max_context is not None and limit is not None and max_context > limit:
            raise InputError(
                f"max_context must be <= {limit}, the most that {text.model_type} allows, got {max_context}"
            )
        span = attention_span(model)
        self._masks = None if span is None else mask_builder(model, span)
        self._asked = frozenset(inspect.signature(type(model).forward).parameters)
        self._slots: dict[int, _Slot] = {}
        self._layers = decoder_layers(model, self.num_layers)
        probe = Probe()
        self._states = StateCache(model, probe)
        self.num_forwards = self.num_replays = self.num_replayed_tokens = 0
        width, state = self._probe()
        if vocab_size is not None and not 1 <= vocab_size <= width:
            raise InputError(f"vocab_size must be in 1..{width}, the width of the model's logits, got {vocab_size}")
        self.vocab_size = vocab_size or width
        devices = probe.devices | {tensor.device for tensor in state}
        if devices != {self.device}:
            raise InputError(f"the model must be on one device, got {', '.join(sorted(str(d) for d in devices))}")
        free = free_bytes(self.device)
        taken = max_slots * (_BORDERS + 1) * sum(tensor.nbytes for tensor in state)
        self.max_context = fitting_context(
            probe.layers,
            max_slots=max_slots,
            max_context=max_context,
            limit=limit,
            free=None if free is None else max(0, free - taken),
        )
        self._cache = SlotCache(probe.layers, max_slots=max_slots, max_context=self.max_context, device=self.device)
        self._states.keeper = self._cache
        if (reason := self._misread()) is not None:
            raise InputError(reason)

    @property
    def num_bytes(self) -> int:
        """Memory that keys, values and states hold now."""
        states = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for slot in self._slots.values()
            for state in slot.borders.values()
            for tensor in state or ()
        }
        return self._cache.num_bytes + sum(states.values())

    @property
    def bytes_moved(self) -> int:
        """Bytes of the cache copied so far to close holes that released slots left; accepted chains move nothing."""
        return self._cache.bytes_moved

    def open(self) -> int:
        """Take a free slot, empty. Raises RuntimeError when none is free."""
        if len(self._slots) == self.max_slots:
            raise RuntimeError(f"all {self.max_slots} slots are taken (max_slots={self.max_slots})")
        slot = next(s for s in range(self.max_slots) if s not in self._slots)
        self._slots[slot] = _Slot(tokens=torch.empty(0, dtype=torch.long, device=self.device))
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
        """Forget committed tokens from `length` on, and all pending ones.

        Where no state is known there, the next `extend` feeds the tokens that are left again from the newest state
        before, which may be the beginning.
        """
        state = self._slot(slot)
        if not 0 <= length <= state.length:
            raise ValueError(f"slot {slot} has {state.length} committed tokens, cannot keep {length}")
        state.borders.setdefault(0, None)
        state.shorten(length, self.least)
        self._cache.shorten(slot, length)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Per slot, keep the first pending tokens, as many as the path has; drop the others.

        Slots that are not named keep theirs. No memory moves and nothing is computed.
        """
        for slot, path in paths.items():
            state = self._slot(slot)
            if len(path) > state.used - state.length or list(path) != list(range(len(path))):
                raise ValueError(f"{list(path)} is no path from the root through the pending nodes of slot {slot}")
        for slot, path in paths.items():
            state = self._slots[slot]
            state.shorten(state.length + len(path), self.least)
            self._cache.shorten(slot, state.length)

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
            groups: dict[tuple[int, bool], list[_Job]] = {}
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
            logits=_joined(logits, self._nothing(self.vocab_size)),
            taps={k: _joined(parts, self._nothing(self.hidden_size)) for k, parts in hidden.items()},
        )

    def _slot(self, slot: int) -> _Slot:
        if slot not in self._slots:
            raise RuntimeError(f"slot {slot} is not open; open slots: {sorted(self._slots)}")
        return self._slots[slot]

    def _jobs(self, segments: Sequence[Segment], taps: Sequence[int]) -> list[_Job]:
        """What each segment needs; nothing is changed."""
        jobs: list[_Job] = []
        for segment in segments:
            slot, state, count = segment.slot, self._slot(segment.slot), len(segment.tokens)
            if any(job.slot == slot for job in jobs):
                raise ValueError(f"slot {slot} stands in two segments of one forward")
            chain = np.arange(state.used - state.length - 1, state.used - state.length + count - 1)
            if segment.parents is not None and not np.array_equal(segment.parents, chain):
                raise ValueError(f"{self.model.config.model_type} {CHAINS_ONLY}, got parents {segment.parents}")
            if state.used + count > self.max_context:
                raise RuntimeError(
                    f"slot {slot} holds {state.length} committed and {state.used - state.length} pending tokens; "
                    f"{count} more pass max_context={self.max_context}"
                )
            if count == 0:
                continue
            end, new = state.used + count, segment.tokens.to(self.device, torch.long, non_blocking=True)
            start = state.start(end, self.least)
            waits = self.stepwise and start == 0 and segment.num_wanted == 0 and not taps
            jobs.append(
                _Job(
                    slot=slot,
                    tokens=torch.cat([state.tokens, new]),
                    first=state.used,
                    wanted=segment.num_wanted,
                    pieces=[] if waits else _pieces(start, state.used, end, self.least, self.stepwise),
                    state=state.borders[start],
                )
            )
        return jobs

    def _finish(self, job: _Job) -> None:
        """Take a job's tokens and borders into its slot."""
        state = self._slots[job.slot]
        if job.pieces and (again := min(state.fed, job.first) - job.pieces[0][0]) > 0:
            self.num_replays += 1
            self.num_replayed_tokens += again
        state.tokens = job.tokens
        state.fed = max(state.fed, len(job.tokens) if job.pieces else 0)
        state.borders |= job.borders
        state.prune(self.least)

    def _forward(self, jobs: Sequence[_Job], bounds: Sequence[tuple[int, int]], taps: Sequence[int]) -> None:
        """One forward over a piece of each job; all pieces have one length, and all jobs a state or none."""
        by_row = sorted(zip(jobs, bounds, strict=True), key=lambda pair: self._cache.row(pair[0].slot))
        width, rows = bounds[0][1] - bounds[0][0], len(jobs)
        keep = max(job.columns(end) for job, (_, end) in by_row)
        inputs = {
            "input_ids": torch.stack([job.tokens[start:end] for job, (start, end) in by_row]),
            "past_key_values": self._states,
            "cache_params": self._states,
            "use_cache": True,
            "logits_to_keep": keep or torch.empty(0, dtype=torch.long, device=self.device),
        }
        if self._masks is not None:
            inputs |= self._placed(self._masks, [job.slot for job, _ in by_row], [e for _, (_, e) in by_row], width)
        self._states.put([job.state for job, _ in by_row])
        with tapped(self._layers, taps) as seen:
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
        places = self._cache.places(slots, used, np.full(len(slots), width), width)
        numbers = np.asarray(used)[:, None] - width + np.arange(width)
        written, positions = upload([places, numbers], self.device)
        view = self._cache.view(max(used))
        self._cache.prepare(slots, written, view)
        return {"position_ids": positions, "attention_mask": masks.masks(None, positions, view)}

    def _nothing(self, width: int) -> Float[Tensor, "none width"]:
        return torch.empty(0, width, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def _probe(self) -> tuple[int, State]:
        """Show the probe what attention layers keep, by a forward of two tokens; logits' width and a state."""
        positions = torch.arange(2, device=self.device)[None]
        inputs = {
            "input_ids": torch.zeros_like(positions),
            "past_key_values": self._states,
            "cache_params": self._states,
            "use_cache": True,
        }
        if self._masks is not None:
            inputs |= {"position_ids": positions, "attention_mask": self._masks.masks(None, positions, 2)}
        self._states.put([None])
        try:
            output = self.model(**{k: v for k, v in inputs.items() if k in self._asked})
        except (AttributeError, TypeError, ValueError, KeyError) as error:
            name = self.model.config.model_type
            raise InputError(f"{name} cannot be run with masks and a cache of our own: {error}") from error
        return int(output.logits.shape[-1]), self._states.take(1)[0]

    @torch.inference_mode()
    def _misread(self) -> str | None:
        """Why this model cannot be trusted with drafts, found by rejecting part of one; None if it can.

        Roundings of less than float32 are too coarse to judge by, and pass. A model that continues its state wrongly
        by several tokens gets a second chance, one token at a time.
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
            f"{self.model.config.model_type} does not continue a text as it reads it whole (logits differ by "
            f"{difference:.2g} in a range of {spread:.2g}), so its states work in a way unknown here"
        )

    def _difference(self) -> tuple[float, float]:
        """How far the logits after a rejection are from a plain run's, and the range of the latter."""
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


def _clamps(model: PreTrainedModel) -> bool:
    """Whether the model limits its time steps, which transformers forgets where one token continues a state."""
    limits = [getattr(module, "time_step_limit", None) for module in model.modules()]
    return any(limit is not None and tuple(limit) != (0.0, float("inf")) for limit in limits)


def _pieces(start: int, first: int, end: int, least: int, stepwise: bool) -> list[tuple[int, int]]:
    """Bounds of the forwards that bring a slot from a border at `start` over its new tokens from `first` to `end`.

    Example:
        >>> _pieces(90, 95, 101, 1, False), _pieces(50, 95, 101, 1, False)
        ([(90, 101)], [(50, 95), (95, 101)])
        >>> _pieces(0, 95, 97, 1, True), _pieces(95, 95, 97, 1, True)
        ([(0, 95), (95, 96), (96, 97)], [(95, 96), (96, 97)])
    """
    if stepwise:
        whole = start if start else (first or end)
        return list(pairwise([start, *range(max(whole, start + 1), end + 1)]))
    again = [] if first - start <= _JOIN else [*range(start + _CHUNK, first, _CHUNK), first]
    cuts = [start]
    for cut in again:
        if cut - cuts[-1] >= least and end - cut >= least:
            cuts.append(cut)
    return list(pairwise([*cuts, end]))


def _joined(parts: Sequence[Float[Tensor, "_ dim"]], nothing: Float[Tensor, "none dim"]) -> Float[Tensor, "all dim"]:
    if not parts:
        return nothing
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
