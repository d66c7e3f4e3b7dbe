"""The exact law of the production code: walk every outcome of every draw, with its probability, in float64."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.constraints.masks import batch_masks, follow
from outrider.core.constraint import Constraint
from outrider.core.dice import Draws, Pick, Purpose
from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.core.types import Ahead, Request, Running, Sampling, ShortList, Step
from outrider.decoding.progress import begin, end, pending_tokens, prefill_chunk
from outrider.decoding.protocol import Parts
from outrider.lengths.protocol import BatchPolicy, LoadPolicy
from outrider.lm.protocol import Segment
from outrider.lm.slots.budget import PREFILL_CHUNK
from outrider.proof.noise import RaceNoise

BATCH = 512
"""Worlds that are walked as one batch."""
_TEXT = "law"
"""The name of the only request of a world."""


Key = tuple[object, Purpose, int]
"""The name of a draw: its request, its purpose, its slot."""


@dataclass(kw_only=True)
class World:
    """One possible outcome of all draws, while it is walked; changes in place.

    Draws are identified by name, not by number. So a world can be walked again even if rounding changes the number of
    possible outcomes of a draw.

    Attributes:
        script: Outcomes by draw. A draw that it does not name takes the first outcome, which is added.
        chances: The probability of each outcome that was taken.
        others: Scripts of the outcomes that were not taken at added draws.
        noise: What races have told of the noise of positions, by request and position; of `EnumeratingCoupledDice`.
    """

    script: dict[Key, int]
    chances: dict[Key, float] = field(default_factory=dict)
    others: list[dict[Key, int]] = field(default_factory=list)
    noise: dict[tuple[object, int], RaceNoise] = field(default_factory=dict)

    @property
    def probability(self) -> float:
        return math.prod(self.chances.values())

    def choose(self, key: Key, outcomes: Sequence[tuple[int, float]]) -> int:
        """Choose one of the possible outcomes."""
        if key not in self.script:
            if len(outcomes) == 1:
                return outcomes[0][0]
            self.others += [self.script | {key: other} for other, _ in outcomes[1:]]
            self.script[key] = outcomes[0][0]
        taken = self.script[key]
        self.chances[key] = dict(outcomes).get(taken, 0.0)
        return taken


class EnumeratingDice:
    """Dice of one step that take the outcomes of worlds.

    Walk a world with an empty script first, then the scripts in each world's `others`: this visits every outcome
    exactly once. A draw with one possible outcome is not a draw. Using one slot twice for one purpose is an error,
    because in production it would be the same random number.

    Args:
        worlds: One per request of the batch; requests may share one.
        names: The name of each request in its world; by default its index in the batch.
    """

    def __init__(self, worlds: Sequence[World], names: Sequence[object] | None = None) -> None:
        self._worlds = worlds
        self._names = range(len(worlds)) if names is None else names
        self._used: set[tuple[int, Purpose, int]] = set()

    def _choose(self, request: int, slot: int, draws: Draws, outcomes: Sequence[tuple[int, float]]) -> int:
        key = (request, draws.purpose, slot)
        if key in self._used:
            raise RuntimeError(f"the random number of slot {slot} for {draws.purpose.name} was used twice in one step")
        if len(outcomes) > 1:
            self._used.add(key)
        return self._worlds[request].choose((self._names[request], draws.purpose, slot), outcomes)

    def accept(self, probability: Float[np.ndarray, " n"], draws: Draws) -> Bool[np.ndarray, " n"]:
        landed = []
        for p, request, slot in zip(probability.tolist(), draws.requests.tolist(), draws.slots.tolist(), strict=True):
            sides = [(1, 1.0)] if p >= 1 else [(0, 1.0)] if p <= 0 else [(1, p), (0, 1 - p)]
            landed.append(bool(self._choose(request, slot, draws, sides)))
        return np.array(landed, dtype=bool)

    def toss(self, probability: Float[Tensor, "..."], draws: Draws) -> Bool[Tensor, "..."]:
        landed = self.accept(probability.double().flatten().cpu().numpy(), draws)
        return torch.from_numpy(landed).to(probability.device).view(probability.shape)

    def pick(self, weights: Float[Tensor, "n vocab"], draws: Draws) -> Int[Tensor, " n"]:
        active = [True] * len(weights) if draws.active is None else draws.active.tolist()
        picked = [
            self._index(row, place, 0, draws) if matters else row.index(max(row))
            for place, (row, matters) in enumerate(zip(weights.double().tolist(), active, strict=True))
        ]
        return torch.tensor(picked, dtype=torch.long)

    def picks(self, draws: Draws, counts: Sequence[int], device: torch.device) -> list[Pick]:
        """Outcomes depend on the weights, so nothing is made beforehand: each pick walks when it is called. So chains
        whose draws production makes at once are enumerated by the code that grows them in production.
        """
        ends = np.cumsum(counts)
        return [partial(self.pick, draws=draws.part(slice(e - n, e))) for e, n in zip(ends, counts, strict=True)]

    def pick_many(
        self, weights: Float[Tensor, "n vocab"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        picked = []
        for place, row in enumerate(weights.double().tolist()):
            chosen = []
            for k in range(count):
                chosen.append(self._index(row, place, k, draws))
                if not replace:
                    row[chosen[-1]] = 0
            picked.append(chosen)
        return torch.tensor(picked, dtype=torch.long)

    def gumbel(self, size: int, draws: Draws) -> Float[Tensor, "n size"]:
        raise NotImplementedError("Gumbel noise is continuous; its trees are enumerated by their Plackett-Luce law")

    def _index(self, row: list[float], place: int, offset: int, draws: Draws) -> int:
        """The index that a draw picks from its row, under the slot `offset` behind its own; -1 for an empty row."""
        total = sum(row)
        if total == 0:
            return -1
        request, slot = int(draws.requests[place]), int(draws.slots[place]) + offset
        return self._choose(request, slot, draws, [(i, weight / total) for i, weight in enumerate(row) if weight > 0])


class EnumeratingCoupledDice(EnumeratingDice):
    """Dice of one step that take the outcomes of worlds, where all picks for one position of a request share its noise.

    What earlier races told of the noise of a position is kept in `World.noise`, so that later ones get their law given
    the earlier ones, whatever their rows are. Draws that do not race in `CoupledDice` are those of `EnumeratingDice`.

    Args:
        worlds: One per request of the batch.
        names: The name of each request in its world, for the draws of this step.
        texts: The name of each request in its world, for all steps.
        positions: Number of tokens that each request has so far.
    """

    def __init__(
        self,
        worlds: Sequence[World],
        names: Sequence[object],
        texts: Sequence[object],
        positions: Sequence[int],
    ) -> None:
        super().__init__(worlds, names)
        self._others = EnumeratingDice(worlds, names)
        self._texts, self._positions = texts, positions
        self._list: ShortList | None = None

    def over(self, few: ShortList) -> "EnumeratingCoupledDice":
        """The same dice for rows over a short list."""
        part = EnumeratingCoupledDice(self._worlds, self._names, self._texts, self._positions)
        part._used, part._others, part._list = self._used, self._others, few
        return part

    def pick_many(
        self, weights: Float[Tensor, "n vocab"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        if not replace or count == 1:
            return super().pick_many(weights, count, False, draws)
        behind = Draws(requests=draws.requests, slots=draws.slots + 1, purpose=draws.purpose)
        others = self._others.pick_many(weights, count - 1, True, behind)
        return torch.cat([self.pick(weights, draws)[:, None], others], 1)

    def _index(self, row: list[float], place: int, offset: int, draws: Draws) -> int:
        if draws.depths is None:
            raise ValueError("these draws are for no place in the text")
        if not any(weight > 0 for weight in row):
            return -1
        request = int(draws.requests[place])
        world, key = self._worlds[request], (self._texts[request], self._positions[request] + int(draws.depths[place]))
        weights = row
        if self._list is not None:
            weights = self._list.widened(torch.tensor([row], dtype=torch.float64))[0].tolist()
        known = world.noise.get(key) or RaceNoise.unknown(len(weights))
        won = known.race(weights)
        outcomes = [(token, chance) for token, (chance, _) in won.items()]
        token = self._choose(request, int(draws.slots[place]) + offset, draws, outcomes)
        # Walked again, an outcome may have become a rounding error; then its chance is 0.
        world.noise[key] = won[token][1] if token in won else known
        return token if self._list is None else int(self._list.places[token])


def enumerating_dice(
    parts: Parts,
    states: Sequence[Running],
    worlds: Sequence[World],
    names: Sequence[object],
    texts: Sequence[object],
) -> EnumeratingDice:
    """The enumerating dice of one step, of the kind that the verifier wants.

    Args:
        worlds: One per state.
        names: The name of each request in its world, for the draws of this step.
        texts: The same for all steps.
    """
    if not getattr(parts.verifier, "shares_noise", False):
        return EnumeratingDice(worlds, names)
    return EnumeratingCoupledDice(worlds, names, texts, [len(state.tokens) for state in states])


@dataclass(frozen=True, kw_only=True)
class _Before:
    """The state of a request before a step. Equal states are merged.

    Attributes:
        output: Tokens emitted so far.
        length: State of the length policy.
        carried: What the verifier carries.
        drafted: Tokens drafted ahead.
        noise: What earlier drafts tell of the noise of positions that have no token yet, if draws share it.
        ahead: The same with their rows, which are determined by the tokens.
    """

    output: tuple[int, ...]
    length: object
    carried: object
    drafted: tuple[int, ...] = ()
    noise: tuple[tuple[int, RaceNoise], ...] = ()
    ahead: Ahead = field(default=Ahead(), compare=False)


@dataclass(frozen=True, kw_only=True)
class Law:
    """The law of the output of some steps.

    Attributes:
        emitted: Probability of each emitted sequence.
        accepted: Expected number of accepted draft tokens, over all steps.
        error: Largest absolute difference to the target's law, over all sequences of the length of the longest emitted
            one, or of the horizon. Shorter outputs are continued by the target's law. If the verifier still carries
            something after some outputs, sequences are compared only up to the shortest of these.
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
    max_draft_context: int | None = None,
) -> Law:
    """Enumerate `num_steps` steps of the production loop on tabular language models.

    Worlds with equal tokens and equal states of length policy and verifier are merged between steps, so the drafter
    must be context-pure.

    Args:
        target_law: The target's distribution after the output so far; by default read from the target's own rows.
        horizon: Number of tokens to compare. Outputs of this length are not walked further.
        constraint: Which tokens may come next.
        prefilled: Whether tokens before the anchor are prefilled before a step, or by the step.
        max_draft_context: Of the request.
    """
    request = replace(_request(prompt, sampling), constraint=constraint, max_draft_context=max_draft_context)
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
            walked = [
                World(script=script, noise={(_TEXT, position): known for position, known in before.noise})
                for before, _, script in batch
            ]
            states = [_resume(parts, request, before) for before, _, _ in batch]
            if prefilled:
                _prefill(parts, states)
            names = [_TEXT] * len(walked)
            dice = enumerating_dice(parts, states, walked, names, names)
            for i, step in enumerate(_walk(parts, states, dice)):
                mass = batch[i][1] * walked[i].probability
                after[_before(states[i], walked[i])] += mass
                accepted += mass * step.num_accepted_tokens
            queue += [(*batch[i][:2], script) for i, world in enumerate(walked) for script in world.others]
        worlds = after
    emitted: dict[tuple[int, ...], float] = defaultdict(float)
    for before, mass in worlds.items():
        emitted[before.output] += mass
    reached = [len(before.output) for before in worlds if before.carried]
    if reached:
        horizon = min(reached) if horizon is None else min(horizon, *reached)
    rows = partial(target_rows, parts, request) if target_law is None else partial(_one_by_one, target_law)
    return Law(emitted=dict(emitted), accepted=accepted, error=law_error(emitted, rows, horizon))


