"""The growth loop: ask the drafter, let the tree choose, let the length policy say when to stop; pack the draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.dice import Dice
from outrider.sampling import Prefix, to_rows
from outrider.trees.protocol import Level, Tree
from outrider.types import Draft, Frontier, Guess, Running


@runtime_checkable
class Guesser(Protocol):
    """The part of a drafter that growing needs."""

    def begin(self, states: Sequence[Running]) -> Guess: ...
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess: ...


@runtime_checkable
class Stopper(Protocol):
    """The part of a length policy that growing needs."""

    def limit(self, state: object) -> int: ...
    def more(
        self, states: Sequence[object], owners: Int[np.ndarray, " n"], rows: Float[Tensor, "n vocab"]
    ) -> Bool[np.ndarray, " n"] | None: ...


@dataclass(kw_only=True)
class _Growth:
    """Nodes so far, level by level, beginning with the roots."""

    owners: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    nodes: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    parents: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    depths: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    tokens: list[Int[Tensor, " n"]] = field(default_factory=list)
    row_of: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    rows: list[Float[Tensor, "n vocab"]] = field(default_factory=list)

    def path(self, owner: int, node: int) -> list[int]:
        """Tokens from the root's child down to a node; reads the device."""
        found: list[int] = []
        for level in reversed(range(1, len(self.nodes))):
            at = np.flatnonzero((self.owners[level] == owner) & (self.nodes[level] == node))
            if len(at):
                found.append(int(self.tokens[level][int(at[0])]))
                node = int(self.parents[level][at[0]])
        return found[::-1]


def grow(
    drafter: Guesser,
    tree: Tree,
    length: Stopper,
    states: Sequence[Running],
    room: Sequence[int],
    dice: Dice,
    device: torch.device,
) -> Draft:
    """Draft one tree per request, all requests together, one batched drafter call per level.

    Args:
        states: The requests; each root holds the newest committed token.
        room: Deepest draft that still fits each request; 0 makes its step a plain one.
    """
    count = len(states)
    everyone = np.arange(count)
    limits = np.array([min(length.limit(s.length_state), r) for s, r in zip(states, room, strict=True)])
    samplings = [s.request.sampling for s in states]
    zeros = np.zeros(count, dtype=np.int64)
    growth = _Growth(
        owners=[everyone],
        nodes=[zeros],
        parents=[zeros - 1],
        depths=[zeros],
        tokens=[torch.tensor([s.tokens[-1] for s in states]).to(device)],
        row_of=[zeros - 1],
    )
    sizes = np.ones(count, dtype=np.int64)
    num_rows = depth = 0
    here = np.flatnonzero(limits > 0)
    while len(here):
        owners, nodes = growth.owners[-1][here], growth.nodes[-1][here]
        if depth == 0:
            guess = drafter.begin([states[i] for i in here.tolist()])
        else:
            frontier = Frontier(
                owners=owners,
                nodes=nodes,
                parents=growth.parents[-1][here],
                depths=growth.depths[-1][here],
                tokens=_take(growth.tokens[-1], here),
            )
            guess = drafter.expand(states, frontier)
        rows, tokens = None, guess.tokens
        if guess.logits is not None:
            prefixes = partial(_prefix, states, growth, owners, nodes)
            rows = to_rows(guess.logits.to(device), owners, samplings, prefixes)
            if (wanted := length.more([s.length_state for s in states], owners, rows)) is not None:
                here, owners, nodes = here[wanted], owners[wanted], nodes[wanted]
                rows = rows[torch.from_numpy(wanted).to(rows.device)]
                if not len(here):
                    break
        level = Level(owners=owners, nodes=nodes, depths=growth.depths[-1][here], rows=rows, tokens=tokens)
        children = tree.choose(level, dice)
        if rows is not None:
            growth.row_of[-1][here] = num_rows + np.arange(len(here))
            growth.rows.append(rows)
            num_rows += len(here)
        child_owners = owners[children.parents]
        first = np.searchsorted(child_owners, child_owners)
        growth.nodes.append(sizes[child_owners] + np.arange(len(child_owners)) - first)
        sizes += np.bincount(child_owners, minlength=count)
        growth.owners.append(child_owners)
        growth.parents.append(nodes[children.parents])
        growth.depths.append(level.depths[children.parents] + 1)
        growth.tokens.append(children.tokens.to(device))
        growth.row_of.append(np.full(len(child_owners), -1))
        depth += 1
        here = np.flatnonzero(children.expand & (limits[child_owners] > depth))
    return _pack(growth, tree, sizes)


def _take(tokens: Int[Tensor, " n"], index: Int[np.ndarray, " m"]) -> Int[Tensor, " m"]:
    return tokens if len(index) == len(tokens) else tokens[torch.from_numpy(index).to(tokens.device)]


def _prefix(
    states: Sequence[Running],
    growth: _Growth,
    owners: Int[np.ndarray, " n"],
    nodes: Int[np.ndarray, " n"],
    row: int,
) -> Prefix:
    state = states[int(owners[row])]
    path = growth.path(int(owners[row]), int(nodes[row]))
    return Prefix(prompt=state.request.prompt, output=[*state.output, *path])


def _pack(growth: _Growth, tree: Tree, sizes: Int[np.ndarray, " requests"]) -> Draft:
    owners = np.concatenate(growth.owners)
    order = np.argsort(owners, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    local = np.concatenate(growth.parents)[order]
    parents = np.where(local >= 0, local + offsets[owners[order]], -1)
    children = np.flatnonzero(parents >= 0)
    links = children[np.argsort(parents[children], kind="stable")]
    counts = np.bincount(parents[children], minlength=len(parents))
    tokens = torch.cat(growth.tokens)
    if len(sizes) > 1:
        tokens = tokens[torch.from_numpy(order).to(tokens.device)]
    return Draft(
        tokens=tokens,
        parents=parents,
        depths=np.concatenate(growth.depths)[order],
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(counts)]),
        links=links,
        rows=torch.cat(growth.rows) if growth.rows else None,
        row_of=np.concatenate(growth.row_of)[order],
        structure=tree.structure,
    )
