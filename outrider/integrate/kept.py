"""Engines that are kept beside their models between calls."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields, replace
from threading import Lock, RLock

from torch.nn import Module
from transformers import PreTrainedModel

from outrider.assembly import assemble
from outrider.engine.engine import Engine
from outrider.lm.hf.open import logit_width
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel
from outrider.setup import Setup

KEPT_ENGINES = 2
"""Most engines that are kept for one model; each holds a cache."""


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """An engine, with the options, device, dtype and shape of the model that it was made for."""

    options: Setup
    form: tuple[object, ...]
    engine: Engine


_KEPT: weakref.WeakKeyDictionary[PreTrainedModel, list[_Kept]] = weakref.WeakKeyDictionary()
_TRAINING: weakref.WeakKeyDictionary[PreTrainedModel, tuple[int, list[Module]]] = weakref.WeakKeyDictionary()
"""Models in evaluation mode because of running calls: the number of calls, and the modules that were in training mode.
"""
_LOCK = Lock()
_LOADING = RLock()
"""Held while an engine is made. transformers cannot load two models at once, because it swaps global functions."""
_SHARED = RLock()
"""Held by calls whose drafter is an object, because other calls may use the same object, and its cache is not for two
threads. A call within a call is allowed."""


@contextmanager
def borrowed(model: PreTrainedModel, options: Setup) -> Iterator[Engine]:
    """The engine of a model and its options, made at first use.

    One call at a time uses it: a second call at the same time gets another engine. An engine that failed is dropped.
    After each call the engine releases its warm slots, because weights may change before the next call.
    """
    form = (
        model.device,
        model.dtype,
        logit_width(model),
        model.config.get_text_config(decoder=True)._attn_implementation,
    )
    with _LOCK:
        kept = [k for k in _KEPT.get(model, []) if k.form == form]
        entry = next((k for k in kept if _same(k.options, options)), None)
        _KEPT[model] = [k for k in kept if k is not entry]
    with nullcontext() if isinstance(options.drafter, str | None) else _SHARED:
        if entry is None:
            with _LOADING:
                entry = _Kept(options=options, form=form, engine=_engine(model, options))
        try:
            yield entry.engine
        finally:
            entry.engine.rest()
    with _LOCK:
        _KEPT[model] = [*_KEPT[model], entry][-KEPT_ENGINES:]


def _same(some: Setup, other: Setup) -> bool:
    """Whether two setups are equal. Objects must be identical, because they may hold values that cannot be compared."""
    pairs = [(getattr(some, f.name), getattr(other, f.name)) for f in fields(Setup)]
    return all(a is b or (isinstance(a, str | int) and type(a) is type(b) and a == b) for a, b in pairs)


def _engine(model: PreTrainedModel, options: Setup) -> Engine:
    """An engine that does not keep its model alive, and leaves text to the caller."""
    # `generate` makes the processors and criteria of its own generation config.
    setup = replace(options, target=model, vocab_size=logit_width(model), ignore_generation_config=True)
    assembled = assemble(setup)
    if isinstance(assembled.parts.target, LanguageModel):
        assembled.parts.target.hold_weakly()
    elif isinstance(assembled.parts.target, RecurrentModel):
        assembled.parts.target.model = weakref.proxy(model)
    return Engine(
        assembled.parts,
        max_slots=assembled.max_slots,
        max_prefill_tokens=assembled.max_prefill_tokens,
        max_warm_slots=assembled.max_warm_slots,
        max_warm_tokens=assembled.max_warm_tokens,
    )


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Put a model into evaluation mode. When the last call ends, each module returns to its old mode."""
    with _LOCK:
        count, training = _TRAINING.pop(model, (0, [module for module in model.modules() if module.training]))
        _TRAINING[model] = (count + 1, training)
        model.eval()
    try:
        yield
    finally:
        with _LOCK:
            count, training = _TRAINING.pop(model)
            if count > 1:
                _TRAINING[model] = (count - 1, training)
            else:
                for module in training:
                    module.training = True