def joint_law(
    parts: Parts, prompts: Sequence[Sequence[int]], sampling: Sampling | None = None, num_steps: int = 1
) -> list[Law]:
    """Enumerate some steps of a batch whose requests depend on each other. Returns the law of each request.

    Every world begins with a copy of the parts' experience. Worlds of one request are walked as one batch, unless the
    length policy chooses for a batch.
    """
    requests = [_request(prompt, sampling) for prompt in prompts]
    new = _Before(output=(), length=parts.length.open(), carried=None)
    emitted: list[dict[tuple[int, ...], float]] = [defaultdict(float) for _ in requests]
    accepted = [0.0] * len(requests)
    size = 1 if len(requests) > 1 or isinstance(parts.length, BatchPolicy | LoadPolicy) else BATCH
    queue: list[dict[Key, int]] = [{}]
    while queue:
        worlds, queue = [World(script=script) for script in queue[:size]], queue[size:]
        fresh_parts = replace(parts, experience=parts.experience.copied())
        texts = [i for _ in worlds for i in range(len(requests))]
        owners = [world for world in worlds for _ in requests]
        states = [_resume(fresh_parts, requests[i], new) for i in texts]
        _prefill(fresh_parts, states)
        counts = [0] * len(states)
        for step in range(num_steps):
            dice = enumerating_dice(fresh_parts, states, owners, [(i, step) for i in texts], texts)
            for k, taken in enumerate(fresh_parts.decoding.step(fresh_parts, states, dice=dice)):
                counts[k] += taken.num_accepted_tokens
        for state, world, i, count in zip(states, owners, texts, counts, strict=True):
            end(fresh_parts, state)
            emitted[i][tuple(state.output)] += world.probability
            accepted[i] += world.probability * count
        queue += [script for world in worlds for script in world.others]
    return [
        Law(
            emitted=dict(masses),
            accepted=count,
            error=law_error(masses, partial(target_rows, parts, request)),
        )
        for masses, count, request in zip(emitted, accepted, requests, strict=True)
    ]


