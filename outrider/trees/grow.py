"""The growth loop: the drafter guesses, the tree chooses children, the length policy stops; then pack the draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, cast, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.constraints.masks import batch_masks, is_masked
from outrider.core.dice import Dice
from outrider.core.sampling import masked, unpacked
from outrider.core.texts import Before, climbed, text_of
from outrider.core.types import Draft, Frontier, Guess, Running, Sampling, ShortList, Structure
from outrider.core.uploads import upload
from outrider.trees.chained import Chainer, chained, is_chained
from outrider.trees.drawing import Rule, dice_over, draft_rule, drafters_sampling
from outrider.trees.protocol import Children, Grown, Level, Tree


@runtime_checkable
class Guesser(Protocol):
    """The part of the drafter protocol that growing needs."""

    def begin(self, states: Sequence[Running], depths: Sequence[int]) -> Guess: ...
    def expand(self, states: Sequence[Running], frontier: Frontier) -> Guess: ...


@runtime_checkable
class Brancher(Protocol):
    """A drafter of single tokens that can also guess several after each node, for trees of chosen tokens."""

    @property
    def branching(self) -> Guesser:
        """What guesses so, with the request states of the drafter."""
        ...


@runtime_checkable
class Stopper(Protocol):
    """The part of the length protocol that growing needs."""

    def limit(self, state: object) -> int: ...
    def reach(self, states: Sequence[object], level: Level) -> Int[np.ndarray, " n"] | None: ...


@runtime_checkable
class Sharer(Protocol):
    """The part of the batch policy protocol that growing needs."""

    def note(self, level: Level, tokens: Int[Tensor, " n"]) -> Float[Tensor, "n 2"]: ...
    def share(self, notes: Float[np.ndarray, "requests depth 2"]) -> Int[np.ndarray, " requests"]: ...


@runtime_checkable
class Weighing(Protocol):
    """A tree that says how likely its nodes seem to the drafter."""

    def chances(self, grown: Grown) -> Float[np.ndarray, " n"]:
        """Of each node, if its parent is accepted; 0 of roots."""
        ...


@dataclass(kw_only=True)
class _Growth:
    """The nodes so far, level by level; the roots first."""

    sizes: Int[np.ndarray, " requests"]
    owners: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    nodes: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    parents: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    tokens: list[Int[Tensor, " n"]] = field(default_factory=list)
    values: list[Float[np.ndarray, "n values"]] = field(default_factory=list)
    links: list[Int[np.ndarray, " links"]] = field(default_factory=list)
    row_of: list[Int[np.ndarray, " n"]] = field(default_factory=list)
    rows: list[Float[Tensor, "n width"]] = field(default_factory=list)
    short_list: ShortList | None = None

    def add(self, children: Children, device: torch.device) -> None:
        """Append a level. Nodes are numbered in growth order. With a short list, tokens are places in that list."""
        owners = children.owners
        before = sum(len(level) for level in self.owners)
        drawn = np.arange(len(owners)) if children.links is None else children.links
        if len(owners) == len(self.sizes) and (owners[1:] > owners[:-1]).all():
            # One node of every request, as in chains.
            numbers = self.sizes.copy()
            self.sizes += 1
        else:
            first = np.searchsorted(owners, owners)
            numbers = self.sizes[owners] + np.arange(len(owners)) - first
            self.sizes += np.bincount(owners, minlength=len(self.sizes))
        self.owners.append(owners)
        self.nodes.append(numbers)
        self.parents.append(children.parents)
        tokens = children.tokens.to(device, non_blocking=True)
        self.tokens.append(tokens if self.short_list is None else self.short_list.ids[tokens])
        self.values.append(np.zeros((len(owners), 0)) if children.values is None else children.values)
        self.links.append(before + drawn)
        self.row_of.append(np.full(len(owners), -1))

    def grown(self) -> Grown:
        width = max(v.shape[1] for v in self.values)
        return Grown(
            owners=np.concatenate(self.owners),
            nodes=np.concatenate(self.nodes),
            parents=np.concatenate(self.parents),
            depths=np.repeat(np.arange(len(self.owners)), [len(level) for level in self.owners]),
            values=np.concatenate([v if v.shape[1] else np.zeros((len(v), width)) for v in self.values]),
        )


@dataclass(frozen=True, kw_only=True)
class _Places:
    """Where nodes stand in a list, by request and number.

    Attributes:
        starts: Where the numbers of each request begin in `places`.
        places: The place of each number; -1 if it is not in the list.
    """

    starts: Int[np.ndarray, " bounds"]
    places: Int[np.ndarray, " numbers"]

    @classmethod
    def of(
        cls, sizes: Int[np.ndarray, " requests"], owners: Int[np.ndarray, " n"], nodes: Int[np.ndarray, " n"]
    ) -> "_Places":
        """The places in a list of nodes; each request has numbered as many as its size says."""
        starts = np.concatenate([[0], np.cumsum(sizes)])
        places = np.full(int(starts[-1]), -1)
        places[starts[owners] + nodes] = np.arange(len(owners))
        return cls(starts=starts, places=places)

    def at(self, owners: Int[np.ndarray, " n"], nodes: Int[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        """The places of some nodes; -1 for a number of -1."""
        return np.where(nodes >= 0, self.places[self.starts[owners] + nodes.clip(0)], -1)


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

    Chains whose lengths are known beforehand are drawn in one go.

    Args:
        states: The requests; each root holds the newest committed token.
        room: Deepest draft of each request; 0 is a plain step.
    """
    limits = np.array([min(length.limit(s.length_state), r) for s, r in zip(states, room, strict=True)])
    if not limits.any():
        return roots(states, tree.structure, device)
    if hasattr(drafter, "branching") and tree.structure == "deterministic":
        drafter = cast(Brancher, drafter).branching
    samplings = [drafters_sampling(s.request.sampling, tree.structure) for s in states]
    if is_chained(drafter, tree, length, states):
        return chained(cast(Chainer, drafter), tree, states, limits, samplings, dice, device)
    return by_level(drafter, tree, length, states, limits, samplings, dice, device)


