"""The drafters' part of a step. Requests are grouped by their drafter."""

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch
from jaxtyping import Int

from outrider.core.dice import Dice
from outrider.core.types import Draft, Running
from outrider.decoding.protocol import Parts
from outrider.drafters.protocol import Drafter, Observed
from outrider.lengths.experience import LengthChoice
from outrider.lengths.protocol import LoadPolicy
from outrider.lm.slots.batch import upload
from outrider.trees.grow import grow


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
    if (most := drafter.max_context) is not None:
        left = min(left, most - len(state.tokens) - 1)
    if (most := drafter.max_depth) is not None:
        left = min(left, most)
    return max(left, 0)


def draft(parts: Parts, states: Sequence[Running], rooms: Sequence[int], dice: Dice, device: torch.device) -> Draft:
    """Draft one tree per request, all requests of a drafter together.

    Args:
        rooms: Deepest draft of each request, as `room` returns it.
        device: Where drafts are drawn.
    """
    grouped = groups(states)
    if len(grouped) == 1:
        return grow(grouped[0][0], parts.tree, parts.length, states, rooms, dice, device)
    drafts, which = [], np.zeros(len(states), dtype=np.int64)
    for number, (drafter, places) in enumerate(grouped):
        drafter_rooms = [left if i in places else 0 for i, left in enumerate(rooms)]
        drafts.append(grow(drafter, parts.tree, parts.length, states, drafter_rooms, dice, device))
        which[places] = number
    return _selected(drafts, which)


def commit(states: Sequence[Running], paths: Sequence[Sequence[int]]) -> None:
    """Tell drafters which nodes of their drafts were accepted, by the nodes' numbers."""
    for drafter, places in groups(states):
        drafter.commit([states[i] for i in places], [paths[i] for i in places])


def bounded(parts: Parts, states: Sequence[Running], rooms: Sequence[int]) -> tuple[Sequence[int], LengthChoice | None]:
    """Rooms within the lengths that the length policy chooses for all requests together, and this choice; None for a
    policy that chooses none.
    """
    # Asking a protocol takes twenty times as long as asking for an attribute.
    if not hasattr(parts.length, "choose"):
        return rooms, None
    choice = cast(LoadPolicy, parts.length).choose(parts.experience, states, rooms)
    return choice.lengths, choice


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
    return drafter.waits and hasattr(parts.length, "choose")


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


def _selected(drafts: Sequence[Draft], which: Int[np.ndarray, " requests"]) -> Draft:
    """One draft that takes request r from `drafts[which[r]]`. Its rows cover the whole vocabulary."""
    wide = [_widened(each) for each in drafts]
    pieces = [_request(wide[which[r]], r) for r in range(len(which))]
    sizes = [len(piece.tokens) for piece in pieces]
    offsets = np.cumsum([0, *sizes])
    drawn = np.cumsum([0, *(0 if piece.rows is None else len(piece.rows) for piece in pieces)])
    links = np.cumsum([0, *(len(piece.links) for piece in pieces)])
    rows = [piece.rows for piece in pieces if piece.rows is not None]

    def moved(values: Int[np.ndarray, " n"], by: int) -> Int[np.ndarray, " n"]:
        return np.where(values >= 0, values + by, -1)

    return Draft(
        tokens=torch.cat([piece.tokens for piece in pieces]),
        parents=np.concatenate([moved(piece.parents, by) for piece, by in zip(pieces, offsets.tolist(), strict=False)]),
        depths=np.concatenate([piece.depths for piece in pieces]),
        numbers=np.concatenate([piece.numbers for piece in pieces]),
        offsets=offsets,
        first_child=np.concatenate(
            [*(piece.first_child[:-1] + by for piece, by in zip(pieces, links.tolist(), strict=False)), links[-1:]]
        ),
        links=np.concatenate([piece.links + by for piece, by in zip(pieces, offsets.tolist(), strict=False)]),
        rows=torch.cat(rows) if rows else None,
        row_of=np.concatenate([moved(piece.row_of, by) for piece, by in zip(pieces, drawn.tolist(), strict=False)]),
        structure=drafts[0].structure,
    )


def _widened(draft: Draft) -> Draft:
    if draft.rows is None or draft.short_list is None:
        return draft
    return replace(draft, rows=draft.short_list.widened(draft.rows), short_list=None)


def _request(draft: Draft, request: int) -> Draft:
    """One request's part of a draft, numbered from 0."""
    first, end = int(draft.offsets[request]), int(draft.offsets[request + 1])
    low, high = int(draft.first_child[first]), int(draft.first_child[end])
    row_of = draft.row_of[first:end]
    drawn = np.flatnonzero(row_of >= 0)
    rows = None
    if draft.rows is not None and len(drawn):
        rows = draft.rows[upload([row_of[drawn]], draft.rows.device)[0]]
    numbered = np.full(end - first, -1)
    numbered[drawn] = np.arange(len(drawn))
    above = draft.parents[first:end]
    return Draft(
        tokens=draft.tokens[first:end],
        parents=np.where(above >= 0, above - first, -1),
        depths=draft.depths[first:end],
        numbers=draft.numbers[first:end],
        offsets=np.array([0, end - first]),
        first_child=draft.first_child[first : end + 1] - low,
        links=draft.links[low:high] - first,
        rows=rows,
        row_of=numbered,
        structure=draft.structure,
    )