def _request(prompt: Sequence[int], sampling: Sampling | None) -> Request:
    return Request(id="law", prompt=tuple(prompt), max_new_tokens=1 << 20, sampling=sampling or Sampling())


def _walk(parts: Parts, states: Sequence[Running], dice: EnumeratingDice) -> list[Step]:
    """One step of these states, which are closed."""
    steps = parts.decoding.step(parts, states, dice=dice)
    for state in states:
        end(parts, state)
    return steps


def target_rows(
    parts: Parts, request: Request, outputs: Sequence[tuple[int, ...]]
) -> Float[np.ndarray, "outputs vocab"]:
    """The target's own distribution after each of some outputs."""
    rows = []
    for first in range(0, len(outputs), BATCH):
        some = outputs[first : first + BATCH]
        states = [
            Running(request=request, tokens=[*request.prompt, *output], slot=parts.target.open(), drafter=parts.drafter)
            for output in some
        ]
        segments = [Segment(slot=s.slot, tokens=torch.tensor(s.tokens), logits="last") for s in states]
        logits = parts.target.extend(segments).logits
        for state in states:
            parts.target.release(state.slot)
        follow(states)
        owners = np.arange(len(some))
        newest = torch.tensor([s.tokens[-1] for s in states])
        masks = batch_masks(states, owners, newest, np.full(len(some), -1), parts.target.vocab_size)
        before = partial(Before.of, [request.prompt] * len(some), some)
        rows.append(to_rows(logits, owners, [request.sampling] * len(some), before, masks))
    return torch.cat(rows).double().numpy()


