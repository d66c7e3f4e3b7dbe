"""Engines kept beside the models they were made for."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from threading import Lock

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.load import load

KEPT_ENGINES = 2
"""Most engines that are kept for one model; each holds a cache."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an engine is made with; the fields are arguments of `outrider.load`. `max_slots` None: by the batch."""

    drafter: str | object
    tree: str | object
    verifier: str | object | None
    length: str | object | None
    tokenizer: PreTrainedTokenizerBase | None
    max_slots: int | None
    max_context: int | None
    pad_to: int | None
    allow_lossy: bool


@dataclass(frozen=True, kw_only=True)
class _Kept:
    """An engine, and what it was made of: options, and the model's place and shape."""

    options: Options
    form: tuple[object, ...]
    engine: Engine


_KEPT: weakref.WeakKeyDictionary[PreTrainedModel, list[_Kept]] = weakref.WeakKeyDictionary()
_LOCK = Lock()


@contextmanager
def borrowed(model: PreTrainedModel, options: Options) -> Iterator[Engine]:
    """The engine of a model and its options, made at first use.

    Nobody else has it meanwhile: a second call at the same time gets one of its own. An engine that failed is dropped.
    It forgets its texts when it is given back, because weights may change before the next call.
    """
    form = (model.device, model.dtype, width_of(model), model.config.get_text_config(decoder=True)._attn_implementation)
    with _LOCK:
        kept = [k for k in _KEPT.get(model, []) if k.form == form]
        found = next((k for k in kept if _same(k.options, options)), None)
        _KEPT[model] = [k for k in kept if k is not found]
    if found is None:
        found = _Kept(options=options, form=form, engine=_engine(model, options))
    yield found.engine
    found.engine.rest()
    with _LOCK:
        _KEPT[model] = [*_KEPT[model], found][-KEPT_ENGINES:]


def _same(some: Options, other: Options) -> bool:
    """Whether two are written alike; objects must be the very same, for they may hold what cannot be compared."""
    pairs = [(getattr(some, f.name), getattr(other, f.name)) for f in fields(Options)]
    return all(a is b or (isinstance(a, str | int) and type(a) is type(b) and a == b) for a, b in pairs)


def _engine(model: PreTrainedModel, options: Options) -> Engine:
    """An engine that does not keep its model alive, and leaves text to the caller."""
    own = {f.name: getattr(options, f.name) for f in fields(Options)}
    made = load(model, **own, vocab_size=width_of(model))
    if isinstance(made.parts.target, LanguageModel):
        made.parts.target.model = weakref.proxy(model)
    return Engine(made.parts, max_slots=made.max_slots)


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Evaluation mode for a while; each module gets back the mode that it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def width_of(model: PreTrainedModel) -> int:
    return int(model.get_output_embeddings().weight.shape[0])
