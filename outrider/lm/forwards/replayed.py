"""Forwards, and whole chains of forwards with the draws between them, that are recorded once and replayed.

A forward of a few tokens has hundreds of operations, and a GPU finishes them sooner than Python can launch them. A
recorded forward is launched at once. It reads tensors of its own, which are filled before each replay, and the cache.
Its rows are the first rows of the cache. A row whose slot is not in the batch is idle: it reads a token that nobody
needs, and writes to the place that belongs to no slot.
"""

import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from outrider.core.dice import inverse_cdf
from outrider.core.sampling import tempered
from outrider.host.meanwhile import hand_over
from outrider.lm.forwards.recorder import RECORDERS, Recorder, Recording
from outrider.lm.slots.batch import Padded, upload
from outrider.lm.slots.cache import SlotCache
from outrider.lm.slots.chain import ChainNoise, DrawnTokens, Links
from outrider.lm.slots.inputs import Inputs, Outputs
from outrider.lm.slots.whole_chain import WholeChain

MOST = 120
"""Most recordings of one model at a time. The one that was not used for longest makes room for a new one."""
RESERVED = 0.5
"""If the whole cache takes at most this share of free memory, it is allocated at once, so that it never moves."""
Runs = Callable[[Inputs, Sequence[int]], Outputs]
"""Computes a forward with these taps."""
log = logging.getLogger("outrider")


class ReplayedForward:
    """The replayed forwards of a model or a head. They return copies, which later replays leave alone.

    Forwards that `Inputs` does not mark for it, such as those of prompts, run as they are, and so do all forwards once
    one could not be recorded.

    Attributes:
        num_forwards: Forwards that were replayed, those within chains included.
        num_recorded: Forwards and chains that were recorded.
        works: Whether forwards can be recorded; False once one could not.

    Args:
        runs: The forward.
        name: What the model is called in warnings.
        cache: Where its keys and values lie.
        modules: Returns the modules that it computes with. Their weights may change.
        vocab_size: Width of the logits that chains are drawn from.
    """

    def __init__(
        self, runs: Runs, *, name: str, cache: SlotCache, modules: Callable[[], Iterable[nn.Module]], vocab_size: int
    ) -> None:
        self.num_forwards = self.num_recorded = 0
        self.works = True
        self._runs, self._name, self._cache, self._vocab_size = runs, name, cache, vocab_size
        self._modules, weight = modules, next(weight for module in modules() for weight in module.parameters())
        self._device, self._dtype = weight.device, weight.dtype
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        cache.reserve_all(RESERVED)
        self.forget()

    def __call__(self, inputs: Inputs, taps: Sequence[int]) -> Outputs:
        """The outputs of a forward."""
        masks = _tensors(inputs.masks)
        if inputs.places is None or masks is None:
            return self._runs(inputs, taps)
        wanted, features = tuple(dict.fromkeys(taps)), inputs.batch.features(self._device, self._dtype)
        values = [inputs.batch.tokens(self._device), inputs.positions, inputs.places, *masks]
        values += [] if features is None else [features]
        num_rows = self._cache.bucket(inputs.rows)
        key = ("forward", num_rows, inputs.window.view, wanted, _forms(values))
        kept = self._find(key, lambda: _Forward(self._runs, self._cache, inputs, wanted, values, len(masks), num_rows))
        if kept is None:
            return self._runs(inputs, taps)
        rows = _Rows(inputs.rows, self._device)
        hand_over()
        kept.replay(rows, values)
        self.num_forwards += 1
        logits, *others = map(rows.of, kept.outputs)
        return Outputs(
            logits=logits,
            columns=np.arange(inputs.batch.width),
            taps=dict(zip(wanted, others, strict=False)),
            features=others[-1] if len(others) > len(wanted) else None,
        )

    def draw_chain(
        self, chain: WholeChain, tokens: Int[Tensor, " n"], links: Links, noise: ChainNoise | None
    ) -> DrawnTokens | None:
        """Run all forwards and draws of a chain; None where they cannot be recorded."""
        masks = _tensors(chain.masks)
        if masks is None:
            return None
        values = [tokens, *([] if chain.features is None else [chain.features.to(self._dtype)])]
        values += [] if noise is None else [noise.temperatures, noise.uniforms.T]
        key = ("chain", chain.positions.shape, chain.view, links, noise is None, _forms([*masks, *values]))
        kept = self._find(
            key, lambda: _Chain(self._runs, self._cache, chain, links, values, masks, noise is None, self._vocab_size)
        )
        if kept is None:
            return None
        rows = _Rows(chain.rows, self._device)
        kept.replay(rows, values, [chain.positions, chain.places, *masks])
        self.num_forwards += len(chain.positions)
        drawn, *distributions = (rows.of(output, axis=1) for output in kept.outputs)
        return DrawnTokens(tokens=drawn, rows=distributions[0] if distributions else None)

    def forget(self) -> None:
        """Drop all recordings, because the memory that they use has moved, or is not needed."""
        self._kept.clear()
        # The pool of recordings that are gone cannot be used again.
        self._recorder: Recorder = RECORDERS[self._device.type](self._device)
        self._generation = self._cache.generation
        self._addresses = [
            (weakref.ref(part), kind, name, weight.data_ptr())
            for module in self._modules()
            for part in module.modules()
            for kind in ("_parameters", "_buffers")
            for name, weight in getattr(part, kind).items()
            if weight is not None
        ]

    def _find(self, key: Hashable, make: Callable[[], "_Forward | _Chain"]) -> "_Kept | None":
        """The recording of this key, made if it is not there; None if it cannot be made."""
        if self._moved():
            self.forget()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        if not self.works:
            return None
        if len(self._kept) == MOST:
            self._kept.popitem(last=False)
        try:
            self._kept[key] = _Kept(self._recorder, make())
        except RuntimeError as error:
            self.works = False
            self._kept.clear()
            reason = str(error).strip().partition("\n")[0]
            log.warning("forwards of %s cannot be recorded, so they run eager: %s", self._name, reason)
            return None
        self.num_recorded += 1
        return self._kept[key]

    def _moved(self) -> bool:
        """Whether keys, values or weights lie elsewhere than when they were recorded."""
        if self._generation != self._cache.generation:
            return True
        for ref, kind, name, address in self._addresses:
            weight = getattr(ref(), kind, {}).get(name)
            if weight is None or weight.data_ptr() != address:
                return True
        return False