def _before(state: Running, world: World) -> _Before:
    unread = [(position, known) for (_, position), known in world.noise.items() if position >= len(state.tokens)]
    return _Before(
        output=tuple(state.output),
        length=state.length_state,
        carried=state.carried,
        drafted=state.ahead.tokens,
        noise=tuple(sorted(unread, key=itemgetter(0))),
        ahead=state.ahead,
    )


def _resume(parts: Parts, request: Request, before: _Before) -> Running:
    state = begin(parts, request)
    state.tokens += before.output
    state.length_state, state.carried, state.ahead = before.length, before.carried, before.ahead
    return state


def _prefill(parts: Parts, states: Sequence[Running]) -> None:
    """Prefill all tokens but the newest of every state."""
    while behind := [(state, count) for state in states if (count := len(pending_tokens(parts, state)))]:
        prefill_chunk(parts, [state for state, _ in behind], [min(count, PREFILL_CHUNK) for _, count in behind])


def _one_by_one(
    row: Callable[[tuple[int, ...]], Float[np.ndarray, " vocab"]], outputs: Sequence[tuple[int, ...]]
) -> Float[np.ndarray, "outputs vocab"]:
    return np.stack([row(output) for output in outputs])


def law_error(
    emitted: Mapping[tuple[int, ...], float],
    rows: Callable[[Sequence[tuple[int, ...]]], Float[np.ndarray, "outputs vocab"]],
    horizon: int | None = None,
) -> float:
    """Largest difference to the target's law over all sequences as long as the longest emitted one, or the horizon.

    Args:
        rows: The target's distribution after each of some outputs.
    """
    longest = max(len(output) for output in emitted) if horizon is None else horizon
    ours: dict[tuple[int, ...], float] = defaultdict(float)
    for output, mass in emitted.items():
        ours[output[:longest]] += mass
    # Shorter outputs are continued by the target: what was emitted, and what the target would have.
    level: list[tuple[int, ...]] = [()]
    speculated, plain = np.array([ours.get((), 0.0)]), np.ones(1)
    for _ in range(longest):
        p = rows(level)
        level = [(*output, token) for output in level for token in range(p.shape[1])]
        speculated = (speculated[:, None] * p).ravel() + np.array([ours.get(output, 0.0) for output in level])
        plain = (plain[:, None] * p).ravel()
    return float(np.abs(speculated - plain).max())
