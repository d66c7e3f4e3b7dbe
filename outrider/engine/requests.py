"""Checks of what people ask of an engine: requests, constraints, settings for several prompts."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from outrider.constraints.grammar import Grammar
from outrider.constraints.words import AllOf, AllowedTokens, bad_words
from outrider.core.constraint import Constraint
from outrider.core.dice import numbered_seed
from outrider.core.inputs import whole
from outrider.core.option import Bounds
from outrider.core.types import InputError, Request, Sampling
from outrider.engine.prompts import Prompt, rows
from outrider.lm.protocol import LM, SharesMemory

Setting = TypeVar("Setting")
BESIDE_REQUESTS = ("constraint", "allowed_token_ids", "bad_words")
"""Options that may be given beside a `Request`: they need the target's vocabulary, which a request does not know."""
MOST_OUTPUTS = 1_000_000
"""Most outputs of one call. Requests wait in memory, and so do their outputs."""


def check(request: Request, target: LM, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Raise InputError if the target cannot run the request."""
    longest, width = target.max_context, target.vocab_size
    if not request.prompt:
        raise InputError("the prompt is empty; give at least one token")
    if len(request.prompt) >= longest + (request.max_new_tokens == 0):
        limit = getattr(getattr(target, "anatomy", None), "longest_context", None)
        more = "" if limit is not None and longest >= limit else ", or raise max_context if the model allows more"
        raise InputError(
            f"the prompt has {len(request.prompt)} tokens and the context {longest}; shorten it to at most "
            f"{longest - 1} tokens{more}"
        )
    _check_numbers(request)
    _check_memory(request, target)
    if (worst := max(request.prompt)) >= width or min(request.prompt) < 0:
        wrong = worst if worst >= width else min(request.prompt)
        if tokenizer is not None and width <= wrong < len(tokenizer):
            place = tokenizer.name_or_path or "given"
            raise InputError(
                f"the tokenizer {place} does not belong to the target: it makes token id {wrong} of {len(tokenizer)}, "
                f"and the target has 0 .. {width - 1}; name the target's own with tokenizer (--tokenizer)"
            )
        raise InputError(f"token id {wrong} is not in 0 .. {width - 1}")
    if any(not 0 <= token < width for token in request.prediction):
        raise InputError(f"the prediction names token ids outside 0 .. {width - 1}")
    if any(not 0 <= token < width for token in request.sampling.logit_bias):
        raise InputError(f"logit_bias names token ids outside 0 .. {width - 1}")
    if request.stop and tokenizer is None:
        raise InputError("stop strings need the target's tokenizer")
    if any(not text for text in request.stop):
        raise InputError("a stop string must not be empty")


def check_beside(request: Request, id: str | None, names: Iterable[str]) -> None:
    """Raise InputError for what is given beside a request that says it itself.

    Args:
        id: The name that was given.
        names: Options that were given.
    """
    conflicts = ["id"] if id is not None and id != request.id else []
    conflicts += [name for name in names if name not in BESIDE_REQUESTS]
    if conflicts:
        raise InputError(
            f"{conflicts[0]} is given beside a Request, which has its own settings; make the Request with "
            f"dataclasses.replace, or give the prompt instead of a Request (beside it: {', '.join(BESIDE_REQUESTS)})"
        )


def most_tokens(request: Request) -> int:
    """Most tokens that a request can come to have."""
    return len(request.prompt) + request.max_new_tokens


def _check_memory(request: Request, target: LM) -> None:
    """Raise InputError if the context is shorter than the model allows, for lack of memory, and too short."""
    longest = target.max_context
    if not isinstance(target, SharesMemory) or target.possible_context <= longest or most_tokens(request) <= longest:
        return
    wanted = min(most_tokens(request), target.possible_context)
    raise InputError(
        f"a prompt of {len(request.prompt)} tokens and max_new_tokens={request.max_new_tokens} pass the {longest} "
        f"tokens for which memory suffices in each of {target.max_slots} slots; give max_new_tokens="
        f"{longest - len(request.prompt)} or less, or load with fewer max_slots or max_warm_slots, or with "
        f"max_context={wanted}, with which long requests wait for each other"
    )


def _check_numbers(request: Request) -> None:
    """Raise InputError for a number of the request that is out of bounds."""
    if request.max_new_tokens < 0 or (request.max_new_tokens == 0 and request.prompt_logprobs is None):
        raise InputError(f"max_new_tokens must be >= 1 (0 is for prompt_logprobs alone), got {request.max_new_tokens}")
    if not 0 <= request.min_tokens <= request.max_new_tokens:
        raise InputError(
            f"min_tokens must be in 0 .. max_new_tokens={request.max_new_tokens}, got {request.min_tokens}"
        )


def check_count(n: int, num_prompts: int) -> None:
    """Raise InputError for a number of outputs per prompt that cannot be made."""
    Bounds(least=1).check("n", n)
    if n * num_prompts > MOST_OUTPUTS:
        raise InputError(
            f"n is the number of outputs per prompt, and n={n} makes {n * num_prompts} outputs; at most {MOST_OUTPUTS} "
            "can be made at once (max_new_tokens is the length of an output)"
        )


def bound(
    constraint: Constraint | Grammar,
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
    eos_ids: frozenset[int],
) -> Constraint:
    """The constraint on tokens. Raises InputError for another object, or for a grammar that cannot be enforced."""
    if isinstance(constraint, Grammar):
        return constraint.bind(tokenizer, vocab_size, eos_ids)
    if not isinstance(constraint, Constraint):
        raise InputError(
            "a constraint is a grammar of outrider.constraints.grammar (json_schema, regex, choice, ...), or an "
            f"object with open, masks and commit; got {constraint!r}"
        )
    return constraint


def narrowed(
    constraint: Constraint | None,
    allowed_token_ids: Sequence[int] | None,
    words: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    vocab_size: int,
) -> Constraint | None:
    """A constraint, and with it the tokens that an option allows and the words that another forbids; None if nothing
    is forbidden.
    """
    constraints: list[Constraint] = [] if constraint is None else [constraint]
    if allowed_token_ids is not None:
        allowed = tokens("allowed_token_ids", allowed_token_ids, vocab_size)
        if not allowed:
            raise InputError("allowed_token_ids must name at least one token; leave it out to allow all")
        constraints.append(AllowedTokens.of(allowed, vocab_size))
    if words:
        constraints.append(bad_words(words, tokenizer, vocab_size))
    return AllOf(constraints=tuple(constraints)) if len(constraints) > 1 else constraints[0] if constraints else None


def one_each(settings: Setting | Sequence[Setting] | None, count: int, what: str) -> list[Setting | None]:
    """One setting per prompt, from one for all or a list of them.

    Args:
        what: What the settings are called.
    """
    if not isinstance(settings, Sequence) or isinstance(settings, str):
        return [settings] * count
    if len(settings) != count:
        raise InputError(f"got {len(settings)} {what} for {count} prompts; give one, or one per prompt")
    return list(settings)


def texts(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Stop strings, from one or a list of them."""
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable):
        raise InputError(f"stop must be a text or a list of texts, got {stop!r}")
    return tuple(stop)


def tokens(name: str, token_ids: Sequence[int], vocab_size: int) -> frozenset[int]:
    """Token ids of an option, all of them in the vocabulary."""
    if isinstance(token_ids, str) or not isinstance(token_ids, Iterable):
        raise InputError(f"{name} must be a list of token ids, got {token_ids!r}")
    ids = frozenset(whole(f"a token of {name}", token) for token in token_ids)
    for token in sorted(ids):
        if not 0 <= token < vocab_size:
            raise InputError(f"{name} holds token id {token}, which is not in 0 .. {vocab_size - 1}")
    return ids


def listed(prompts: object) -> list[Prompt]:
    """The prompts of a list, a batch of token ids or anything else that can be gone through."""
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return rows(prompts)
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise InputError(f"prompts must be a list; for one prompt give [prompt]; got {reprlib.repr(prompts)}")
    return list(prompts)


def nth(sampling: Sampling | None, k: int) -> Sampling | None:
    """Settings of the k-th output of a prompt: the same, with its own seed. The first one keeps the given seed."""
    if k == 0 or sampling is None or sampling.seed is None:
        return sampling
    return replace(sampling, seed=numbered_seed(sampling.seed, k))