class _Rows:
    """Which rows of the cache the rows of a batch are.

    Args:
        rows: Their numbers.
        device: Where tensors are.
    """

    def __init__(self, rows: Sequence[int], device: torch.device) -> None:
        self._count = len(rows)
        # Most of the time they are the first ones, in order.
        self._index = None if list(rows) == list(range(len(rows))) else upload([np.array(rows)], device)[0]

    def of(self, values: Tensor, *, axis: int = 0) -> Tensor:
        """A copy of the batch's rows of a tensor, whose rows lie along an axis."""
        if self._index is None:
            return values.narrow(axis, 0, self._count).clone(memory_format=torch.contiguous_format)
        return values.index_select(axis, self._index)

    def fill(self, tensor: Tensor, values: Tensor, idle: Tensor) -> None:
        """Write values into the batch's rows of a tensor, and what idle rows hold into the others."""
        if self._index is None:
            tensor[: self._count].copy_(values)
            if self._count < len(tensor):
                tensor[self._count :].copy_(idle[self._count :])
        else:
            tensor.copy_(idle)
            tensor.index_copy_(0, self._index, values.to(tensor))


class _Kept:
    """A forward or a chain that is recorded.

    Args:
        recorder: What records it.
        source: The forward or the chain.
    """

    def __init__(self, recorder: Recorder, source: "_Forward | _Chain") -> None:
        self._source = source
        self._recording: Recording = recorder.record(source.run, [*source.by_row, *source.whole])

    @property
    def outputs(self) -> Sequence[Tensor]:
        """What the last replay computed; valid until the next replay of any recording of the model."""
        return self._recording.outputs

    def replay(self, rows: _Rows, by_row: Sequence[Tensor], whole: Sequence[Tensor] = ()) -> None:
        """Run it on new inputs.

        Args:
            rows: Which rows of the cache are in the batch.
            by_row: The inputs of these rows.
            whole: The inputs that are of all rows already.
        """
        source = self._source
        for tensor, values, idle in zip(source.by_row, by_row, source.idle, strict=True):
            rows.fill(tensor, values, idle)
        for tensor, values in zip(source.whole, whole, strict=True):
            tensor.copy_(values)
        self._recording.replay()


class _Forward:
    """One forward over tensors that stay where they are.

    Attributes:
        by_row: Its tokens, positions, places, masks and features.
        idle: What these hold for idle rows.
        whole: Nothing.
    """

    whole: Sequence[Tensor] = ()

    def __init__(
        self,
        runs: Runs,
        cache: SlotCache,
        inputs: Inputs,
        taps: Sequence[int],
        values: Sequence[Tensor],
        num_masks: int,
        num_rows: int,
    ) -> None:
        masks, features = values[3 : 3 + num_masks], values[3 + num_masks :]
        padding = upload([cache.padding(num_rows)], inputs.positions.device)[0]
        self.idle = [
            _constant(values[0], num_rows, 0),
            _constant(values[1], num_rows, 0),
            padding[:, None].expand(-1, inputs.positions.shape[1]),
            *(_constant(mask, num_rows, _seen(mask)) for mask in masks),
            *(_constant(vectors, num_rows, 0) for vectors in features),
        ]
        self.by_row = [idle.clone(memory_format=torch.contiguous_format) for idle in self.idle]
        tokens, positions, places, *others = self.by_row
        self._runs, self._taps = runs, taps
        self._inputs = Inputs(
            batch=Padded(ids=tokens, vectors=others[num_masks] if features else None),
            positions=positions,
            masks=_with_tensors(inputs.masks, others[:num_masks]),
            window=cache.window_in_front(num_rows, places, inputs.window.view),
            columns=np.arange(positions.shape[1]),
        )

    def run(self) -> Sequence[Tensor]:
        """The logits, the tapped hidden states and a head's output features."""
        outputs = self._runs(self._inputs, self._taps)
        features = [] if outputs.features is None else [outputs.features]
        return [outputs.logits, *(outputs.taps[k] for k in self._taps), *features]


