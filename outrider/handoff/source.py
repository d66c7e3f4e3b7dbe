"""What is exported: a target, and the drafter that was trained for it or that is drawn at random."""

import copy
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from outrider import catalog
from outrider.core.inputs import InputError, field_values, unknown
from outrider.core.place import place_of
from outrider.drafters.exports import Exports
from outrider.drafters.traits import Traits, exports_of
from outrider.handoff.engines import KNOWN
from outrider.handoff.order import ExportRequest
from outrider.heads.head import Head, TrainedHead
from outrider.heads.objective import HeadContext
from outrider.heads.spec import HeadSpec
from outrider.lm.hf.checkpoint import Checkpoint, TargetShape
from outrider.lm.hf.open import logit_width, open_model, open_tokenizer
from outrider.lm.hf.tokenizer_files import write_tokenizer
from outrider.lm.target_info import TargetInfo

DEPTH = 5
"""Draft tokens of a step where neither the user nor the drafter says a number."""
DRAFT_MODEL = "model"
"""The catalog's name of draft models."""
SMALLER = 4
"""An untrained draft model has one of so many layers of its target."""
READ = ("path", "revision", "device", "dtype", "max_context", "spec")
"""The fields of a drafter that an export needs or that say where Outrider runs it."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A target and its drafter, loaded.

    Attributes:
        name: The drafter's name in the catalog.
        kind: What the catalog has for it.
        exports: Which engines run it.
        target: The target.
        tokenizer: The target's; None if it has none.
        head: The drafter, if it is a head.
        checkpoint: The files of that head; None if its weights were drawn here.
        draft: The drafter, if it is a draft model.
        draft_tokenizer: The draft model's own; None if it has none.
        place: The drafter's directory or hub id; empty if it has none.
        unused: Fields of the drafter, as the user wrote them, that other engines know nothing of.
    """

    name: str
    kind: Any
    exports: Exports
    target: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    head: Head | None = None
    checkpoint: Checkpoint | None = None
    draft: PreTrainedModel | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    place: str = ""
    unused: tuple[str, ...] = ()

    @property
    def info(self) -> TargetInfo:
        """The target as a head sees it."""
        return TargetInfo.of_model(self.target, self.tokenizer)

    @property
    def shape(self) -> TargetShape:
        """The target that the head was trained for."""
        info = self.info
        return TargetShape(
            num_layers=info.num_layers,
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            taps=() if self.head is None else tuple(self.head.reads(info.num_layers)),
        )

    @property
    def most(self) -> int | None:
        """Most tokens that the head can guess; None: any number."""
        sizes = getattr(self.head, "config", None)
        slots = getattr(self.head, "num_slots", None)
        depth = getattr(sizes, "max_depth", getattr(self.head, "max_depth", None))
        return depth if slots is None else slots + 1

    @property
    def same_vocabulary(self) -> bool:
        """Whether the draft model has as many tokens as the target; true of heads."""
        return self.draft is None or logit_width(self.draft) == logit_width(self.target)


def refused(name: str, exports: Exports, engine: str) -> InputError:
    """The error for a drafter that an engine cannot run: it names the nearest one, and how that is trained."""
    seen, wanted = {name}, exports.instead or DRAFT_MODEL
    while wanted not in seen and exports_of(catalog.rows("drafter")[wanted].kind).method(engine) is None:
        seen.add(wanted)
        wanted = exports_of(catalog.rows("drafter")[wanted].kind).instead or DRAFT_MODEL
    trainer = Traits.of(catalog.rows("drafter")[wanted].kind).trainer or wanted
    what = "a draft model" if wanted == DRAFT_MODEL else f"a head of the kind {wanted!r}"
    return InputError(
        f"{engine} cannot load a drafter of the kind {name!r}; the nearest that it can is {what}. Train one with "
        f"`outrider train {trainer} --target TARGET --data DATA --out OUT`, then export that"
    )