def roots(states: Sequence[Running], structure: Structure, device: torch.device) -> Draft:
    """Drafts of nothing but their roots."""
    count = len(states)
    return Draft(
        tokens=torch.tensor([s.tokens[-1] for s in states]).to(device, non_blocking=True),
        parents=np.full(count, -1),
        depths=np.zeros(count, dtype=np.int64),
        numbers=np.zeros(count, dtype=np.int64),
        offsets=np.arange(count + 1),
        first_child=np.zeros(count + 1, dtype=np.int64),
        links=np.zeros(0, dtype=np.int64),
        rows=None,
        row_of=np.full(count, -1),
        structure=structure,
    )


def by_level(
    drafter: Guesser,
    tree: Tree,
    length: Stopper,
    states: Sequence[Running],
    limits: Int[np.ndarray, " requests"],
    samplings: Sequence[Sampling],
    dice: Dice,
    device: torch.device,
) -> Draft:
    """Draft one tree per request, level by level.

    Args:
        limits: Deepest node of each draft. Changes in place.
        samplings: The drafter's sampling settings for each request.
    """
    count = len(states)
    first = Children(
        owners=np.arange(count),
        parents=np.full(count, -1),
        tokens=torch.tensor([s.tokens[-1] for s in states]),
        expand=limits > 0,
        links=np.zeros(0, dtype=np.int64),
    )
    growth = _Growth(sizes=np.zeros(count, dtype=np.int64))
    growth.add(first, device)
    # Asking a protocol takes twenty times as long as asking for an attribute.
    sharer = cast(Sharer, length) if hasattr(length, "share") else None
    constrained = any(is_masked(s) for s in states)
    notes: list[Float[Tensor, "n 2"]] = []
    here, depth, num_rows = np.flatnonzero(limits > 0), 0, 0
    rule: Rule | None = None
    ruled = np.zeros(0, dtype=np.int64)
    while len(here):
        if depth == 0:
            guess = drafter.begin([states[i] for i in here.tolist()], limits[here].tolist())
            if guess.tokens is not None and (guess.tokens < 0).all():
                return roots(states, tree.structure, device)
            growth.short_list = guess.short_list
            dice = dice_over(guess.short_list, dice)
        else:
            guess = drafter.expand(states, _frontier(growth, here, depth))
        level = Level(
            owners=growth.owners[-1][here],
            nodes=growth.nodes[-1][here],
            depth=depth,
            values=growth.values[-1][here],
            logits=None if guess.logits is None else guess.logits.to(device),
            proposed=guess.tokens,
            rows=None,
            so_far=growth.grown,
            survival=None if guess.survival is None else guess.survival.to(device),
            choices=guess.choices,
        )
        if level.logits is not None:
            if constrained:
                level = replace(level, logits=_allowed(states, growth, level.logits, here))
            level, here = _reached(length, states, level, here, limits)
            if not len(here):
                break
            if tree.structure != "deterministic":
                before = partial(_before, states, growth, level)
                if rule is None or not np.array_equal(ruled, level.owners):
                    rule = draft_rule([samplings[i] for i in level.owners.tolist()], growth.short_list, level.raw)
                    ruled = level.owners
                level = replace(level, rows=rule(level.raw, before))
        children = tree.choose(level, dice)
        if not len(children.owners):
            break
        if level.rows is not None:
            growth.row_of[-1][here] = num_rows + np.arange(len(here))
            growth.rows.append(level.rows)
            num_rows += len(here)
        if sharer is not None:
            notes.append(sharer.note(level, children.tokens))
        growth.add(children, device)
        depth += 1
        here = np.flatnonzero(children.expand & (limits[children.owners] > depth))
    grown = growth.grown()
    keep = _shared(sharer, growth, grown, notes) if sharer is not None and notes else tree.finish(grown)
    chances = cast(Weighing, tree).chances(grown) if hasattr(tree, "chances") else None
    return _pack(growth, grown, keep, tree.structure, chances)


