"""Whether the production dice keep the law that the enumeration takes for granted: frequencies over fixed seeds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Purpose
from outrider.core.types import Request, Running, Sampling
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
SIDES = 8
"""Sides of the dice whose throws are compared with each other."""
PAIRS = 2**12
"""Throws that are compared with each other."""

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
    vocab_size: int, make: MakeDice = step_dice, device: torch.device | None = None, shared: bool = False
) -> DiceLaw:
    """Throw the dice many times, each draw under a key of its own, as requests with the seeds 0, 1, 2 ... would.

    Coins land as often as their probability says. An index is picked as often as its weight says; beside a chi-square
    test, one with one degree of freedom asks whether high or low indices are preferred. Draws under different purposes,
    slots, steps and seeds are independent.

    Args:
        vocab_size: The target's, because wide rows are picked from by other code than narrow ones.
        make: Makes the dice of one step.
        device: Where rows lie.
        shared: Whether picks of all purposes share the noise of their position, as those of `CoupledDice` do. Then they
            agree as often as the law of their coupling says.
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
    return DiceLaw(p_values=tests.found, num_draws=tests.num_draws)


def dice_law_of(engine: Engine) -> DiceLaw:
    """The law of the dice that an engine throws."""
    parts = engine.parts
    shared = getattr(parts.verifier, "shares_noise", False)
    return dice_law(parts.target.vocab_size, engine.dice or partial(dice_of, parts), shared=shared)


class _Tests:
    """The tests under way; changes in place."""

    def __init__(self, make: MakeDice, device: torch.device, shared: bool) -> None:
        self._make, self._device, self._shared = make, device, shared
        self._requests: dict[int, Request] = {}
        self.found: dict[str, float] = {}
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
            self.found[f"coins of probability {chance:g}"] = two_sided(more / math.sqrt(spread))
            total, variance = total + more, variance + spread
        self.found["all coins"] = two_sided(total / math.sqrt(variance))

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
            self._fits(f"picks of 1 in {width} ({purpose.name.lower()})", torch.cat(picked), weights)

    def tilts(self) -> None:
        """The tilts of all picks so far together, which are independent."""
        self.found["tilt of all picks"] = two_sided(sum(self._tilts) / math.sqrt(len(self._tilts)))

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
        self.found["the mean of Gumbel noise"] = two_sided(mean)

    def independence(self) -> None:
        """Throws under two keys that differ in one part."""
        first = self._thrown()
        others = {
            "draft and accept": self._tossed(),
            "neighbouring slots": self._thrown(slot=1),
            "neighbouring steps": self._thrown(step=1),
            "neighbouring seeds": self._thrown(seed=1),
        }
        if not self._shared:
            others["draft and recover"] = self._thrown(purpose=Purpose.RECOVER)
        for name, other in others.items():
            ways = SIDES * (2 if name.endswith("accept") else SIDES)
            both = torch.bincount(first * (ways // SIDES) + other, minlength=ways).tolist()
            self.found[f"independence of {name}"] = chi_square(both, [PAIRS / ways] * ways).p_value

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
        self.found["agreement of draft and target"] = chi_square(observed, expected).p_value

    def _thrown(
        self, purpose: Purpose = Purpose.DRAFT, slot: int = 0, step: int = 0, seed: int = 0
    ) -> Int[Tensor, " throws"]:
        """Throws of fair dice, each by a request of its own."""
        rows = torch.ones(PAIRS, SIDES, device=self._device)
        # Seeds are even, so that the neighbour of one is not another.
        seeds = (2 * request + seed for request in range(PAIRS))
        return self._dice(seeds, step).pick(rows, self._single(purpose, slot)).cpu()

    def _tossed(self) -> Int[Tensor, " throws"]:
        """Throws of fair coins by the same requests."""
        landed = self._dice(range(0, 2 * PAIRS, 2), 0).accept(np.full(PAIRS, 0.5), self._single(Purpose.ACCEPT, 0))
        return torch.from_numpy(landed).long()

    def _single(self, purpose: Purpose, slot: int) -> Draws:
        """One draw of each request."""
        self.num_draws += PAIRS
        requests = np.arange(PAIRS)
        return _draws(requests, np.full_like(requests, slot), purpose)

    def _fits(self, name: str, picked: Int[Tensor, " picks"], weights: Float[Tensor, " width"]) -> None:
        """Test picks against weights: classes of neighbouring indices, and a tilt towards high or low ones."""
        picked, share = picked.cpu(), (weights / weights.sum()).double()
        # The middle of each index's part of the unit interval. Its mean is a half, whatever the weights are.
        middle = share.cumsum(0) - share / 2
        variance = float((share * middle**2).sum()) - 0.25
        tilt = float(middle[picked].mean() - 0.5) * math.sqrt(len(picked) / variance)
        self.found[f"tilt of {name}"] = two_sided(tilt)
        self._tilts.append(tilt)
        classes = (middle * 16).long().clamp_max(15)
        expected = torch.zeros(16, dtype=torch.float64).index_add_(0, classes, share) * len(picked)
        observed = torch.bincount(classes[picked], minlength=16)
        there = expected > 0
        self.found[name] = chi_square(observed[there].tolist(), expected[there].tolist()).p_value
        if bool((weights[picked] == 0).any()) or bool((observed[~there] > 0).any()):
            self.found[f"{name}: weights of zero"] = 0.0


def _draws(requests: Int[np.ndarray, " n"], slots: Int[np.ndarray, " n"], purpose: Purpose) -> Draws:
    """Draws for the places in the text that the slots count."""
    return Draws(requests=requests, slots=slots, purpose=purpose, depths=slots)


def _weights(width: int) -> Float[Tensor, " width"]:
    """Uneven weights of a row, some of them zero where it is wide."""
    weights = 0.2 + torch.from_numpy(np.random.default_rng(width).exponential(size=width))
    if width > 16:
        weights[::5] = 0
    return weights