class _Chain:
    """A chain's forwards and draws over tensors that stay where they are.

    Attributes:
        by_row: The first tokens, and what they are read and drawn with.
        idle: What these hold for idle rows.
        whole: The positions, places and masks of all forwards.
    """

    def __init__(
        self,
        runs: Runs,
        cache: SlotCache,
        chain: WholeChain,
        links: Links,
        values: Sequence[Tensor],
        masks: Sequence[Tensor],
        greedy: bool,
        vocab_size: int,
    ) -> None:
        steps, num_rows, width = chain.positions.shape
        self._runs, self._links, self._greedy, self._vocab_size = runs, links, greedy, vocab_size
        # Only temperatures must not be 0.
        self.idle = [_constant(each, num_rows, 1 if each.is_floating_point() else 0) for each in values]
        self.by_row = [idle.clone(memory_format=torch.contiguous_format) for idle in self.idle]
        padding = upload([cache.padding(num_rows)], chain.positions.device)[0]
        places = padding[:, None].expand(steps, -1, width).clone(memory_format=torch.contiguous_format)
        shown = [torch.full_like(mask, _seen(mask)) for mask in masks]
        self.whole = [torch.zeros_like(chain.positions), places, *shown]
        self._inputs = [
            Inputs(
                # The tokens and features of each forward are known when the one before has run.
                batch=Padded.one_each(self.by_row[0], None, width),
                positions=self.whole[0][k],
                masks=_with_tensors(chain.masks, [mask.unflatten(0, (steps, num_rows))[k] for mask in shown]),
                window=cache.window_in_front(num_rows, places[k], chain.view),
                columns=np.arange(width),
            )
            for k in range(steps)
        ]

    def run(self) -> Sequence[Tensor]:
        """The drawn tokens, and the rows that they were drawn from."""
        tokens, *others = self.by_row
        features = others.pop(0) if self._links.next_feature else None
        drawn, rows = list[Tensor](), list[Tensor]()
        for k, inputs in enumerate(self._inputs):
            batch = Padded.one_each(tokens, features, inputs.batch.width)
            outputs = self._runs(replace(inputs, batch=batch), ())
            logits = self._links.logits(outputs.logits[:, 0, : self._vocab_size])
            if self._greedy:
                places = logits.argmax(-1)
            else:
                temperatures, uniforms = others
                rows.append(tempered(logits, temperatures))
                places = inverse_cdf(rows[-1], uniforms[:, k])
            tokens = places if self._links.ids is None else self._links.ids[places]
            drawn.append(tokens)
            if self._links.next_feature is not None and outputs.features is not None:
                features = self._links.next_feature(outputs.features[:, 0])
        return [torch.stack(drawn), *([torch.stack(rows)] if rows else [])]


def _tensors(masks: object) -> list[Tensor] | None:
    """The tensors among a model's masks; None where there is a mask of another kind, or none at all."""
    parts = [mask for mask in masks.values() if mask is not None] if isinstance(masks, Mapping) else [masks]
    tensors = [mask for mask in parts if isinstance(mask, Tensor)]
    return tensors if tensors and len(tensors) == len(parts) else None


def _with_tensors(masks: object, tensors: Sequence[Tensor]) -> object:
    """Masks of the same kinds, with other tensors."""
    left = iter(tensors)
    if isinstance(masks, Mapping):
        return {kind: None if mask is None else next(left) for kind, mask in masks.items()}
    return next(left)


def _forms(tensors: Sequence[Tensor]) -> tuple[object, ...]:
    """What must be the same of inputs that one recording takes, apart from how many rows they have."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


def _constant(like: Tensor, num_rows: int, value: float) -> Tensor:
    """As many rows as the recording has, all with the same value."""
    return like.new_full((), value).expand(num_rows, *like.shape[1:])


def _seen(mask: Tensor) -> bool:
    """What a mask holds where a key is seen: True, or 0 in a mask that is added."""
    return mask.dtype == torch.bool
