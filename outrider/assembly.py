"""Make an engine from a setup: make its parts, check them against the refusal matrix, put them together."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider import catalog
from outrider.core.ranks import together
from outrider.core.row import Family
from outrider.core.types import InputError, Sampling, Structure
from outrider.decoding.protocol import Decoding, Parts, Settling
from outrider.decoding.step import StepDecoding
from outrider.drafters.protocol import Drafter, Unbound, UnboundCheckpoint
from outrider.embedded import EMBEDDED_DRAFT, EMBEDDED_TARGET
from outrider.engine.crowd import warn_of_crowd
from outrider.engine.engine import Engine
from outrider.heads.shipped import shipped_head
from outrider.host.mapped import release_heap
from outrider.host.threads import release_threads, use_threads
from outrider.lengths.protocol import LengthPolicy, LoadPolicy
from outrider.lm.choice import choose
from outrider.lm.forwards.forward import as_forward
from outrider.lm.hf.generation_config import ADVICE, default_sampling, eos_ids, rules_of, stop_strings
from outrider.lm.hf.open import LOADING, level_of, logit_width, open_model, open_tokenizer, unwrapped
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.protocol import LM
from outrider.lm.target_info import TargetInfo
from outrider.lm.weights.checkpoint import keep_packed
from outrider.lm.weights.quantiser import Quantiser
from outrider.lm.weights.rounder import Rounder
from outrider.plan.table import experience_of, measured_again
from outrider.refusals import DEFAULT, Cell, kind_of, refusal
from outrider.setup import Setup
from outrider.trees.protocol import Tree, union_structure
from outrider.verifiers.protocol import Verifier

USUAL = Setup(drafter="suffix", length="goodput")
"""The defaults of a setup with a target."""
EMBEDDED = Setup(target=EMBEDDED_TARGET, drafter=f"model:path={EMBEDDED_DRAFT}", length="goodput:fallback=4")
"""The defaults of a setup that names neither target nor drafter."""
OTHERWISE = {"goodput": "fixed:5", "goodput:fallback=4": "fixed:4"}
"""Default lengths, and what is used with parts that need drafts of one length."""
MAX_SLOTS = 8
"""Most requests at once, by default."""
OF_LOADING = (
    *("device", "dtype", "weights", "activations", "device_map", "tp_plan", "quantization_config"),
    *("attn_implementation", "revision"),
)
"""Options that say how a target is loaded."""
KINDS: dict[Family, tuple[type, ...]] = {
    "drafter": (Drafter, Unbound),
    "tree": (Tree,),
    "verifier": (Verifier,),
    "length": (LengthPolicy,),
    "decoding": (Decoding,),
}
"""The protocols of each family of parts; a part satisfies one of them."""
log = logging.getLogger(LOADING)


def assemble(setup: Setup, *, target: LM | None = None, drafter: Drafter | None = None) -> Engine:
    """The engine that a setup describes.

    Args:
        target: The setup's target where it is loaded already, so that engines that do not run at once share it.
        drafter: The setup's drafter, likewise.

    Raises:
        InputError: An option, file or method does not exist, or the parts do not fit or are not lossless. The message
            says what works.
    """
    use_threads(setup.threads)
    wanted = completed(setup)
    # A name of no method or file fails before weights are read.
    named = _named(wanted, drafter)
    loaded = _loaded(wanted, target)
    parts = _settled(_bound(named, loaded), loaded.setup, length_named=setup.length is not None)
    # Another thread may run the engine.
    release_threads()
    # Reading a tokenizer and its config takes many times the memory of what is kept of them.
    release_heap()
    if not loaded.shared:
        log.log(level_of(loaded.model), "%s", _runs(loaded.setup, parts))
    if parts.target.device.type == "cpu":
        warn_of_crowd()
    return _engine(parts, loaded)


def check_names(setup: Setup) -> None:
    """Raise InputError if a setup names no method that exists, or a drafter that is nowhere. Reads no weights."""
    _named(completed(setup), None)


@dataclass(frozen=True, kw_only=True)
class _Named:
    """The parts that need no target; of the drafter and the verifier, what is known without one.

    Attributes:
        verifier: None takes the best one for the drafts.
    """

    tree: Tree
    length: LengthPolicy
    decoding: Decoding
    drafter: Drafter | Unbound
    verifier: Verifier | None


def _named(setup: Setup, drafter: Drafter | None) -> _Named:
    """The parts that a setup names. Files of a drafter are looked for, and not read yet."""
    named = _Named(
        tree=_part("tree", setup.tree),
        length=_part("length", setup.length),
        decoding=_part("decoding", setup.decoding),
        drafter=drafter or _part("drafter", setup.drafter),
        verifier=_named_verifier(setup),
    )
    if isinstance(named.drafter, UnboundCheckpoint):
        named.drafter.check_files()
    return named


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """A target that is loaded.

    Attributes:
        setup: With the defaults that suit this target.
        model: Its model.
        tokenizer: Its tokenizer; None if there is none.
        target: The model as the engine sees it.
        shared: Whether other engines use it too.
    """

    setup: Setup
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    target: LM
    shared: bool


def _loaded(setup: Setup, target: LM | None) -> _Loaded:
    """The target that a setup names, or the one that is loaded already."""
    model = _model(setup) if target is None else _model_of(target)
    tokenizer = tokenizer_of(setup)
    running = _running(setup, model, tokenizer)
    return _Loaded(
        setup=running,
        model=model,
        tokenizer=tokenizer,
        target=target or _target(running, model),
        shared=target is not None,
    )


def _bound(named: _Named, loaded: _Loaded) -> Parts:
    """The parts, with a drafter that knows its target and a target that returns the hidden states which it reads."""
    setup, target, drafter = loaded.setup, loaded.target, named.drafter
    if isinstance(drafter, Unbound):
        drafter = drafter.bind(_surroundings(setup, target, loaded.tokenizer))
    if loaded.shared and drafter.taps and getattr(target, "forward", None) == "compiled":
        # Its forwards may have to be others for the sake of this drafter.
        target = _target(setup, loaded.model)
    _suit_forwards(target, drafter.taps, setup)
    best = _part("verifier", _best_verifier(drafter, named.tree)) if named.verifier is None else named.verifier
    return Parts(
        target=target, drafter=drafter, tree=named.tree, verifier=best, length=named.length, decoding=named.decoding
    )


def _settled(parts: Parts, setup: Setup, *, length_named: bool) -> Parts:
    """The parts that will run: another default length where they need one, and what is known of their costs.

    Raises:
        InputError: They do not fit or are not lossless.
    """
    unsuited = parts.tree.structure != "chain" or together() > 1
    if not length_named and (unsuited or why_not(parts, setup.allow_lossy) is not None):
        parts = replace(parts, length=_part("length", OTHERWISE[str(setup.length)]))
    if (reason := why_not(parts, setup.allow_lossy)) is not None:
        raise InputError(reason)
    if isinstance(parts.decoding, Settling):
        parts = parts.decoding.settled(parts, named=length_named)
    if not isinstance(parts.length, LoadPolicy):
        return parts
    return replace(parts, experience=experience_of(parts, max_slots=_most_slots(setup), probe=setup.probe))


def _engine(parts: Parts, loaded: _Loaded) -> Engine:
    """The engine of parts that fit, which follows its target's generation config unless it is told not to."""
    setup, model, max_slots = loaded.setup, loaded.model, _most_slots(loaded.setup)
    follows = not setup.ignore_generation_config
    stop = stop_strings(model) if follows else ()
    if stop and loaded.tokenizer is None:
        raise InputError(f"the target's generation config has stop_strings, which need a tokenizer; {ADVICE}")
    measures = isinstance(parts.length, LoadPolicy) and setup.probe
    return Engine(
        parts,
        tokenizer=loaded.tokenizer,
        eos_ids=eos_ids(model),
        stop=stop,
        sampling=default_sampling(model) if follows else Sampling(),
        rules=rules_of(model, parts.target.vocab_size) if follows else None,
        max_slots=max_slots,
        max_prefill_tokens=setup.max_prefill_tokens,
        max_warm_slots=setup.max_warm_slots or 0,
        max_warm_tokens=setup.max_warm_tokens,
        needs_seeds=setup.reproducible,
        refuses=partial(why_not, allow_lossy=setup.allow_lossy),
        measure=partial(measured_again, max_slots=max_slots) if measures else None,
    )


