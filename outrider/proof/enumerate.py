"""The exact law of the production code: walk every outcome of every draw, with its probability, in float64."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.constraints.masks import batch_masks, follow
from outrider.decoding.progress import begin, end, prefill
from outrider.decoding.protocol import Parts
from outrider.dice import Draws
from outrider.lm.protocol import Segment
from outrider.sampling import Prefix, to_rows
from outrider.types import Ahead, Constraint, Request, Running, Sampling, Step

BATCH = 512
"""Worlds that are walked as one batch."""


Key = tuple[object, str, int]
"""Which draw it is: whose, what it decides, its slot."""


@dataclass(kw_only=True)
class World:
    """One way that all draws can come out, while it is walked; changes in place.

    Draws are known by name, not by number, so that a world may be walked again where rounding makes a draw of one
    outcome out of one of two, or the other way round.

    Attributes:
        script: Outcomes by draw. A draw that it does not name takes the first outcome, which is added.
        chances: How likely each outcome taken was.
        others: Scripts of the outcomes not taken at the draws that were added.
    """

    script: dict[Key, int]
    chances: dict[Key, float] = field(default_factory=dict)
    others: list[dict[Key, int]] = field(default_factory=list)

    @property
    def probability(self) -> float:
        return math.prod(self.chances.values())

    def choose(self, key: Key, outcomes: Sequence[tuple[int, float]]) -> int:
        """The outcome to take, of those that are possible here."""
        if key not in self.script:
            if len(outcomes) == 1:
                return outcomes[0][0]
            self.others += [self.script | {key: other} for other, _ in outcomes[1:]]
            self.script[key] = outcomes[0][0]
        taken = self.script[key]
        self.chances[key] = dict(outcomes).get(taken, 0.0)
        return taken


class EnumeratingDice:
    """Dice of one step that take the outcomes of worlds. Following first a world with an empty script, then the others
    that each world leaves, visits every outcome exactly once.

    A draw with one possible outcome is no draw. Using one slot twice for one purpose is an error, because in
    production it would be the same random number.

    Args:
        worlds: One per request of the batch; requests may share one.
        names: What each request's draws are called in its world; by default its number in the batch.
    """

    def __init__(self, worlds: Sequence[World], names: Sequence[object] | None = None) -> None:
        self._worlds = worlds
        self._names = range(len(worlds)) if names is None else names
        self._used: set[tuple[int, str, int]] = set()

    def _choose(self, request: int, slot: int, draws: Draws, outcomes: Sequence[tuple[int, float]]) -> int:
        own = (request, draws.purpose, slot)
        if own in self._used:
            raise RuntimeError(f"the random number of slot {slot} for {draws.purpose!r} was used twice in one step")
        if len(outcomes) > 1:
            self._used.add(own)
        return self._worlds[request].choose((self._names[request], draws.purpose, slot), outcomes)

    def accept(self, probability: Float[np.ndarray, " n"], draws: Draws) -> Bool[np.ndarray, " n"]:
        landed = []
        for p, request, slot in zip(probability.tolist(), draws.requests.tolist(), draws.slots.tolist(), strict=True):
            sides = [(1, 1.0)] if p >= 1 else [(0, 1.0)] if p <= 0 else [(1, p), (0, 1 - p)]
            landed.append(bool(self._choose(request, slot, draws, sides)))
        return np.array(landed, dtype=bool)

    def pick(self, weights: Float[Tensor, "n vocab"], draws: Draws) -> Int[Tensor, " n"]:
        active = [True] * len(weights) if draws.active is None else draws.active.tolist()
        picked = []
        for row, request, slot, matters in zip(
            weights.double().numpy(), draws.requests.tolist(), draws.slots.tolist(), active, strict=True
        ):
            picked.append(self._index(row, request, slot, draws) if matters else int(row.argmax()))
        return torch.tensor(picked, dtype=torch.long)

    def pick_many(
        self, weights: Float[Tensor, "n vocab"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        picked = []
        for row, request, slot in zip(
            weights.double().numpy().copy(), draws.requests.tolist(), draws.slots.tolist(), strict=True
        ):
            chosen = []
            for k in range(count):
                chosen.append(self._index(row, request, slot + k, draws))
                if not replace:
                    row[chosen[-1]] = 0
            picked.append(chosen)
        return torch.tensor(picked, dtype=torch.long)

    def gumbel(self, size: int, draws: Draws) -> Float[Tensor, "n size"]:
        raise NotImplementedError("Gumbel noise is continuous; its trees are enumerated by their Plackett-Luce law")

    def _index(self, row: Float[np.ndarray, " vocab"], request: int, slot: int, draws: Draws) -> int:
        total = row.sum()
        if total == 0:
            return -1
        return self._choose(request, slot, draws, [(int(i), float(row[i] / total)) for i in np.flatnonzero(row > 0)])


@dataclass(frozen=True, kw_only=True)
class _Before:
    """What a request enters a step with; equal ones are one world.

    Attributes:
        output: Tokens emitted so far.
        length: State of the length policy.
        carried: What the verifier carries over.
        drafted: Tokens drafted ahead.
        ahead: The same with the rows that they were drawn from, which follow from the tokens.
    """

    output: tuple[int, ...]
    length: object
    carried: object
    drafted: tuple[int, ...] = ()
    ahead: Ahead = field(default=Ahead(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Law:
    """What a number of steps emits.

    Attributes:
        emitted: Probability of each emitted sequence.
        accepted: Expected number of accepted draft tokens, over all steps.
        error: Largest absolute difference to the target's law, over all sequences as long as the longest emitted
            one or as the horizon, the shorter ones continued by the target. Where a verifier still carries something
            over, what follows is not the target's alone, and sequences are compared as far as all such outputs reach.
    """

    emitted: Mapping[tuple[int, ...], float]
    accepted: float
    error: float


def law(
    parts: Parts,
    prompt: Sequence[int],
    num_steps: int,
    sampling: Sampling | None = None,
    target_law: Callable[[tuple[int, ...]], Float[np.ndarray, " vocab"]] | None = None,
    horizon: int | None = None,
    constraint: Constraint | None = None,
    prefilled: bool = True,
) -> Law:
    """Enumerate `num_steps` steps of the production loop on tabular language models.

    Worlds with equal tokens and equal states of length policy and verifier are merged between steps, so the drafter
    must be context-pure.

    Args:
        target_law: The target's distribution after the output so far; by default read from the target's own rows.
        horizon: Compare so many tokens; outputs that are as long are not walked further.
        constraint: Which tokens may come next.
        prefilled: Whether what came before a step is digested before it, or by it.
    """
    request = replace(_request(prompt, sampling), constraint=constraint)
    worlds: dict[_Before, float] = {_Before(output=(), length=parts.length.open(), carried=None): 1.0}
    accepted = 0.0
    for _ in range(num_steps):
        after: dict[_Before, float] = defaultdict(float)
        queue: list[tuple[_Before, float, dict[Key, int]]] = []
        for before, mass in worlds.items():
            if horizon is not None and len(before.output) >= horizon:
                after[before] += mass
            else:
                queue.append((before, mass, {}))
        while queue:
            batch, queue = queue[:BATCH], queue[BATCH:]
            walked = [World(script=script) for _, _, script in batch]
            states = [_resume(parts, request, before, prefilled) for before, _, _ in batch]
            dice = EnumeratingDice(walked, ["law"] * len(walked))
            for i, made in enumerate(_walk(parts, states, dice)):
                mass = batch[i][1] * walked[i].probability
                after[_before(states[i])] += mass
                accepted += mass * made.num_accepted_tokens
            queue += [(*batch[i][:2], script) for i, world in enumerate(walked) for script in world.others]
        worlds = after
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for before, mass in worlds.items():
        emitted[before.output] += mass
    reached = [len(before.output) for before in worlds if before.carried]
    if reached:
        horizon = min(reached) if horizon is None else min(horizon, *reached)
    rows = target_law or (lambda output: target_row(parts, request, output))
    return Law(emitted=dict(emitted), accepted=accepted, error=law_error(emitted, rows, horizon))


def joint_law(parts: Parts, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None) -> list[Law]:
    """Enumerate one step of a batch whose requests share a budget; the law of each, whatever the others do."""
    requests = [_request(prompt, sampling) for prompt in prompts]
    new = _Before(output=(), length=parts.length.open(), carried=None)
    emitted: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in requests]
    accepted = [0.0] * len(requests)
    queue: list[dict[Key, int]] = [{}]
    while queue:
        world = World(script=queue.pop())
        states = [_resume(parts, request, new) for request in requests]
        steps = _walk(parts, states, EnumeratingDice([world] * len(requests)))
        mass = world.probability
        for i, (state, made) in enumerate(zip(states, steps, strict=True)):
            emitted[i][tuple(state.output)] += mass
            accepted[i] += mass * made.num_accepted_tokens
        queue += world.others
    return [
        Law(
            emitted=dict(own),
            accepted=count,
            error=law_error(own, partial(target_row, parts, request)),
        )
        for own, count, request in zip(emitted, accepted, requests, strict=True)
    ]


def _request(prompt: Sequence[int], sampling: Sampling | None) -> Request:
    return Request(id="law", prompt=tuple(prompt), max_new_tokens=1 << 20, sampling=sampling or Sampling())


def _walk(parts: Parts, states: Sequence[Running], dice: EnumeratingDice) -> list[Step]:
    """One step of these states, which are closed."""
    steps = parts.decoding.step(parts, states, dice=dice)
    for state in states:
        end(parts, state)
    return steps


def target_row(parts: Parts, request: Request, output: tuple[int, ...]) -> Float[np.ndarray, " vocab"]:
    """The target's own distribution after an output."""
    slot = parts.target.open()
    tokens = torch.tensor([*request.prompt, *output])
    logits = parts.target.extend([Segment(slot=slot, tokens=tokens, logits="last")]).logits
    parts.target.release(slot)
    prefix = Prefix(prompt=request.prompt, output=output)
    state = Running(request=request, tokens=tokens.tolist(), slot=slot, drafter=parts.drafter)
    follow([state])
    owner = np.zeros(1, dtype=np.int64)
    masks = batch_masks([state], owner, tokens[-1:], owner - 1, parts.target.vocab_size)
    return to_rows(logits, owner, [request.sampling], lambda _: prefix, masks)[0].double().numpy()


