"""The exact law of an engine's own verifier, length policy and decoding, on tables small enough to enumerate."""

from dataclasses import replace
from functools import partial

import numpy as np
from jaxtyping import Float

from outrider.core.types import Request, Sampling, Structure
from outrider.decoding.protocol import Parts
from outrider.engine.engine import Engine
from outrider.lengths.costs import CostTable
from outrider.lengths.experience import Experience
from outrider.lengths.fixed import FixedLength
from outrider.lengths.protocol import BatchPolicy, LoadPolicy
from outrider.lm.tabular import TABLE_FEATURES, TabularLM, random_features, random_rows
from outrider.proof.enumerate import joint_law, law, target_rows
from outrider.proof.runs import law_of_runs
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.protocol import Tree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.verifiers.protocol import Carrying

SMALL: dict[Structure, Tree] = {
    "iid": IidTree(num_paths=2),
    "iid_dedup": IidTree(num_paths=2, dedup=True),
    "without_replacement": GumbelTree(branching=(2, 2)),
    "top_plus_one": TopPlusOneTree(width=2),
}
"""The trees that stand for those of their structure."""
RUNS = 64
"""Requests that run at once where an engine runs them."""
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)


def law_error(parts: Parts) -> float:
    """Law error of the parts on small random tables, with their own kind of drafter.

    A drawn tree is replaced by a small one of the same structure. A policy that shares a budget is enumerated over a
    batch of two, and so are two steps of one that chooses a length for the batch. It may choose 0, so drafts of a fixed
    length are enumerated beside it. Decoding that drafts ahead drafts two tokens, and is walked until it verifies some
    that were drafted while others were verified. A drafter that reads hidden states drafts nothing in a request's first
    step, and is enumerated over more steps; so is one that chooses by what its drafts brought. One that drafts beside
    copies is enumerated over three tokens too, because of two tokens the drafts may hold both. Two requests of one
    batch, each with a drafter of its own, are run by an engine to their ends.
    """
    lengths = [parts, replace(parts, length=FixedLength())] if isinstance(parts.length, LoadPolicy) else [parts]
    several_steps = bool(parts.drafter.taps) or not parts.drafter.context_pure
    errors = [_from_the_first_step(each) if several_steps else _behind_tokens(each) for each in lengths]
    if parts.drafter.unites and not parts.drafter.taps:
        errors.append(_behind_tokens(parts))
    return max(_routed(parts), *errors)


def _routed(parts: Parts) -> float:
    """Law error of two requests of one batch, with different drafters of the kind of the parts.

    Both outputs end behind the first draft token that can be accepted.
    """
    length = parts.length if parts.length.constant else FixedLength()
    small = replace(_on_tables(parts, 2), length=length)
    drafters = [small.drafter, parts.drafter.on_tables(2, seed=3)]
    engine = Engine(small, max_slots=RUNS, keep_warm=False)
    engine.route = lambda request: drafters[int(request.id[-1])]
    prompt = tuple(token % 2 for token in PROMPT)
    requests = [
        Request(id="", prompt=text, max_new_tokens=3 if parts.drafter.taps else 2, sampling=Sampling())
        for text in (prompt, prompt[::-1])
    ]
    return law_of_runs(engine, requests, [partial(_row, small, request) for request in requests]).error


def _row(parts: Parts, request: Request, output: tuple[int, ...]) -> Float[np.ndarray, " vocab"]:
    """The target's own distribution after an output."""
    row: Float[np.ndarray, " vocab"] = target_rows(parts, request, [output])[0]
    return row


def _behind_tokens(parts: Parts) -> float:
    """Law error of parts whose drafter reads tokens alone."""
    if parts.decoding.drafts_ahead:
        small = replace(_on_tables(parts, 3), length=FixedLength(num_speculative_tokens=2))
        return law(small, PROMPT, 3).error
    if isinstance(parts.length, BatchPolicy | LoadPolicy):
        prompt, chosen = [token % 2 for token in PROMPT], isinstance(parts.length, LoadPolicy)
        small = _on_tables(parts, 2, depth=2 if chosen else 3)
        return max(
            each_law.error for each_law in joint_law(small, [prompt, prompt[::-1]], num_steps=2 if chosen else 1)
        )
    small = _on_tables(parts, 3, depth=2 if parts.tree.structure in SMALL else 4)
    if isinstance(parts.verifier, Carrying):
        limits = (None, len(PROMPT) + 1)
        return max(law(small, PROMPT, 3, horizon=3, max_draft_context=limit).error for limit in limits)
    return law(small, PROMPT, 1).error


def _from_the_first_step(parts: Parts) -> float:
    """Law error of parts whose drafter reads hidden states, or chooses by what its drafts brought.

    Its state after a step depends on more than the tokens, so every world is walked from its first step on.
    """
    prompt = [token % 2 for token in PROMPT]
    several = isinstance(parts.length, BatchPolicy | LoadPolicy)
    prompts = [prompt, prompt[::-1]] if several else [prompt]
    small = _on_tables(parts, 2, depth=2 if several else 3)
    num_steps = 2 if isinstance(parts.length, BatchPolicy) or parts.tree.structure in SMALL else 3
    return max(each_law.error for each_law in joint_law(small, prompts, num_steps=num_steps))


def _even(requests: int, length: int) -> float:
    """Costs by which drafts are about as fast as plain steps."""
    return requests * (1 + 0.57 * length)


def _on_tables(parts: Parts, vocab: int, depth: int | None = None) -> Parts:
    """The same rules over random tables, whose context lets drafts be so deep."""
    longest = 1 << 20 if depth is None else len(PROMPT) + 1 + depth
    return replace(
        parts,
        target=TabularLM(
            random_rows(vocab, seed=0), vocab, max_context=longest, feature=random_features(TABLE_FEATURES, seed=2)
        ),
        drafter=parts.drafter.on_tables(vocab, seed=1),
        tree=SMALL.get(parts.tree.structure, parts.tree),
        experience=Experience(CostTable.of_formula(_even)),
    )
