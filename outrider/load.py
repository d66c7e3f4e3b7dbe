"""outrider.load: names and objects become parts, are checked against the refusal matrix, and are put together."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider import catalog
from outrider.catalog import Family
from outrider.decoding.pearl import PearlDecoding, balanced_length
from outrider.decoding.progress import PREFILL_CHUNK
from outrider.decoding.protocol import Decoding, Parts
from outrider.drafters.protocol import Drafter, Surroundings
from outrider.engine.engine import Engine
from outrider.lengths.fixed import FixedLength
from outrider.lengths.protocol import LengthPolicy
from outrider.lengths.tetris import TetrisLength
from outrider.lm.open import as_lm, logit_width, open_model, open_tokenizer
from outrider.lm.packed import worth_packing
from outrider.lm.protocol import LM
from outrider.refusals import DEFAULT, Cell, refusal
from outrider.trees.protocol import Tree
from outrider.types import InputError, Sampling
from outrider.verifiers.protocol import Verifier

ASSETS = Path(__file__).parent / "assets"
EMBEDDED_TARGET = ASSETS / "target"
EMBEDDED_DRAFT = ASSETS / "draft"


def load(
    target: str | Path | PreTrainedModel | None = None,
    *,
    drafter: str | object | None = None,
    tree: str | object = "chain",
    verifier: str | object | None = None,
    length: str | object | None = None,
    decoding: str | object = "step",
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_slots: int = 8,
    max_context: int | None = None,
    max_prefill_tokens: int = PREFILL_CHUNK,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    pad_to: int | None = None,
    compile: bool = False,
    prepack: bool | None = None,
    vocab_size: int | None = None,
    allow_lossy: bool = False,
) -> Engine:
    """An engine for a target, with parts that are proven to fit each other.

    Args:
        target: Directory, hub id or loaded model; None is the embedded pair.
        drafter: `name:key=value,...` or an object. By default `suffix`, for the embedded target its draft model.
        tree: How drafts grow.
        verifier: Which nodes survive. By default the lossless one that accepts most of the tree's drafts.
        length: When to stop drafting. By default `fixed:5`, for the embedded pair `fixed:4`.
        decoding: `step`, or `pearl` to draft and verify at once; by default `pearl` measures how long to draft.
        tokenizer: By default the one beside the target.
        max_slots: Most requests at once.
        max_context: Longest context in tokens; by default the model's own, or what fits in memory.
        max_prefill_tokens: Most prompt tokens that one step digests, over all requests.
        device: By default the GPU where there is one.
        dtype: By default the weights' own.
        attn_implementation: `sdpa`, `eager` or `flex_attention`; by default transformers' choice.
        revision: Branch, tag or commit of a hub id.
        trust_remote_code: Let transformers run code that comes with the model.
        pad_to: Fewest columns of a forward. By default 2 in half precision on a CPU, where a block of one token takes
            other kernels than longer ones and would differ in the last bits; otherwise 1.
        compile: Compile the forwards of target and draft model; see `LanguageModel`. The first ones take long.
        prepack: Run copies of the linear layers that are laid out for the CPU's kernels, which leaves every bit as it
            is and takes memory for a second set of weights. By default so for models that are loaded here (one that is
            given may be trained meanwhile) in bfloat16, not compiled, where there are such kernels and the copies take
            less than a quarter of free memory.
        vocab_size: How many token ids can be drawn; by default padding behind the tokenizer's last one is cut off.
        allow_lossy: Let rules pass that do not keep the target's law.

    Raises:
        InputError: Anything that does not exist, does not fit or would not be lossless, with what would.

    Example:
        >>> load(verifier="blok")
        Traceback (most recent call last):
        ...
        outrider.types.InputError: unknown verifier 'blok'; did you mean 'block'? Available: token, block, match,
        recursive, kseq, top_plus_one, traversal, multipath, greedy_block, lenient, typical
    """
    own_draft = target is None and drafter is None
    grower: Tree = _make("tree", tree)
    policy: LengthPolicy = _make("length", ("fixed:4" if own_draft else "fixed:5") if length is None else length)
    order: Decoding = _make("decoding", decoding)
    if isinstance(order, PearlDecoding) and order.num_speculative_tokens is not None:
        if length is not None:
            raise InputError("both length and pearl's num_speculative_tokens say how long to draft; give one of them")
        policy = FixedLength(num_speculative_tokens=order.num_speculative_tokens)
    usual = f"model:path={EMBEDDED_DRAFT}" if own_draft else "suffix"
    guesser = _make("drafter", usual if drafter is None else drafter)
    if max_slots < 1:
        raise InputError(f"max_slots must be >= 1, got {max_slots}")
    if isinstance(target, PreTrainedModel):
        model = target
        place = str(getattr(model, "name_or_path", ""))
        if tokenizer is None and place and Path(place).is_dir():
            tokenizer = open_tokenizer(place)
    else:
        place = str(EMBEDDED_TARGET if target is None else target)
        model = open_model(
            place,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )
        tokenizer = tokenizer or open_tokenizer(place, revision=revision, trust_remote_code=trust_remote_code)
    if pad_to is None:
        pad_to = 2 if model.device.type == "cpu" and model.dtype in (torch.bfloat16, torch.float16) else 1
    width = _vocab_size(model, tokenizer) if vocab_size is None else vocab_size
    if prepack is None:
        prepack = not (isinstance(target, PreTrainedModel) or compile) and worth_packing(model)
    lm = as_lm(
        model,
        max_slots=max_slots,
        max_context=max_context,
        vocab_size=width,
        pad_to=pad_to,
        compile=compile,
        prepack=prepack,
    )
    surroundings = Surroundings.of(lm, tokenizer, max_slots=max_slots, compile=compile, prepack=prepack)
    bound: Drafter = guesser.bind(surroundings) if hasattr(guesser, "bind") else guesser
    rule: Verifier = _make("verifier", _default_verifier(bound, grower) if verifier is None else verifier)
    parts = Parts(target=lm, drafter=bound, tree=grower, verifier=rule, length=policy, decoding=order)
    refuses = partial(why_not, allow_lossy=allow_lossy)
    if reason := refuses(parts):
        raise InputError(reason)
    if isinstance(order, PearlDecoding) and order.num_speculative_tokens is None and length is None:
        parts = replace(parts, length=FixedLength(num_speculative_tokens=balanced_length(parts)))
    return Engine(
        parts,
        tokenizer=tokenizer,
        eos_ids=_eos_ids(model),
        sampling=_default_sampling(model),
        max_slots=max_slots,
        max_prefill_tokens=max_prefill_tokens,
        refuses=refuses,
    )


def why_not(parts: Parts, allow_lossy: bool = False) -> str | None:
    """Why parts do not fit each other, in one sentence; None where they do."""
    combination = cell(parts.drafter, parts.tree, parts.verifier, parts.length, parts.decoding)
    return refusal(combination, allow_lossy) or chains_only(parts.tree, parts.target, parts.drafter)


def cell(drafter: Drafter, tree: Tree, verifier: Verifier, length: LengthPolicy, decoding: Decoding) -> Cell:
    """Where a combination of parts stands in the refusal matrix."""
    original = isinstance(length, TetrisLength) and length.criterion == "original"
    return Cell(
        rows=drafter.rows,
        context_pure=drafter.context_pure,
        structure=tree.structure,
        verifier=catalog.name_of(verifier),
        length="tetris:criterion=original" if original else catalog.name_of(length),
        decoding=catalog.name_of(decoding),
        taps=bool(drafter.taps),
    )


def chains_only(tree: Tree, target: LM, drafter: Drafter) -> str | None:
    """Why a branching tree cannot be read by the target or the drafter; None where it can, or does not branch."""
    if tree.structure == "chain":
        return None
    for role, reason in (("target", target.chains_only), ("draft model", drafter.chains_only)):
        if reason is not None:
            return f"the {role} {reason}"
    return None


def _default_verifier(drafter: Drafter, tree: Tree) -> str:
    return DEFAULT[Cell(rows=drafter.rows, structure=tree.structure, verifier="match").kind]


def _make(family: Family, given: str | object) -> Any:
    return catalog.make(family, given) if isinstance(given, str) else given


def _vocab_size(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Width of the logits that mean something: padding behind the tokenizer's last id is cut off."""
    width = logit_width(model)
    return width if tokenizer is None else min(width, max(tokenizer.get_vocab().values()) + 1)


def _eos_ids(model: PreTrainedModel) -> frozenset[int]:
    given = getattr(model.generation_config, "eos_token_id", None)
    if given is None:
        given = getattr(model.config, "eos_token_id", None)
    return frozenset() if given is None else frozenset([given] if isinstance(given, int) else given)


def _default_sampling(model: PreTrainedModel) -> Sampling:
    """What the model's generation config says, as in vLLM; one that says not to sample is greedy."""
    config = model.generation_config
    if config.do_sample is False:
        return Sampling(temperature=0.0, repetition_penalty=config.repetition_penalty or 1.0)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
    )