def _reached(
    length: Stopper,
    states: Sequence[Running],
    level: Level,
    here: Int[np.ndarray, " n"],
    limits: Int[np.ndarray, " requests"],
) -> tuple[Level, Int[np.ndarray, " kept"]]:
    """The part of a level below which the length policy goes on, and its nodes' places. It may shorten `limits`."""
    reach = length.reach([s.length_state for s in states], level)
    if reach is None:
        return level, here
    limits[level.owners] = np.minimum(limits[level.owners], level.depth + reach)
    return _part(level, reach > 0), here[reach > 0]


def _frontier(growth: _Growth, here: Int[np.ndarray, " n"], depth: int) -> Frontier:
    tokens = growth.tokens[-1]
    if len(here) < len(tokens):
        tokens = tokens[upload(here, tokens.device)]
    return Frontier(
        owners=growth.owners[-1][here],
        nodes=growth.nodes[-1][here],
        parents=growth.parents[-1][here],
        depths=np.full(len(here), depth),
        tokens=tokens,
    )


def _allowed(
    states: Sequence[Running], growth: _Growth, logits: Float[Tensor, "n vocab"], here: Int[np.ndarray, " n"]
) -> Float[Tensor, "n vocab"]:
    """The drafter's logits with -inf at tokens that a request's constraint forbids after the node."""
    grown = growth.grown()
    few = growth.short_list
    width = logits.shape[1] if few is None else len(few.places)
    masks = batch_masks(states, grown.owners, torch.cat(growth.tokens), grown.parents, width)
    if masks is None:
        return logits
    level_masks = masks[len(masks) - len(growth.owners[-1]) + torch.from_numpy(here)]
    # The host's constraint must know the tokens: looking at them is what waits for the device here, once a level.
    if few is None:
        allowed_logits = masked(logits, level_masks)
    else:
        allowed = unpacked(level_masks.to(logits.device, non_blocking=True), width).index_select(1, few.ids)
        allowed_logits = logits.masked_fill(~allowed, -torch.inf)
    # If no token of the drafter is allowed, its row stays as it is, and its tokens are rejected.
    return torch.where(allowed_logits.amax(-1, keepdim=True) > -torch.inf, allowed_logits, logits)


