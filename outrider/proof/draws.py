"""Whether the production dice keep the law that the enumeration takes for granted: frequencies over fixed seeds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, product

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Request, Running, Sampling
from outrider.decoding.protocol import Cycle
from outrider.decoding.step import dice_of, step_dice
from outrider.engine.engine import Engine
from outrider.proof.statistics import chi_square, two_sided

BOUND = 1e-6
"""The dice are wrong if the smallest p-value, times the number of tests, is below this. Seeds are fixed, so that the
same dice are always judged alike."""
SLOTS = 64
"""Draws of one step and purpose."""
COINS = 2**14
"""Throws of each coin."""
CHANCES = (0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.98)
"""Probabilities of the coins."""
PICKS = 2**14
"""Picks from each row."""
NUMBERS = 2**27
"""Most weights that are read for one row, which makes picks from a wide row fewer."""
WIDTHS = (7, 192)
"""Widths of rows, besides the target's own: a narrow one, and one whose many rows are summed in blocks."""
ROWS = 1024
"""Rows of one call."""
PICKED: tuple[Purpose, ...] = (Purpose.DRAFT, Purpose.RECOVER)
"""Purposes of picks."""
THROWN: tuple[Purpose, ...] = (Purpose.DRAFT, Purpose.ACCEPT, Purpose.RECOVER)
"""Purposes whose draws are compared with each other."""
SIDES = 4
"""Sides of the dice whose throws are compared with each other."""
THROWS = 2**11
"""Throws that are compared with each other."""
NUM_SLOTS = 32
"""Slots of a step, each of which is compared with each."""
FEW_SLOTS = 8
"""Slots that are compared where steps, seeds or kinds of draws differ."""
NUM_OUTPUTS = 8
"""Outputs of one prompt that are compared with each other."""

MakeDice = Callable[[Sequence[Running]], Dice]
"""Makes the dice of a step, as `step_dice` does."""


@dataclass(frozen=True, kw_only=True)
class DiceLaw:
    """The tests of the dice.

    Attributes:
        p_values: Of each test, by what it tests.
        num_draws: How many draws were made.
    """

    p_values: Mapping[str, float]
    num_draws: int

    @property
    def worst(self) -> str:
        """The test that fits least."""
        return min(self.p_values, key=lambda name: self.p_values[name])

    @property
    def p_value(self) -> float:
        """The smallest p-value, corrected for the number of tests."""
        return min(1.0, self.p_values[self.worst] * len(self.p_values))

    @property
    def holds(self) -> bool:
        """Whether all frequencies fit."""
        return self.p_value > BOUND


def dice_law(
    vocab_size: int,
    make: MakeDice = step_dice,
    device: torch.device | None = None,
    shared: bool = False,
    outputs: Sequence[int] = (),
) -> DiceLaw:
    """Throw the dice many times, each draw under a key of its own, as requests with the seeds 0, 1, 2 ... would.

    Coins land as often as their probability says. An index is picked as often as its weight says; beside a chi-square
    test, one with one degree of freedom asks whether high or low indices are preferred. Draws of every two purposes and
    of every two slots are independent, and so are those of neighbouring steps and seeds.

    Args:
        vocab_size: The target's, because wide rows are picked from by other code than narrow ones.
        make: Makes the dice of one step.
        device: Where rows lie.
        shared: Whether picks of all purposes share the noise of their position, as those of `CoupledDice` do. Then they
            agree as often as the law of their coupling says.
        outputs: Seeds of several outputs of one prompt, which are independent too.
    """
    tests = _Tests(make, device or torch.device("cpu"), shared)
    tests.coins()
    for width in dict.fromkeys((*WIDTHS, vocab_size)):
        tests.picks(width)
    tests.tilts()
    tests.several()
    tests.noise()
    tests.independence()
    if shared:
        tests.agreement()
    if outputs:
        tests.outputs(outputs)
    return DiceLaw(p_values=tests.p_values, num_draws=tests.num_draws)


def dice_law_of(engine: Engine) -> DiceLaw:
    """The law of the dice that an engine throws, for several outputs of one prompt too."""
    parts = engine.parts
    shared = getattr(parts.verifier, "shares_noise", False)
    make = engine.dice or partial(dice_of, parts)
    return dice_law(parts.target.vocab_size, make, shared=shared, outputs=_seeds_of_outputs(engine))


