"""Chains whose lengths are known before a step: all of a chain's forwards and draws in one go.

The growth loop of `grow` asks the tree, the length policy and the drafter at every level, and works out the inputs of
every forward when its turn comes. None of this depends on tokens if one token is drawn per node and the lengths are
known. Then the random numbers and the inputs of all forwards are made at once, and each token goes from one forward to
the next without being looked at. The draft is the same, bit for bit.

`proof.enumerate` walks these chains through the same code: its dice make `picks` that walk when they are called.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.constraints.masks import is_masked
from outrider.core.dice import Dice, Pick
from outrider.core.sampling import Prefix, RowRule
from outrider.core.types import Draft, Guess, Running, Sampling, ShortList
from outrider.trees.drawing import dice_over, draft_rule
from outrider.trees.protocol import Tree
from outrider.trees.shape import chain_shape

Follow = Callable[[Int[Tensor, " n"]], Float[Tensor, "n width"]]
"""Takes the next token of each chain that goes on. Returns the logits after these tokens."""


@runtime_checkable
class Chainer(Protocol):
    """A drafter that can draft chains in one go."""

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess: ...

    def chain(self, states: Sequence[Running], counts: Sequence[int]) -> Follow:
        """Get ready for the tokens behind the guess of `begin`: `counts[i]` forwards for each request, one token each.
        Guesses are those that `expand` would make.
        """
        ...


@runtime_checkable
class ChainTree(Protocol):
    """A tree of one child per node, drawn from the node's row."""

    def picks(self, limits: Sequence[int], dice: Dice, device: torch.device) -> list[Pick]:
        """The draws of chains with known lengths, level by level."""
        ...


def is_chained(drafter: object, tree: Tree, length: object, states: Sequence[Running]) -> bool:
    """Whether the drafts of these requests are chains that can be drawn in one go.

    Penalties and most processors read the tokens before a row, and a constraint reads all of them. Such requests are
    drafted level by level, with all others of their batch.
    """
    return (
        tree.structure == "chain"
        and getattr(length, "known_ahead", False)
        and hasattr(drafter, "chain")
        and hasattr(tree, "picks")
        and getattr(drafter, "rows", None) != "point"
        and not any(is_masked(state) or state.request.sampling.reads_prefix for state in states)
    )


def chained(
    drafter: Chainer,
    tree: Tree,
    states: Sequence[Running],
    limits: Int[np.ndarray, " requests"],
    samplings: Sequence[Sampling],
    dice: Dice,
    device: torch.device,
) -> Draft:
    """Draft one chain per request.

    Args:
        limits: The length of each; at least one of them is above 0.
        samplings: The drafter's sampling settings for each request.
    """
    lengths = limits.tolist()
    levels = chain_shape(tuple(lengths)).levels
    begun = [states[i] for i in levels[0].owners]
    guess = drafter.begin(begun, [lengths[i] for i in levels[0].owners])
    few, logits = guess.short_list, cast(Tensor, guess.logits).to(device)
    follow = drafter.chain(begun, [lengths[i] - 1 for i in levels[0].owners])
    tokens = [torch.tensor([state.tokens[-1] for state in states]).to(device, non_blocking=True)]
    rows: list[Float[Tensor, "n width"]] = []
    rule = draft_rule([samplings[i] for i in levels[0].owners], few, logits)
    # A point mass needs neither a row nor a draw. All levels have rows or none has: the first one has every request.
    chosen = isinstance(rule, RowRule) and rule.all_greedy
    picks = [] if chosen else cast(ChainTree, tree).picks(lengths, dice_over(few, dice), device)
    for number, level in enumerate(levels):
        if number:
            above = tokens[-1] if level.above is None else tokens[-1][_uploaded(level.above, device)]
            logits = follow(above).to(device)
        if number and level.above is not None:
            rule = draft_rule([samplings[i] for i in level.owners], few, logits)
        if chosen:
            drawn = cast(RowRule, rule).likeliest(logits, _unread)
        else:
            rows.append(rule(logits, _unread))
            drawn = picks[number](rows[-1]).to(device)
        tokens.append(drawn if few is None else few.ids[drawn])
    return packed(lengths, tokens, rows, few)


def _unread(row: int) -> Prefix:
    raise RuntimeError("a chain in one go does not know the text before a row")


def _uploaded(index: Int[np.ndarray, " n"], device: torch.device) -> Int[Tensor, " n"]:
    return torch.from_numpy(index).to(device, non_blocking=True)


def packed(
    lengths: Sequence[int],
    tokens: Sequence[Int[Tensor, " _"]],
    rows: Sequence[Float[Tensor, "_ width"]],
    few: ShortList | None,
) -> Draft:
    """Chains that were drawn level by level, as a draft.

    Args:
        tokens: The tokens of each level, the roots' first.
        rows: The rows that each level but the roots was drawn from; none if their tokens were chosen.
    """
    shape = chain_shape(tuple(lengths))
    flat = torch.cat(list(tokens))
    if len(lengths) > 1:
        flat = flat[_uploaded(shape.place, flat.device)]
    return Draft(
        tokens=flat,
        parents=shape.parents,
        depths=shape.depths,
        numbers=shape.depths,
        offsets=shape.offsets,
        first_child=shape.first_child,
        links=shape.links,
        rows=torch.cat(list(rows)) if rows else None,
        row_of=shape.row_of if rows else np.full_like(shape.row_of, -1),
        structure="chain",
        short_list=few if rows else None,
    )
