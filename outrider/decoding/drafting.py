"""The drafters' part of a step. Requests are grouped by their drafter."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.types import Draft, Running, ShortList, Step, Structure
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Choosing, Drafter, Observed, Uniting, fits
from outrider.lengths.experience import Experience, LengthChoice
from outrider.lengths.protocol import LoadPolicy, SizingPolicy
from outrider.lm.slots.batch import upload
from outrider.lm.slots.slots import BRANCHES
from outrider.trees.chain import ChainTree
from outrider.trees.grow import grow
from outrider.trees.protocol import RankedTree, Tree


def drafter_of(state: Running) -> Drafter:
    """The drafter of a request."""
    return cast(Drafter, state.drafter)


def groups(states: Sequence[Running]) -> list[tuple[Drafter, list[int]]]:
    """The drafters of some requests, each with the indices of its requests."""
    by_drafter: dict[int, tuple[Drafter, list[int]]] = {}
    for i, state in enumerate(states):
        by_drafter.setdefault(id(state.drafter), (drafter_of(state), []))[1].append(i)
    return list(by_drafter.values())


def taps(states: Sequence[Running]) -> tuple[int, ...]:
    """The taps of all drafters of some requests."""
    return tuple(dict.fromkeys(tap for drafter, _ in groups(states) for tap in drafter.taps))


def room(parts: Parts, state: Running, left: int) -> int:
    """Deepest draft that fits a request that may draft at most `left` more tokens; 0 is a plain step.

    Every limit that grows tighter along the text bounds where a draft ends, not where it begins. So the next draft
    reaches as far as this one, and a verifier that carries a change of the rows into the next step has all of it there.

    A drafter that reads hidden states cannot guess before it has seen those of all tokens but the anchor. So the first
    step of a request is a plain one. That holds even if a reused slot already has these states, because the draws of a
    request must not depend on other requests.
    """
    drafter, request, num_read = drafter_of(state), state.request, len(state.tokens) - 1
    if request.max_draft_context is not None:
        left = min(left, request.max_draft_context - num_read)
    if request.max_draft_tokens is not None:
        left = min(left, request.max_draft_tokens)
    if drafter.taps and (state.num_steps == 0 or parts.target.length(state.slot) < num_read):
        return 0
    return fits(drafter, len(state.tokens), left)


@dataclass(frozen=True, kw_only=True)
class GroupChoice:
    """The lengths that a length policy chose for some requests of a step.

    Attributes:
        experience: What it chose by.
        places: The requests.
        choice: Their lengths.
    """

    experience: Experience
    places: Sequence[int]
    choice: LengthChoice


@dataclass(frozen=True, kw_only=True)
class DraftPlan:
    """Who drafts how many tokens of each request of a step.

    Attributes:
        states: The requests as the drafters see them that draft for them: of a drafter of several, one was chosen.
        rooms: Deepest draft of each request.
        asked: How long a draft each request was asked for; it may have been cut to its room when it was known.
        promised: What its drafter promises of its tokens, where it is known already.
        choices: What a length policy chose for all requests together; none for a policy that chooses none.
        tree: How drafts grow; None: as the tree of the parts.
    """

    states: Sequence[Running]
    rooms: Sequence[int]
    asked: Sequence[int]
    promised: Sequence[Sequence[float]]
    choices: Sequence[GroupChoice] = ()
    tree: Tree | None = None

    def note(self, steps: Sequence[Step], seconds: float | None) -> None:
        """Let the length policy learn from the step. `seconds` is what it took; None if that cannot be compared."""
        for group in self.choices:
            requests = [self.states[i].request for i in group.places]
            # Another drafter may have drafted where this choice is to draft nothing.
            made = [
                steps[i]
                if length
                else replace(steps[i], room=asked, num_draft_tokens=0, num_accepted_tokens=0, promised=())
                for i, length, asked in zip(group.places, group.choice.lengths, group.choice.asked, strict=True)
            ]
            # The costs of a step are looked up as those of chains that one drafter drafts.
            alike = len(self.choices) == 1 and group.choice.tree is None
            group.experience.note(group.choice, requests, made, seconds if alike else None)


def plan(parts: Parts, states: Sequence[Running], rooms: Sequence[int]) -> DraftPlan:
    """Choose who drafts, and how much. A drafter of several chooses one of them for each request, then a length policy
    may choose lengths for all requests together: for those that copy by what is known of copies, and where it would
    have none of them, for the others with the last drafter.

    Args:
        rooms: Deepest draft of each request, as `room` returns it.
    """
    # Asking a protocol takes twenty times as long as asking for an attribute.
    several, loads = any(hasattr(drafter, "choose") for drafter, _ in groups(states)), hasattr(parts.length, "choose")
    asked, promised = list(rooms), list[Sequence[float]]([()] * len(states))
    if not several and not loads:
        return DraftPlan(states=states, rooms=rooms, asked=asked, promised=promised)
    if not several:
        choice = _by_load(parts, parts.experience, states, rooms)
        every = GroupChoice(experience=parts.experience, places=range(len(states)), choice=choice)
        return DraftPlan(
            states=states,
            rooms=choice.lengths,
            asked=choice.asked,
            promised=choice.promised or promised,
            choices=[every],
            tree=choice.tree,
        )
    seen, limits, choices = _chosen(parts, states, rooms), list(rooms), list[GroupChoice]()
    copying = [i for i, view in enumerate(seen) if view is not states[i] and view.drafter is not _last(states[i])]

    def bound(places: Sequence[int], experience: Experience) -> None:
        """Let the length policy choose for some of the requests."""
        left = [fits(drafter_of(seen[i]), len(seen[i].tokens), rooms[i]) for i in places]
        if loads and places:
            choice = _by_load(parts, experience, [seen[i] for i in places], left)
            choices.append(GroupChoice(experience=experience, places=places, choice=choice))
            left = list(choice.lengths)
            for i, each, promise in zip(places, choice.asked, choice.promised or [()] * len(places), strict=True):
                asked[i], promised[i] = each, promise
        for i, length in zip(places, left, strict=True):
            limits[i] = length

    bound(copying, parts.experience.of_copies)
    resting = [i for i in copying if not limits[i]]
    for i in resting:
        seen[i] = cast(Choosing, states[i].drafter).instead(states[i])
    bound([i for i in range(len(states)) if i not in copying or i in resting], parts.experience)
    return DraftPlan(states=seen, rooms=limits, asked=asked if loads else limits, promised=promised, choices=choices)


def _by_load(parts: Parts, experience: Experience, states: Sequence[Running], rooms: Sequence[int]) -> LengthChoice:
    """The lengths that the length policy chooses for some requests together; where drafts are looked up, by what was
    found, and where they branch, with the tree that sizes them while they grow.
    """
    policy = cast(LoadPolicy, parts.length)
    choice = policy.choose(experience, states, rooms)
    if parts.tree.structure != "chain":
        return cast(SizingPolicy, policy).sized(experience, states, choice, rooms, cast(RankedTree, parts.tree))
    able = [each for each in groups(states) if each[0].looks_up]
    everyone = bool(able) and policy.looks(experience, states, choice)
    wanted = rooms if everyone else choice.lengths
    looking = [each for each in able if any(wanted[i] for i in each[1])]
    if not looking:
        return choice
    found: list[Sequence[float] | None] = [() if drafter_of(state).looks_up else None for state in states]
    looked = list(choice.lengths)
    for drafter, group in looking:
        places = [i for i in group if wanted[i]]
        for i in places:
            looked[i] = min(rooms[i], parts.length.limit(states[i].length_state))
        rates = drafter.look_up([states[i] for i in places], [looked[i] for i in places])
        for i, promise in zip(places, rates, strict=True):
            found[i] = promise
    return replace(policy.shorten(experience, states, choice, found), looked=looked)


def _chosen(parts: Parts, states: Sequence[Running], rooms: Sequence[int]) -> list[Running]:
    """The requests as the drafters see them that are chosen for them."""
    chosen = list(states)
    for drafter, places in groups(states):
        if hasattr(drafter, "choose"):
            some = [states[i] for i in places]
            left = [min(parts.length.limit(states[i].length_state), rooms[i]) for i in places]
            for i, view in zip(places, cast(Choosing, drafter).choose(some, left, parts.experience.costs), strict=True):
                chosen[i] = view
    return chosen


def _last(state: Running) -> Drafter:
    """The last of a request's several drafters."""
    return drafter_of(state).components[-1]