def completed(setup: Setup, *, heads: bool = True) -> Setup:
    """The setup with the default target, drafter and length where it names none.

    Args:
        heads: Whether a head that ships for the target drafts by default, beside `suffix`. It does so in chains, step
            by step.

    Example:
        >>> completed(Setup("org/target")).drafter, completed(Setup()).length
        ('suffix', 'goodput:fallback=4')
    """
    embedded = setup.target is None and setup.drafter is None
    usual = EMBEDDED if embedded else replace(USUAL, target=EMBEDDED.target)
    if heads and setup.drafter is None and isinstance(setup.target, str) and not _shaped(setup):
        head = shipped_head(setup.target, setup.revision)
        usual = usual if head is None else replace(usual, drafter=f"first:{usual.drafter},{head}")
    missing = [name for name in ("target", "drafter", "length") if getattr(setup, name) is None]
    return replace(setup, **{name: getattr(usual, name) for name in missing})


def _shaped(setup: Setup) -> bool:
    """Whether a setup says how drafts are shaped or verified, which may not suit a head."""
    return setup.reproducible or bool({"tree", "verifier", "length", "decoding"} & setup.options().keys())


def tokenizer_of(setup: Setup) -> PreTrainedTokenizerBase | None:
    """The tokenizer of a target: the named or given one, otherwise the one beside the target; None if there is none."""
    trusted = setup.trust_remote_code
    if isinstance(setup.tokenizer, str):
        tokenizer = open_tokenizer(setup.tokenizer, trust_remote_code=trusted)
        if tokenizer is None:
            raise InputError(
                f"there is no tokenizer in {setup.tokenizer}; give a directory, a GGUF file or a hub id that has one"
            )
        return tokenizer
    if setup.tokenizer is not None:
        if not isinstance(setup.tokenizer, PreTrainedTokenizerBase):
            raise InputError(
                f"tokenizer must be a directory, a GGUF file, a hub id or a tokenizer, got {setup.tokenizer!r}"
            )
        return setup.tokenizer
    if isinstance(setup.target, str):
        return open_tokenizer(setup.target, what="model", revision=setup.revision, trust_remote_code=trusted)
    place = str(getattr(setup.target, "name_or_path", ""))
    return open_tokenizer(place, trust_remote_code=trusted) if os.path.exists(place) else None