def _seeds_of_outputs(engine: Engine) -> list[int]:
    """The seeds with which an engine runs several outputs of one prompt."""
    seeds: dict[str, int] = {}

    def look(cycle: Cycle) -> None:
        seeds.update((state.request.id, state.request.sampling.seed or 0) for state in cycle.states)

    before, engine.watch = engine.watch, look
    try:
        engine.generate([[1]], n=NUM_OUTPUTS, max_new_tokens=1, sampling=Sampling(seed=0))
    finally:
        engine.watch = before
        engine.rest()
    return list(seeds.values())


class _Tests:
    """The tests under way; changes in place."""

    def __init__(self, make: MakeDice, device: torch.device, shared: bool) -> None:
        self._make, self._device, self._shared = make, device, shared
        self._requests: dict[int, Request] = {}
        self.p_values: dict[str, float] = {}
        self._tilts: list[float] = []
        self.num_draws = 0

    def _dice(self, seeds: Iterable[int], step: int) -> Dice:
        """The dice of one step of requests with these seeds. Every step has positions of its own in the text."""
        tokens = [0] * (1 + SLOTS * step)
        requests = map(self._request, seeds)
        return self._make(
            [Running(request=each, tokens=tokens, slot=0, drafter=None, num_steps=step) for each in requests]
        )

    def _request(self, seed: int) -> Request:
        if seed not in self._requests:
            sampling = Sampling(seed=seed)
            self._requests[seed] = Request(id=str(seed), prompt=(0,), max_new_tokens=1, sampling=sampling)
        return self._requests[seed]

    def _keys(self, count: int, purpose: Purpose) -> Draws:
        """As many draws in one step, of as many requests as needed."""
        self.num_draws += count
        places = np.arange(count)
        return _draws(places // SLOTS, places % SLOTS, purpose)

    def coins(self) -> None:
        """Coins of several probabilities, each by itself and all together."""
        total, variance = 0.0, 0.0
        for step, chance in enumerate(CHANCES):
            dice = self._dice(range(COINS // SLOTS), step)
            landed = dice.accept(np.full(COINS, chance), self._keys(COINS, Purpose.ACCEPT))
            more, spread = int(landed.sum()) - COINS * chance, COINS * chance * (1 - chance)
            self.p_values[f"coins of probability {chance:g}"] = two_sided(more / math.sqrt(spread))
            total, variance = total + more, variance + spread
        self.p_values["all coins"] = two_sided(total / math.sqrt(variance))

    def picks(self, width: int) -> None:
        """Picks from a row, by `pick` and by `picks`."""
        weights = _weights(width)
        count = max(SLOTS, min(PICKS, NUMBERS // width))
        rows = max(1, min(ROWS, count, NUMBERS // (16 * width)))
        full = weights.expand(rows, width).contiguous().to(self._device)
        for purpose in PICKED:
            picked = []
            for step, first in enumerate(range(0, count, rows)):
                size = min(rows, count - first)
                keys, dice = self._keys(size, purpose), self._dice(range(-(-size // SLOTS)), step)
                if purpose is Purpose.RECOVER:
                    picked.append(dice.pick(full[:size], keys))
                else:
                    [pick] = dice.picks(keys, [size], self._device)
                    picked.append(pick(full[:size]))
            self._fits(f"picks of 1 in {width} ({_name(purpose)})", torch.cat(picked), weights)

    def tilts(self) -> None:
        """The tilts of all picks so far together, which are independent."""
        self.p_values["tilt of all picks"] = two_sided(sum(self._tilts) / math.sqrt(len(self._tilts)))

    def several(self) -> None:
        """Several picks from a row at once, with and without replacement."""
        weights, count = _weights(4), PICKS // 2
        share = weights / weights.sum()
        law = share[:, None] * share
        without = (law / (1 - share[:, None])).fill_diagonal_(0)
        rows = weights.expand(count, 4).contiguous().to(self._device)
        requests = np.arange(count)
        for step, (replace, joint) in enumerate(((True, law), (False, without))):
            keys = _draws(requests, np.zeros_like(requests), Purpose.DRAFT)
            chosen = self._dice(range(count), step).pick_many(rows, 2, replace, keys).cpu()
            self.num_draws += 2 * count
            how = "with" if replace else "without"
            self._fits(f"two picks {how} replacement", chosen[:, 0] * 4 + chosen[:, 1], joint.flatten())

    def noise(self) -> None:
        """Gumbel noise: the largest of log-weights with noise is a pick by the weights."""
        weights, count = _weights(7), PICKS // 2
        requests = np.arange(count)
        keys = _draws(requests, np.zeros_like(requests), Purpose.DRAFT)
        noise = self._dice(range(count), 0).gumbel(7, keys).double().cpu()
        self.num_draws += noise.numel()
        self._fits("the largest of Gumbel noise", (weights.log() + noise).argmax(1), weights)
        mean = float(noise.mean() - np.euler_gamma) * math.sqrt(noise.numel() * 6) / math.pi
        self.p_values["the mean of Gumbel noise"] = two_sided(mean)

    def independence(self) -> None:
        """Throws of fair dice and coins under every two keys: of one step and request, of neighbouring steps, and of
        requests with neighbouring seeds.
        """
        few = range(FEW_SLOTS)
        slots = few if self._shared else range(NUM_SLOTS)
        thrown = {purpose: self._thrown(purpose, slots) for purpose in THROWN}
        noise = self._noise(few)
        for (i, one), (k, other) in combinations_with_replacement(enumerate(THROWN), 2):
            p_values = _joint(thrown[one], thrown[other])
            if i == k:
                p_values = p_values[np.triu_indices(len(slots), 1)]
            elif self._shared and Purpose.ACCEPT not in (one, other):
                p_values = p_values[~np.eye(len(slots), dtype=bool)]
            name = f"{_name(one)} and {_name(other)}" if i < k else f"the slots of {_name(one)}"
            self._smallest(f"independence of {name}", p_values)
        self._smallest("independence of Gumbel noise", *(_joint(noise, each) for each in thrown.values()))
        for name, step, seed in (("steps", 1, 0), ("seeds", 0, 1)):
            others = [self._thrown(purpose, few, step, seed) for purpose in THROWN]
            pairs = product(thrown.values(), others)
            self._smallest(f"independence of neighbouring {name}", *(_joint(one, other) for one, other in pairs))

    def outputs(self, seeds: Sequence[int]) -> None:
        """Throws of requests with these seeds, which are those of several outputs of one prompt."""
        rows = [self._thrown(Purpose.DRAFT, range(SLOTS), step, seeds=seeds) for step in range(-(-THROWS // SLOTS))]
        throws = torch.cat(rows, 1).T
        p_values = _joint(throws, throws)[np.triu_indices(len(seeds), 1)]
        self._smallest("independence of the outputs of one prompt", p_values)

    def _smallest(self, name: str, *p_values: Float[np.ndarray, " ..."]) -> None:
        """Note the smallest of some p-values, corrected for their number."""
        flat = np.concatenate([each.ravel() for each in p_values])
        self.p_values[name] = min(1.0, float(flat.min()) * len(flat))

    def agreement(self) -> None:
        r"""A draft token from $q$ and the target's token from $p$ with the same noise.

        Both are $x$ with probability $1 / \sum_y \max(p_y / p_x, q_y / q_x)$.
        """
        p, q = _weights(7), _weights(8)[:7]
        count = PICKS // 2
        requests, dice = np.arange(count), self._dice(range(count), 0)
        drafted, drawn = (
            dice.pick(weights.expand(count, 7).to(self._device), _draws(requests, 0 * requests, purpose)).cpu()
            for weights, purpose in ((q, Purpose.DRAFT), (p, Purpose.RECOVER))
        )
        self.num_draws += 2 * count
        both = 1 / torch.maximum(p / p[:, None], q / q[:, None]).sum(1)
        agreed = torch.bincount(drawn[drawn == drafted], minlength=7)
        observed = [*agreed.tolist(), count - int(agreed.sum())]
        expected = [*(both * count).tolist(), count * (1 - float(both.sum()))]
        self.p_values["agreement of draft and target"] = chi_square(observed, expected).p_value

    def _thrown(
        self, purpose: Purpose, slots: Sequence[int], step: int = 0, seed: int = 0, seeds: Sequence[int] | None = None
    ) -> Int[Tensor, "requests slots"]:
        """Throws of fair dice, of coins for coins, one in each of some slots of requests.

        Args:
            seed: 1 for requests whose seeds are the neighbours of the usual ones.
            seeds: Other seeds of the requests.
        """
        # Seeds are even, so that the neighbour of one is not another.
        seeds = [2 * request + seed for request in range(THROWS)] if seeds is None else seeds
        dice, keys = self._dice(seeds, step), self._grid(purpose, slots, len(seeds))
        if purpose is Purpose.ACCEPT:
            thrown = torch.from_numpy(dice.accept(np.full(len(keys.slots), 0.5), keys)).long()
        else:
            thrown = dice.pick(torch.ones(len(keys.slots), SIDES, device=self._device), keys).cpu()
        return thrown.view(len(seeds), len(slots))

    def _noise(self, slots: Sequence[int]) -> Int[Tensor, "requests slots"]:
        """Throws of fair dice by Gumbel noise, by the same requests."""
        seeds = [2 * request for request in range(THROWS)]
        noise = self._dice(seeds, 0).gumbel(SIDES, self._grid(Purpose.DRAFT, slots, THROWS))
        return noise.argmax(1).cpu().view(THROWS, len(slots))

    def _grid(self, purpose: Purpose, slots: Sequence[int], requests: int) -> Draws:
        """One draw in each of some slots of some requests."""
        self.num_draws += requests * len(slots)
        return _draws(np.repeat(np.arange(requests), len(slots)), np.tile(np.array(slots), requests), purpose)

    def _fits(self, name: str, picked: Int[Tensor, " picks"], weights: Float[Tensor, " width"]) -> None:
        """Test picks against weights: classes of neighbouring indices, and a tilt towards high or low ones."""
        picked, share = picked.cpu(), (weights / weights.sum()).double()
        # The middle of each index's part of the unit interval. Its mean is a half, whatever the weights are.
        middle = share.cumsum(0) - share / 2
        variance = float((share * middle**2).sum()) - 0.25
        tilt = float(middle[picked].mean() - 0.5) * math.sqrt(len(picked) / variance)
        self.p_values[f"tilt of {name}"] = two_sided(tilt)
        self._tilts.append(tilt)
        classes = (middle * 16).long().clamp_max(15)
        expected = torch.zeros(16, dtype=torch.float64).index_add_(0, classes, share) * len(picked)
        observed = torch.bincount(classes[picked], minlength=16)
        there = expected > 0
        self.p_values[name] = chi_square(observed[there].tolist(), expected[there].tolist()).p_value
        if bool((weights[picked] == 0).any()) or bool((observed[~there] > 0).any()):
            self.p_values[f"{name}: weights of zero"] = 0.0


def _joint(one: Int[Tensor, "throws a"], other: Int[Tensor, "throws b"]) -> Float[np.ndarray, "a b"]:
    """The p-value that each two columns of throws are independent: a chi-square test of their joint frequencies."""
    sides = [int(each.max()) + 1 for each in (one, other)]
    marks = [
        torch.nn.functional.one_hot(each, n).float().flatten(1) for each, n in zip((one, other), sides, strict=True)
    ]
    counts = (marks[0].T @ marks[1]).double().view(one.shape[1], sides[0], other.shape[1], sides[1])
    expected = len(one) / (sides[0] * sides[1])
    statistic = ((counts - expected) ** 2).sum((1, 3)) / expected
    degrees = torch.tensor((sides[0] * sides[1] - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(degrees, statistic / 2).numpy()


def _name(purpose: Purpose) -> str:
    return purpose.name.lower()


def _draws(requests: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"], purpose: Purpose) -> Draws:
    """Draws for the places in the text that the slots count."""
    return Draws(requests=requests, slots=slots, purpose=purpose, depths=slots)


def _weights(width: int) -> Float[Tensor, " width"]:
    """Uneven weights of a row, some of them zero where it is wide."""
    weights = 0.2 + torch.from_numpy(np.random.default_rng(width).exponential(size=width))
    if width > 16:
        weights[::5] = 0
    return weights