def draft(
    parts: Parts,
    states: Sequence[Running],
    rooms: Sequence[int],
    dice: Dice,
    device: torch.device,
    tree: Tree | None = None,
) -> Draft:
    """Draft one tree per request, all requests of a drafter together.

    Args:
        states: The requests as their drafters see them.
        rooms: Deepest draft of each request.
        device: Where drafts are drawn.
        tree: How drafts grow; None: as the tree of the parts.
    """
    if tree is not None:
        parts = replace(parts, tree=tree)
    grouped = groups(states)
    # Drafters that have nothing to do need not be asked.
    grouped = [each for each in grouped if any(rooms[i] for i in each[1])] or grouped[:1]
    if len(grouped) == 1:
        return _grown(parts, grouped[0][0], states, rooms, dice, device)
    drafts, which = [], np.zeros(len(states), dtype=np.int64)
    for number, (drafter, places) in enumerate(grouped):
        drafter_rooms = [left if i in places else 0 for i, left in enumerate(rooms)]
        drafts.append(_grown(parts, drafter, states, drafter_rooms, dice, device))
        which[places] = number
    union = any(draft.structure == "union" for draft in drafts)
    return _selected(drafts, which, "union" if union else parts.tree.structure)


def _grown(
    parts: Parts, drafter: Drafter, states: Sequence[Running], rooms: Sequence[int], dice: Dice, device: torch.device
) -> Draft:
    """The drafts of one drafter. Requests of other drafters have no room."""
    if not drafter.unites:
        # Beside branching trees of other drafters, single tokens make a chain.
        beside = drafter.rows == "point" and len(parts.drafter.components) > 1
        tree = ChainTree() if beside and parts.tree.structure != "chain" else parts.tree
        return grow(drafter, tree, parts.length, states, rooms, dice, device)
    uniting, drafts = cast(Uniting, drafter), list[Draft]()
    # A slot has room for so many nodes beside a chain.
    most = BRANCHES // (len(drafter.components) - 1)
    for number, each in enumerate(drafter.components):
        seen = [uniting.seen_by(number, state) if state.drafter is drafter else state for state in states]
        left = [fits(each, len(state.tokens), min(room, most)) for state, room in zip(states, rooms, strict=True)]
        drafts.append(_grown(parts, each, seen, left, dice, device))
    return uniting.unite(states, drafts)