def _part(level: Level, mask: Bool[np.ndarray, " n"]) -> Level:
    if mask.all() or level.logits is None:
        return level
    kept = upload(np.flatnonzero(mask), level.logits.device)
    return replace(
        level,
        owners=level.owners[mask],
        nodes=level.nodes[mask],
        values=level.values[mask],
        logits=level.logits[kept],
        survival=None if level.survival is None else level.survival[kept],
    )


def _before(states: Sequence[Running], growth: _Growth, level: Level) -> Before:
    """The text before each row of a level."""
    grown = growth.grown()
    places = _Places.of(growth.sizes, grown.owners, grown.nodes)
    parents = places.at(grown.owners, grown.parents)
    return Before(
        texts=[text_of(state) for state in states],
        owners=level.owners,
        tokens=torch.cat(growth.tokens),
        paths=climbed(places.at(level.owners, level.nodes), parents, grown.depths),
        lengths=np.full(len(level.owners), level.depth),
    )


def _shared(
    length: Sharer, growth: _Growth, grown: Grown, notes: Sequence[Float[Tensor, "_ 2"]]
) -> Bool[np.ndarray, " n"]:
    """Which nodes a batch policy keeps; all drafts are chains."""
    table = np.full((len(growth.sizes), int(grown.depths.max()), 2), -np.inf)
    drawn = grown.depths > 0
    table[grown.owners[drawn], grown.depths[drawn] - 1] = torch.cat(list(notes)).double().cpu().numpy()
    return grown.depths <= length.share(table)[grown.owners]


def _pack(
    growth: _Growth,
    grown: Grown,
    keep: Bool[np.ndarray, " n"] | None,
    structure: Structure,
    chances: Float[np.ndarray, " n"] | None,
) -> Draft:
    """Pack the kept nodes request by request, instead of level by level."""
    keep = np.ones(len(grown.owners), dtype=bool) if keep is None else keep
    kept = np.flatnonzero(keep)
    order = kept[np.argsort(grown.owners[kept], kind="stable")]
    owners = grown.owners[order]
    sizes = np.bincount(owners, minlength=len(growth.sizes))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    places = _Places.of(growth.sizes, owners, grown.nodes[order])
    parents = places.at(owners, grown.parents[order])
    links = np.concatenate(growth.links)
    links = links[keep[links]]
    links = places.at(grown.owners[links], grown.nodes[links])
    links = links[np.argsort(parents[links], kind="stable")]
    counts = np.bincount(parents[links], minlength=len(order))
    tokens = torch.cat(growth.tokens)
    if len(sizes) > 1 or len(order) < len(tokens):
        tokens = tokens[upload(order, tokens.device)]
    return Draft(
        tokens=tokens,
        parents=parents,
        depths=grown.depths[order],
        numbers=grown.nodes[order],
        offsets=offsets,
        first_child=np.concatenate([[0], np.cumsum(counts)]),
        links=links,
        rows=torch.cat(growth.rows) if growth.rows else None,
        row_of=np.where(counts > 0, np.concatenate(growth.row_of)[order], -1),
        structure=structure,
        short_list=growth.short_list if growth.rows else None,
        chances=None if chances is None else chances[order],
    )