def why_not(parts: Parts, allow_lossy: bool = False) -> str | None:
    """Why parts do not fit each other, in one sentence; None if they fit."""
    reasons = (refusal(cell, allow_lossy) for cell in cells(parts))
    return next(filter(None, reasons), None) or chains_only(parts) or by_a_clock(parts)


def cells(parts: Parts) -> list[Cell]:
    """Where a combination of parts stands in the refusal matrix: a cell for each drafter that may draft in a step.
    Where one of several is chosen, single tokens make chains beside any tree.
    """
    drafter = parts.drafter
    several = len(drafter.components) > 1 and not drafter.unites
    return [
        Cell(
            rows=each.rows,
            context_pure=drafter.context_pure,
            taps=bool(drafter.taps),
            estimates=drafter.estimates,
            several=several,
            branches=hasattr(each, "branching"),
            unites=each.unites,
            ranked=hasattr(parts.tree, "ranked"),
            structure="chain" if several and each.rows == "point" else structure_of(each, parts.tree),
            verifier=parts.verifier,
            length=parts.length,
            decoding=parts.decoding,
        )
        for each in (drafter.components if several else (drafter,))
    ]


def structure_of(drafter: Drafter, tree: Tree) -> Structure:
    """How the children of the drafts of a drafter and a tree are made."""
    return union_structure(tree.structure) if drafter.unites else tree.structure


def chains_only(parts: Parts) -> str | None:
    """Why the target or the drafter cannot take a branching tree; None if both can, or the tree does not branch. The
    target takes the tree of a union, of which the drafter may have drawn a chain.
    """
    chain = parts.tree.structure == "chain"
    if chain and not any(each.unites for each in (parts.drafter, *parts.drafter.components)):
        return None
    of_drafter = None if chain else parts.drafter.chains_only
    for role, reason in (("target", parts.target.chains_only), ("draft model", of_drafter)):
        if reason is not None:
            return f"the {role} {reason}"
    return None


def by_a_clock(parts: Parts) -> str | None:
    """What of the parts depends on times, which processes that hold one target together measure differently; None if
    nothing does.
    """
    if together() == 1:
        return None
    for family, part, clocked, instead in (
        ("length", parts.length, isinstance(parts.length, LoadPolicy), "fixed:5"),
        ("decoding", parts.decoding, not isinstance(parts.decoding, StepDecoding), "step"),
    ):
        if clocked:
            return (
                f"the target is held by {together()} processes, and {family} {catalog.name_of(part)!r} depends on "
                f"times, which they measure differently; choose {family} {instead!r}"
            )
    return None


def _runs(setup: Setup, parts: Parts) -> str:
    """The line that says how a target runs and what drafts for it."""
    target, drafter = parts.target, setup.drafter
    choice = getattr(target, "choice", None)
    how = "eager" if choice is None else choice.forward
    drafts = drafter if isinstance(drafter, str) else type(parts.drafter).__name__
    return (
        f"running {how} forwards on {target.device}, {_most_slots(setup)} slots of {target.max_context:,} tokens; "
        f"drafter {drafts}"
    )


def _part(family: Family, part: str | object) -> Any:
    """A part by its name, or as it was given."""
    if isinstance(part, str | Mapping):
        return catalog.make(family, part)
    if not isinstance(part, KINDS[family]):
        raise InputError(f"{family} must be a name of the catalog or a part of that family, got {part!r}")
    return part