def commit(states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
    """Tell drafters which nodes of their drafts were accepted, by the nodes' numbers."""
    for drafter, places in groups(states):
        drafter.commit([states[i] for i in places], [paths[i] for i in places])


def reads(parts: Parts, states: Sequence[Running]) -> bool:
    """Whether any drafter of some requests reads their new positions at once."""
    return not all(_waits(parts, drafter) for drafter, _ in groups(states))


def observe(parts: Parts, states: Sequence[Running], observed: Observed) -> None:
    """Give each drafter the new positions of its requests, if it reads them at once."""
    grouped = groups(states)
    for drafter, places in grouped:
        if _waits(parts, drafter):
            continue
        part = observed if len(grouped) == 1 else _part(observed, places, drafter.taps)
        drafter.observe([states[i] for i in places], part)


def _waits(parts: Parts, drafter: Drafter) -> bool:
    """Whether a drafter reads new positions when it drafts next. So does one that can wait, if the length policy may
    choose to draft nothing.
    """
    return hasattr(parts.length, "choose") and all(each.waits for each in drafter.components)


def _part(observed: Observed, places: Sequence[int], taps: Sequence[int]) -> Observed:
    """The part of `observed` that belongs to some of the requests."""
    bounds = [(int(observed.offsets[i]), int(observed.offsets[i + 1])) for i in places]
    index = np.concatenate([np.arange(first, end) for first, end in bounds])
    read = {}
    if taps:
        [where] = upload([index], observed.taps[taps[0]].device)
        read = {k: observed.taps[k][where] for k in taps}
    return Observed(
        tokens=observed.tokens[index], offsets=np.cumsum([0, *(end - first for first, end in bounds)]), taps=read
    )


def _selected(drafts: Sequence[Draft], which: Int[np.ndarray, " requests"], structure: Structure) -> Draft:
    """One draft that takes request r from `drafts[which[r]]`. All drafts have all requests."""
    requests = np.arange(len(which))
    nodes = _behind_each_other([len(draft.parents) for draft in drafts])
    links = _behind_each_other([len(draft.links) for draft in drafts])
    drawn = _behind_each_other([0 if draft.rows is None else len(draft.rows) for draft in drafts])

    def joined(parts: Iterable[Int[np.ndarray, " _"]], starts: Int[np.ndarray, " bounds"]) -> Int[np.ndarray, " n"]:
        """Numbers of several drafts, counted on from draft to draft; -1 stays."""
        return np.concatenate([np.where(each >= 0, each + by, -1) for each, by in zip(parts, starts, strict=False)])

    def chosen(bounds: Sequence[Int[np.ndarray, " bounds"]]) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " sizes"]]:
        """The places of what the chosen draft of each request has, and how many there are of each."""
        table = np.stack(bounds)
        firsts, ends = table[which, requests], table[which, requests + 1]
        return np.concatenate([np.arange(*pair) for pair in zip(firsts, ends, strict=True)]), ends - firsts

    order, sizes = chosen([draft.offsets + by for draft, by in zip(drafts, nodes, strict=False)])
    of_links, _ = chosen([draft.first_child[draft.offsets] + by for draft, by in zip(drafts, links, strict=False)])
    place = np.full(nodes[-1] + 1, -1)
    place[order] = np.arange(len(order))
    rows, short_list = _rows_of(drafts)
    tokens = torch.cat([draft.tokens for draft in drafts])
    return Draft(
        tokens=tokens[upload([order], tokens.device)[0]],
        parents=place[joined([draft.parents for draft in drafts], nodes)[order]],
        depths=np.concatenate([draft.depths for draft in drafts])[order],
        numbers=np.concatenate([draft.numbers for draft in drafts])[order],
        offsets=_behind_each_other(sizes),
        first_child=_behind_each_other(np.concatenate([np.diff(draft.first_child) for draft in drafts])[order]),
        links=place[joined([draft.links for draft in drafts], nodes)[of_links]],
        rows=rows,
        row_of=joined([draft.row_of for draft in drafts], drawn)[order],
        structure=structure,
        short_list=short_list,
        chances=_chances_of(drafts, order),
    )


def _chances_of(drafts: Sequence[Draft], order: Int[np.ndarray, " n"]) -> Float[np.ndarray, " n"] | None:
    """How likely some nodes of several drafts, numbered through, seem to their drafters; 0 where nobody asked."""
    if all(draft.chances is None for draft in drafts):
        return None
    each = [np.zeros(len(draft.parents)) if draft.chances is None else draft.chances for draft in drafts]
    return np.concatenate(each)[order]


def _behind_each_other(sizes: Sequence[int] | Int[np.ndarray, " n"]) -> Int[np.ndarray, " bounds"]:
    """Where things of these sizes begin that stand behind each other; the last entry is their sum."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _rows_of(drafts: Sequence[Draft]) -> tuple[Float[Tensor, "drawn width"] | None, ShortList | None]:
    """The rows of several drafts, over the short list that they share, or over the whole vocabulary."""
    with_rows = [(draft.rows, draft.short_list) for draft in drafts if draft.rows is not None]
    if not with_rows:
        return None, None
    few = with_rows[0][1]
    if all(other is few for _, other in with_rows):
        return torch.cat([rows for rows, _ in with_rows]), few
    return torch.cat([rows if short is None else short.widened(rows) for rows, short in with_rows]), None
