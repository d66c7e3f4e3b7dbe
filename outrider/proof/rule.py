"""The exact law of an engine's own verifier, length policy and decoding, on tables small enough to enumerate."""

from dataclasses import replace

from outrider.decoding.protocol import Parts
from outrider.lengths.fixed import FixedLength
from outrider.lengths.protocol import BatchPolicy
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.enumerate import joint_law, law
from outrider.trees.gumbel import GumbelTree
from outrider.trees.iid import IidTree
from outrider.trees.protocol import Tree
from outrider.trees.top_plus_one import TopPlusOneTree
from outrider.types import Structure
from outrider.verifiers.protocol import Carrying

SMALL: dict[Structure, Tree] = {
    "iid": IidTree(num_paths=2),
    "iid_dedup": IidTree(num_paths=2, dedup=True),
    "without_replacement": GumbelTree(branching=(2, 2)),
    "top_plus_one": TopPlusOneTree(width=2),
}
"""The trees that stand for those of their structure."""
PROMPT = (0, 1, 2, 0, 1, 2, 0, 1)


def law_error(parts: Parts) -> float:
    """Law error of the parts on small random tables, with their own kind of drafter.

    A drawn tree is replaced by a small one of the same structure. A policy that shares a budget is enumerated over a
    batch of two. Decoding that drafts ahead drafts two tokens, and is walked until it verifies some that were drafted
    while others were verified.
    """
    if parts.decoding.drafts_ahead:
        small = replace(_on_tables(parts, 3), length=FixedLength(num_speculative_tokens=2))
        return law(small, PROMPT, 3).error
    if isinstance(parts.length, BatchPolicy):
        prompt = [token % 2 for token in PROMPT]
        return max(found.error for found in joint_law(_on_tables(parts, 2, depth=3), [prompt, prompt[::-1]]))
    small = _on_tables(parts, 3, depth=2 if parts.tree.structure in SMALL else 4)
    if isinstance(parts.verifier, Carrying):
        return law(small, PROMPT, 3, horizon=3).error
    return law(small, PROMPT, 1).error


def _on_tables(parts: Parts, vocab: int, depth: int | None = None) -> Parts:
    """The same rules over random tables, whose context lets drafts be so deep."""
    longest = 1 << 20 if depth is None else len(PROMPT) + 1 + depth
    return replace(
        parts,
        target=TabularLM(random_rows(vocab, seed=0), vocab, max_context=longest),
        drafter=parts.drafter.on_tables(vocab, seed=1),
        tree=SMALL.get(parts.tree.structure, parts.tree),
    )