def open_source(order: ExportRequest) -> Source:
    """The target and the drafter of an order.

    Raises:
        InputError: The drafter is missing, does not fit the target, or is not of a kind that the engine knows.
    """
    if order.dry_run:
        return _untrained(order)
    drafter = catalog.make("drafter", order.drafter)
    name = catalog.name_of(drafter)
    kind = catalog.rows("drafter")[name].kind
    exports = _allowed(name, kind, order.to)
    head: Head | None = None
    draft: PreTrainedModel | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    path = getattr(drafter, "path", None)
    if not exports.has_files and path is not None:
        raise InputError(f"{order.to} takes {name} from the target's own checkpoint; leave out the path {path}")
    # Wrong places are told before the target is read.
    if isinstance(drafter, TrainedHead):
        drafter.check_files()
    elif exports.has_files and path is not None:
        place_of(str(path))
    target, tokenizer = _target(order)
    info = TargetInfo.of_model(target, tokenizer)
    if isinstance(drafter, TrainedHead):
        head = cast(HeadSpec, kind).head.load(drafter.checkpoint, info, drafter)
        exports = head.engine_names(exports)
    elif exports.has_files and exports.transformers == "assistant_model":
        draft, draft_tokenizer = _draft(order, str(path))
    return Source(
        name=name,
        kind=kind,
        exports=exports,
        target=target,
        tokenizer=tokenizer,
        head=head,
        checkpoint=drafter.checkpoint if isinstance(drafter, TrainedHead) else None,
        draft=draft,
        draft_tokenizer=draft_tokenizer,
        place=str(path or ""),
        unused=_fields_beside(drafter, READ),
    )


def as_folder(target: str, engine: str, room: Path) -> str:
    """A target as an engine takes it: the weights and the tokenizer of a GGUF file are written into a folder, where the
    engine reads no such files.
    """
    if KNOWN[engine].reads_gguf or place_of(target).file is None:
        return target
    open_model(target).save_pretrained(room)
    tokenizer = open_tokenizer(target)
    if tokenizer is not None:
        write_tokenizer(tokenizer, room)
    return str(room)


def _allowed(name: str, kind: Any, engine: str) -> Exports:
    """What an engine needs to know of a kind of drafters. Raises InputError if it cannot run it."""
    exports = exports_of(kind)
    if exports.method(engine) is None:
        raise refused(name, exports, engine)
    return exports


def _fields_beside(drafter: Any, names: Collection[str]) -> tuple[str, ...]:
    """The options of a drafter that somebody has set, beside those of some names."""
    fields = [f for f in type(drafter).__dataclass_fields__.values() if not f.name.startswith("_")]
    return tuple(f.name for f in fields if f.name not in names and getattr(drafter, f.name) != f.default)


def _target(order: ExportRequest) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    trusted = order.trust_remote_code
    target = open_model(
        order.target, dtype=order.dtype, device=order.device, revision=order.revision, trust_remote_code=trusted
    )
    return target, open_tokenizer(order.target, revision=order.revision, trust_remote_code=trusted)


def _draft(order: ExportRequest, path: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """A draft model. The layers of an adapter are merged into it."""
    draft = open_model(path, dtype=order.dtype, device="cpu", trust_remote_code=order.trust_remote_code)
    merge = getattr(draft, "merge_and_unload", None)
    if merge is not None:
        draft = merge()
    return draft, open_tokenizer(path, trust_remote_code=order.trust_remote_code)


def _untrained(order: ExportRequest) -> Source:
    """A new drafter of the kind that the order names, with weights drawn at random.

    Raises:
        InputError: It names no kind, or an option that is not one of its training.
    """
    name, _, rest = order.drafter.partition(":")
    known = catalog.rows("drafter")
    if name not in known:
        if catalog.is_place(order.drafter):
            raise InputError(f"a dry run draws a drafter at random; give a name such as eagle3, got {order.drafter}")
        raise unknown("drafter", name, known)
    kind = known[name].kind
    exports = _allowed(name, kind, order.to)
    if not exports.has_files:
        raise InputError(f"{name} has no weights of its own, so there is nothing to draw; leave out --dry-run")
    spec = kind if isinstance(kind, HeadSpec) else None
    options = None
    if spec is not None and spec.options is not None:
        options = spec.options(**cast(Any, field_values(f"drafter {name!r}", spec.options, rest)))
        options.check()
    elif rest:
        raise InputError(f"a dry run of {name} has no options, got {rest!r}")
    target, tokenizer = _target(order)
    source = Source(name=name, kind=kind, exports=exports, target=target, tokenizer=tokenizer)
    torch.manual_seed(0)
    if spec is None:
        return _with(source, draft=_smaller(target), draft_tokenizer=tokenizer)
    depth = order.num_speculative_tokens or DEPTH
    context = HeadContext(target=target, tokenizer=tokenizer, depth=depth)
    head = spec.head.new(options, context)
    return _with(source, head=head, exports=head.engine_names(exports))


def _with(source: Source, **more: Any) -> Source:
    return Source(**{**vars(source), **more})


def _smaller(target: PreTrainedModel) -> PreTrainedModel:
    """A model like a target with fewer layers, and random weights."""
    config = copy.deepcopy(target.config)
    text = config.get_text_config(decoder=True)
    count = max(1, text.num_hidden_layers // SMALLER)
    text.num_hidden_layers = count
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:count]
    return AutoModelForCausalLM.from_config(config, dtype=target.dtype)
