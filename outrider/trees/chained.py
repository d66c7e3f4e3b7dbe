"""Chains whose lengths are known before a step: all of a chain's forwards and draws in one go.

The growth loop of `grow` asks the tree, the length policy and the drafter at every level, and works out the inputs of
every forward when its turn comes. None of this depends on tokens if one token is drawn per node and the lengths are
known. Then the random numbers and the inputs of all forwards are made at once, and each token goes from one forward to
the next without being looked at. The draft is the same, bit for bit.

`proof.enumerate` walks these chains through the same code: its dice make `picks` that walk when they are called.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.constraints.masks import is_masked
from outrider.core.dice import Dice, InverseCdf, Pick
from outrider.core.sampling import RowRule
from outrider.core.texts import Before
from outrider.core.types import Draft, Guess, Running, Sampling, ShortList
from outrider.core.uploads import upload
from outrider.lm.slots.chain import ChainNoise, DrawnTokens
from outrider.trees.drawing import dice_over, draft_rule
from outrider.trees.protocol import Tree
from outrider.trees.shape import ChainLevel, chain_shape

Follow = Callable[[Int[Tensor, " n"]], Float[Tensor, "n width"]]
"""Takes the next token of each chain that goes on. Returns the logits after these tokens."""


@runtime_checkable
class Whole(Protocol):
    """A `Follow` that may run all its forwards, and the draws between them, in one go.

    Attributes:
        in_one_go: Whether it may.
    """

    @property
    def in_one_go(self) -> bool: ...

    def __call__(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n width"]: ...

    def draw(self, tokens: Int[Tensor, " n"], noise: ChainNoise | None) -> DrawnTokens | None:
        """Draw a token behind each, by the given noise or the likeliest; None where this is not possible."""
        ...


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
class SampledChain(Protocol):
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
    picks = [] if chosen else cast(SampledChain, tree).picks(lengths, dice_over(few, dice), device)
    for number, level in enumerate(levels):
        if number:
            above = tokens[-1] if level.above is None else tokens[-1][upload(level.above, device)]
            logits = follow(above).to(device)
        if number and level.above is not None:
            rule = draft_rule([samplings[i] for i in level.owners], few, logits)
        if chosen:
            drawn = cast(RowRule, rule).likeliest(logits, _unread)
        else:
            rows.append(rule(logits, _unread))
            drawn = picks[number](rows[-1]).to(device)
        tokens.append(drawn if few is None else few.ids[drawn])
        if number == 0 and (rest := _in_one_go(follow, levels, tokens[-1], rule, picks)) is not None:
            return packed(lengths, [*tokens, rest.tokens], [*rows, *rest.rows], few)
    return packed(lengths, tokens, rows, few)


@dataclass(frozen=True, kw_only=True)
class _Rest:
    """What was drawn behind the first tokens of some chains, level by level.

    Attributes:
        tokens: The tokens.
        rows: The rows that they were drawn from; none if tokens were chosen.
    """

    tokens: Int[Tensor, " m"]
    rows: Sequence[Float[Tensor, "m width"]]


def _in_one_go(
    follow: Follow, levels: Sequence[ChainLevel], tokens: Int[Tensor, " n"], rule: object, picks: Sequence[Pick]
) -> _Rest | None:
    """All levels below the first, if the drafter can run all its forwards in one go, and the draws in between need
    nothing but temperatures and random numbers.

    Args:
        follow: The drafter's forwards.
        tokens: The first token of each chain.
        rule: How rows are made of logits.
        picks: The draws of all levels; none if the likeliest tokens are taken.
    """
    if not getattr(follow, "in_one_go", False) or not isinstance(rule, RowRule) or rule.adjusts is not None:
        return None
    steps, count, all_go_on = len(levels) - 1, len(tokens), len(levels[-1].owners) == len(tokens)
    index = None
    if not all_go_on:
        places = [k * count + np.searchsorted(levels[0].owners, each.owners) for k, each in enumerate(levels[1:])]
        index = upload(np.concatenate(places), tokens.device)
    noise = None
    if picks:
        temperatures = rule.temperatures_alone(tokens.device)
        if temperatures is None or not all(isinstance(pick, InverseCdf) for pick in picks):
            return None
        uniforms = torch.cat([cast(InverseCdf, pick).uniforms for pick in picks[1:]])
        if index is not None:
            uniforms = uniforms.new_zeros(steps * count).index_copy_(0, index, uniforms)
        noise = ChainNoise(temperatures=temperatures, uniforms=uniforms.view(steps, count))
    drawn = cast(Whole, follow).draw(tokens, noise)
    if drawn is None:
        return None
    drawn_tokens, rows = drawn.tokens.to(tokens.device).flatten(), drawn.rows
    if index is not None:
        drawn_tokens = drawn_tokens[index]
    if rows is None:
        return _Rest(tokens=drawn_tokens, rows=[])
    rows = rows.to(tokens.device).flatten(0, 1)
    return _Rest(tokens=drawn_tokens, rows=[rows if index is None else rows[index]])


def _unread() -> Before:
    raise RuntimeError("a chain in one go does not know the text before a row")


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
        flat = flat[upload(shape.place, flat.device)]
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