def _before(state: Running) -> _Before:
    return _Before(
        output=tuple(state.output),
        length=state.length_state,
        carried=state.carried,
        drafted=state.ahead.tokens,
        ahead=state.ahead,
    )


def _resume(parts: Parts, request: Request, before: _Before, prefilled: bool = True) -> Running:
    state = begin(parts, request)
    state.tokens += before.output
    state.length_state, state.carried, state.ahead = before.length, before.carried, before.ahead
    if prefilled:
        prefill(parts, state)
    return state


def law_error(
    emitted: Mapping[tuple[int, ...], float],
    rows: Callable[[tuple[int, ...]], Float[np.ndarray, " vocab"]],
    horizon: int | None = None,
) -> float:
    """Largest difference to the target's law over all sequences as long as the longest emitted one, or the horizon."""
    longest = max(len(output) for output in emitted) if horizon is None else horizon
    cut: dict[tuple[int, ...], float] = defaultdict(float)
    for output, mass in emitted.items():
        cut[output[:longest]] += mass
    emitted = cut
    level: dict[tuple[int, ...], tuple[float, float]] = {(): (emitted.get((), 0.0), 1.0)}
    for _ in range(longest):
        below: dict[tuple[int, ...], tuple[float, float]] = {}
        for output, (ours, targets) in level.items():
            for token, p in enumerate(rows(output).tolist()):
                longer = (*output, token)
                below[longer] = (ours * p + emitted.get(longer, 0.0), targets * p)
        level = below
    return float(max(abs(ours - targets) for ours, targets in level.values()))