def _named_verifier(setup: Setup) -> Verifier | None:
    """The verifier that a setup names or needs; None takes the best one for the drafts."""
    named = "coupled" if setup.verifier is None and setup.reproducible else setup.verifier
    if named is None:
        return None
    verifier: Verifier = _part("verifier", named)
    if setup.reproducible and not getattr(verifier, "shares_noise", False):
        raise InputError(
            f"reproducible outputs need verifier 'coupled', got {catalog.name_of(verifier)!r}, whose draws depend on "
            "what is drafted; leave out --verifier or --reproducible (verifier or reproducible)"
        )
    return verifier


def _best_verifier(drafter: Drafter, tree: Tree) -> str:
    """The lossless verifier that accepts most of the drafts that a drafter and a tree make."""
    last = drafter.components[-1]
    return DEFAULT[kind_of(drafter.rows, structure_of(last if last.unites else drafter, tree))]


def _model(setup: Setup) -> PreTrainedModel:
    """The target: opened where it is named, otherwise as it was given."""
    if isinstance(setup.target, str):
        rounder = Rounder.of(setup.activations)
        model = open_model(
            setup.target,
            dtype=setup.dtype,
            device=setup.device,
            device_map=setup.device_map,
            tp_plan=setup.tp_plan,
            quantization_config=setup.quantization_config,
            attn_implementation=setup.attn_implementation,
            revision=setup.revision,
            trust_remote_code=setup.trust_remote_code,
            keep_blocks=keep_packed(setup.dtype, revision=setup.revision, gguf=setup.dtype == "auto"),
            quantise=Quantiser.of(setup.weights),
        )
        return model if rounder is None else rounder(model)
    target = unwrapped(setup.target)
    if not isinstance(target, PreTrainedModel):
        described = f"a {type(target).__name__}" if isinstance(target, Module) else repr(target)
        raise InputError(f"target must be a directory, a GGUF file, a hub id or a transformers model, got {described}")
    if foreign := [name for name in OF_LOADING if name in setup.options()]:
        raise InputError(f"the target is loaded already; leave out {', '.join(foreign)}, or name the target instead")
    return target


def _model_of(target: LM) -> PreTrainedModel:
    """The model of a target that is loaded already."""
    model = target.modules.get("model")
    if not isinstance(model, PreTrainedModel):
        raise InputError("a target that is shared must be a transformers model")
    return model


def _running(setup: Setup, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Setup:
    """The setup with defaults that suit this model and this machine."""
    usual: dict[str, Any] = {"vocab_size": _vocab_size(model, tokenizer), "max_slots": MAX_SLOTS}
    return replace(setup, **{name: value for name, value in usual.items() if getattr(setup, name) is None})


def _target(setup: Setup, model: PreTrainedModel) -> LM:
    """The target as the engine sees it."""
    return as_lm(
        model,
        max_slots=_all_slots(setup),
        max_context=setup.max_context,
        vocab_size=setup.vocab_size,
        pad_to=setup.pad_to,
        forward=as_forward(setup.forward),
        # A given model may still be trained.
        lasting=isinstance(setup.target, str),
        # The engine lets requests wait that do not fit beside others.
        overcommit=True,
    )


def _all_slots(setup: Setup) -> int:
    """Slots of running and of ended requests."""
    return _most_slots(setup) + (setup.max_warm_slots or 0)


def _most_slots(setup: Setup) -> int:
    """Slots of running requests."""
    return setup.max_slots or MAX_SLOTS


def _suit_forwards(target: LM, taps: Sequence[int], setup: Setup) -> None:
    """Let a compiled target hand on the hidden states that its drafter reads, or run otherwise. Nothing is compiled
    unless compiled forwards were asked for: this takes minutes, and must not happen within an answer.
    """
    if not taps or not isinstance(target, LanguageModel) or target.forward != "compiled":
        return
    if setup.forward == "compiled":
        target.prepare(taps)
    elif not target.has_library(taps):
        target.choice = choose(target, forward=None, pad_to=setup.pad_to, taps=taps)


def _surroundings(setup: Setup, target: LM, tokenizer: PreTrainedTokenizerBase | None) -> TargetInfo:
    """What the drafter may know of the target."""
    return TargetInfo.of(target, tokenizer, max_slots=_all_slots(setup), forward=as_forward(setup.forward))


def _vocab_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Width of the logits without the padding behind the tokenizer's last id.

    Raises:
        InputError: The tokenizer has ordinary tokens for which the target has no row. Tokens that were added to it may
            lack one: Gemma's tokenizer has them for images, and models of text have no rows for these.
    """
    width = logit_width(model)
    if tokenizer is None:
        return width
    ids, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    ordinary = max((id for token, id in ids.items() if token not in added), default=0)
    if ordinary >= width:
        raise InputError(
            f"the tokenizer {tokenizer.name_or_path or 'given'} does not belong to the target: it has token ids up to "
            f"{ordinary}, and the target 0 .. {width - 1}; name the target's own with tokenizer (--tokenizer)"
        )
    return min(width, max(ids.values()) + 1)
