"""Every random draw of the project: keyed by seed, step, purpose and slot or row, never by position alone.

`core.coupled_dice` is the one exception, and says why it may be one.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, unique
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Pick = Callable[[Float[Tensor, "n vocab"]], Int[Tensor, " n"]]
"""Draws an index in proportion to the weights of each row."""
BLOCK = 64
"""Size of the blocks in which many weights are summed."""
MANY = 2**17
"""From this many weights on, summing blocks first is faster than one running sum."""
_WORD = 2**64 - 1
_HALF = 2**32 - 1
_EMPTY = np.zeros(4, dtype=np.uint64)


@unique
class Purpose(IntEnum):
    """What a random draw decides. It is a part of the draw's key, so that two purposes never draw alike.

    What a seed gives depends on these numbers: a number is never changed and never used again.

    Attributes:
        CUT: Where a training text without a prompt is cut, before the draft model continues it.
        COIN: Whether the draft model continues a training text.
        TOKENS: The tokens of this continuation.
        AGE: How old the target's states are that a steered draft model learns with in a step.
        NOISE: The noise on features in training.
        ANCHORS: The tokens at which a text is learned in blocks.
        GAPS: The gaps between the positions of a training text.
        PADDING: The position at which a training text begins.
        HEAD: The head that a step trains.
        GROUPS: The places at which parallel guesses are learned.
        DRAFT: A draft token, in decoding.
        ACCEPT: Whether a draft token is accepted.
        RECOVER: The token that replaces a rejected one, or follows the last one.
        LIBRARIES: What torch and other libraries draw in a step of training, such as dropout.
        ORDER: The order of a corpus in an epoch.
        CROP: The part of a long text.
        HELD_OUT: The texts of a corpus that are watched and not learned.
    """

    CUT, COIN, TOKENS = 0, 1, 2
    AGE, NOISE = 30, 31
    ANCHORS, GAPS, PADDING = 40, 41, 42
    HEAD, GROUPS = 50, 51
    LIBRARIES = 60
    DRAFT, ACCEPT, RECOVER = 100, 101, 102
    ORDER, CROP, HELD_OUT = 200, 201, 202


_LANES = {Purpose.DRAFT: 0, Purpose.ACCEPT: 1, Purpose.RECOVER: 2}
"""Which of a slot's numbers a purpose takes."""


def key_of(*parts: int) -> np.random.SeedSequence:
    """The key of a draw that is no draw of decoding. Keys of other parts, or of another number of parts, differ.

    NumPy writes its numbers one behind the other, in as many words as each needs, with zeros behind them. So `[7, 0]`
    and `[7]` are one key to it. Here the count comes first, and each part takes two words.

    Args:
        parts: Numbers from 0 to 2**64 - 1.

    Example:
        >>> key_of(7).generate_state(1) == key_of(7, 0).generate_state(1)
        array([False])
    """
    return np.random.SeedSequence([len(parts), *(word for part in parts for word in (part & _HALF, part >> 32))])


def numbered_seed(seed: int, number: int) -> int:
    """The seed of one of several outputs or answers. Pairs that differ have keys that differ.

    Seeds below 2**32 keep the key that they had before larger ones got theirs, so that their texts stay. No key of the
    one kind is a key of the other: NumPy fills the short ones up with zeros, and the third or the fifth word of a long
    one is not zero.

    Args:
        seed: From 0 to 2**64 - 1.
        number: Of the output, from 0 to 2**64 - 1.

    Example:
        >>> numbered_seed(7, 1)
        6635463128224577688
    """
    short = seed <= _HALF and number <= _HALF
    key = np.random.SeedSequence([seed, number]) if short else key_of(seed, number)
    return int(key.generate_state(1, np.uint64)[0])


def step_generator(purpose: Purpose, *, seed: int, step: int, row: int | None = None) -> np.random.Generator:
    """The random numbers of a step of training: of one row of its global batch, or of the whole step.

    Example:
        >>> int(step_generator(Purpose.PADDING, seed=7, step=2, row=3).integers(1000))
        352
    """
    return np.random.default_rng(key_of(purpose, seed, step) if row is None else key_of(purpose, seed, step, row))


def corpus_generator(purpose: Purpose, *, seed: int, index: int = 0) -> np.random.Generator:
    """The random numbers that choose from a corpus, for one epoch, or for one text of the whole run."""
    return np.random.default_rng(key_of(purpose, seed, index))


@dataclass(frozen=True, kw_only=True)
class Draws:
    """The keys of the draws of one call: one entry per row.

    Attributes:
        requests: Index into the batch that the dice was begun with.
        slots: A number that the request uses once per step and purpose, such as a node or a depth.
        purpose: What the draw decides. Streams of different purposes are independent.
        depths: Draft tokens between the request's newest committed token and the token that is drawn; None where a draw
            is for no place in the text. Only `CoupledDice` reads them.
        active: Rows whose outcome matters; None means all. Other rows get an arbitrary valid value.
    """

    requests: Int[np.ndarray, " n"]
    slots: Int[np.ndarray, " n"]
    purpose: Purpose
    depths: Int[np.ndarray, " n"] | None = None
    active: Bool[np.ndarray, " n"] | None = None

    def part(self, where: slice) -> "Draws":
        """Some of the draws."""
        depths = None if self.depths is None else self.depths[where]
        active = None if self.active is None else self.active[where]
        return replace(self, requests=self.requests[where], slots=self.slots[where], depths=depths, active=active)


@runtime_checkable
class Dice(Protocol):
    """The source of all randomness of one step of a batch of requests.

    A verifier may use only `accept` and `pick`, so that an enumerating dice can walk every outcome of the production
    code.
    """

    def accept(self, probability: Float[np.ndarray, " n"], draws: Draws) -> Bool[np.ndarray, " n"]:
        """Independent biased coins, on the host. Probability 0 never succeeds, 1 always does; neither uses a draw."""
        ...

    def toss(self, probability: Float[Tensor, "..."], draws: Draws) -> Bool[Tensor, "..."]:
        """As `accept`, on the device of the probabilities, without waiting for it; one draw for each, row by row."""
        ...

    def pick(self, weights: Float[Tensor, "n vocab"], draws: Draws) -> Int[Tensor, " n"]:
        """Index in proportion to the weights of each row; weights need no normalising."""
        ...

    def picks(self, draws: Draws, counts: Sequence[int], device: torch.device) -> list[Pick]:
        """What `pick` does for the first `counts[0]` draws, for the next `counts[1]` and so on, whose weights come
        later, on this device. Production makes all random numbers at once.
        """
        ...

    def pick_many(
        self, weights: Float[Tensor, "n vocab"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        """`count` indices per row in drawing order, using slots `slot .. slot + count - 1`.

        Without replacement, -1 stands where a row has no further index of positive weight.
        """
        ...

    def gumbel(self, size: int, draws: Draws) -> Float[Tensor, "n size"]:
        """Standard Gumbel noise, using one stream per slot."""
        ...


def inverse_cdf(weights: Float[Tensor, "n vocab"], uniforms: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """The index where the running sum of the weights first exceeds the uniform's share of their total, in float64.

    A weight of zero is never returned, whatever the rounding. On a CPU a running sum does not fall and stands still at
    zeros. Elsewhere it is added up in parallel, and may rise or fall by a rounding at a zero: a draw that lands there
    moves to the next positive weight, and one seed may draw another token than on a CPU where a uniform is within a
    rounding of a border. Uniforms are at least 0 and at most 1 - 2^-53. If weights are NaN, an arbitrary index is
    returned.

    Example:
        >>> inverse_cdf(torch.tensor([[0.0, 1.0, 3.0]]), torch.tensor([0.3]))
        tensor([2])
    """
    if weights.device.type != "cpu":
        running = settled(weights.cumsum(-1, dtype=torch.float64), weights)
        return _where(running, running[:, -1:], uniforms[:, None]).squeeze(-1)
    count, vocab = weights.shape
    block = math.gcd(vocab, BLOCK)
    if block < BLOCK or weights.numel() < MANY:
        running = weights.cumsum(-1, dtype=torch.float64)
        return _where(running, running[:, -1:], uniforms[:, None]).squeeze(-1)
    # Sums of blocks first: a running sum of everything takes several times as long.
    blocks = weights.view(count, -1, block)
    before = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    share = uniforms[:, None] * before[:, -1:]
    # Only a row that is not a number leads beyond the last block.
    place = torch.searchsorted(before, share, right=True).clamp_max_(before.shape[1] - 1)
    share = share - torch.where(place > 0, before.gather(1, (place - 1).clamp_min(0)), 0.0)
    inside = blocks.take_along_dim(place[:, :, None], 1).squeeze(1).cumsum(-1, dtype=torch.float64)
    # The block's own sums may round otherwise than its share of the whole.
    share = torch.minimum(share, inside[:, -1:] * (1 - 2**-53))
    return (place * block + torch.searchsorted(inside, share, right=True).clamp_max_(block - 1)).squeeze(-1)


def settled(running: Float[Tensor, "n vocab"], weights: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Running sums of weights that never fall and that stand still where a weight is zero, whatever the rounding.

    Example:
        >>> weights = torch.tensor([[0.5, 0.0, 0.5]])
        >>> settled(torch.tensor([[0.5, 0.625, 0.5625]]), weights)
        tensor([[0.5000, 0.5000, 0.5625]])
    """
    return running.masked_fill_(weights <= 0, 0.0).cummax(-1).values


@dataclass(frozen=True)
class InverseCdf:
    """Draws by `inverse_cdf` with numbers that are known already.

    Attributes:
        uniforms: One per row.
    """

    uniforms: Float[Tensor, " n"]

    def __call__(self, weights: Float[Tensor, "n vocab"]) -> Int[Tensor, " n"]:
        """An index in proportion to the weights of each row."""
        return inverse_cdf(weights, self.uniforms)


def _where(
    running: Float[Tensor, "n vocab"], total: Float[Tensor, "n 1"], uniforms: Float[Tensor, "n draws"]
) -> Int[Tensor, "n draws"]:
    # A uniform is at most 1 - 2^-53, so that its share, rounded, is below the total and within the last weight. Only a
    # row that is not a number leads beyond it.
    return torch.searchsorted(running, uniforms * total, right=True).clamp_max_(running.shape[1] - 1)


def _without_replacement(
    weights: Float[Tensor, "n vocab"], uniforms: Float[Tensor, "count n"]
) -> Int[Tensor, "n count"]:
    """Sequential draws from one running sum. A later draw takes a share of the remaining mass and skips the indices
    that were drawn before.
    """
    running = weights.cumsum(-1, dtype=torch.float64)
    total = running[:, -1:]
    available = (weights > 0).sum(-1)
    chosen: list[Int[Tensor, "n 1"]] = []
    below, above = running[:, :0], running[:, :0]
    for k, uniform in enumerate(uniforms):
        gone = (above - below).sum(-1, keepdim=True)
        left = (total - gone).clamp_min(0)
        share = torch.minimum(uniform[:, None] * left, left * (1 - 2**-53))
        for i in range(k):
            passed = share >= below[:, i : i + 1]
            moved = torch.maximum(share + (above - below)[:, i : i + 1], above[:, i : i + 1])
            share = torch.where(passed, moved, share)
        drawn = torch.searchsorted(running, share, right=True).clamp_max(weights.shape[1] - 1)
        chosen.append(torch.where(available[:, None] > k, drawn, -1))
        edges = torch.where(drawn > 0, running.gather(1, (drawn - 1).clamp_min(0)), 0.0)
        below, above = torch.cat([below, edges], 1), torch.cat([above, running.gather(1, drawn)], 1)
        below, order = below.sort(-1)
        above = above.gather(1, order)
    return torch.cat(chosen, 1)


def _one_by_one(weights: Float[Tensor, "n vocab"], uniforms: Float[Tensor, "count n"]) -> Int[Tensor, "n count"]:
    """The same draws, each from what the draws before it left over. Fewer operations, but each reads whole rows."""
    left, chosen = weights, list[Int[Tensor, "n 1"]]()
    for k, uniform in enumerate(uniforms):
        running = settled(left.cumsum(-1, dtype=torch.float64), left)
        total = running[:, -1:]
        drawn = _where(running, total, uniform[:, None])
        chosen.append(torch.where(total > 0, drawn, -1))
        if k + 1 < len(uniforms):
            left = left.scatter(1, drawn, 0.0)
    return torch.cat(chosen, 1)


def _upload(numbers: list[float], device: torch.device) -> Float[Tensor, " n"]:
    return torch.tensor(numbers, dtype=torch.float64).to(device, non_blocking=True)


class _Own(threading.local):
    """One generator for each thread: making one in each step takes a while."""

    def __init__(self) -> None:
        self.philox = np.random.Philox(0)


_OWN = _Own()


def stream(seed: int, *, step: int, lane: int, stream: int = 0) -> np.random.Philox:
    """This thread's generator, set to the beginning of a stream; setting one is several times faster than making one.

    Args:
        lane: `PhiloxDice` takes 0 to 2, and `CoupledDice` takes 3.
    """
    _OWN.philox.state = {
        "bit_generator": "Philox",
        "state": {
            "counter": np.array([0, stream, lane, step], dtype=np.uint64),
            "key": np.array([seed & _WORD, seed >> 64], dtype=np.uint64),
        },
        "buffer": _EMPTY,
        "buffer_pos": len(_EMPTY),
        "has_uint32": 0,
        "uinteger": 0,
    }
    return _OWN.philox


class PhiloxDice:
    """The production dice: NumPy's counter-based Philox, one stream per (seed, step).

    Every slot has three numbers of a stream, one for each purpose, so a request's draws depend on its own seed and
    step and on nothing else in the batch.

    Args:
        seeds: One per request of the batch.
        steps: How many steps each request has made before.

    Example:
        >>> draws = Draws(requests=np.array([0]), slots=np.array([3]), purpose=Purpose.ACCEPT)
        >>> alone = PhiloxDice(seeds=[7], steps=[2]).accept(np.array([0.5]), draws)
        >>> in_a_batch = PhiloxDice(seeds=[7, 8], steps=[2, 0]).accept(np.array([0.5]), draws)
        >>> bool(alone == in_a_batch)
        True
    """

    def __init__(self, seeds: list[int], steps: list[int]) -> None:
        self._keys = list(zip(seeds, steps, strict=True))
        self._streams: dict[int, Float[np.ndarray, " numbers"]] = {}

    def _set(self, request: int, lane: int, number: int) -> np.random.Philox:
        """The generator at the beginning of a stream of the request."""
        seed, step = self._keys[request]
        return stream(seed, step=step, lane=lane, stream=number)

    def _uniform(self, request: int, slot: int, purpose: Purpose) -> float:
        place = slot * len(_LANES) + _LANES[purpose]
        stream = self._streams.get(request)
        if stream is None or len(stream) <= place:
            size = max(16 * len(_LANES), 2 * place)
            # What NumPy's own `random` makes of the raw numbers.
            raw: Int[np.ndarray, " numbers"] = self._set(request, 0, 0).random_raw(size)
            stream = self._streams[request] = (raw >> 11) * 2.0**-53
        return float(stream[place])

    def _uniforms(self, draws: Draws, offset: int = 0) -> list[float]:
        pairs = zip(draws.requests.tolist(), draws.slots.tolist(), strict=True)
        return [self._uniform(request, slot + offset, draws.purpose) for request, slot in pairs]

    def accept(self, probability: Float[np.ndarray, " n"], draws: Draws) -> Bool[np.ndarray, " n"]:
        return np.array(self._uniforms(draws)) < probability

    def toss(self, probability: Float[Tensor, "..."], draws: Draws) -> Bool[Tensor, "..."]:
        return _upload(self._uniforms(draws), probability.device).view(probability.shape) < probability

    def pick(self, weights: Float[Tensor, "n vocab"], draws: Draws) -> Int[Tensor, " n"]:
        return inverse_cdf(weights, _upload(self._uniforms(draws), weights.device))

    def picks(self, draws: Draws, counts: Sequence[int], device: torch.device) -> list[Pick]:
        uniforms = _upload(self._uniforms(draws), device).split(list(counts))
        return [InverseCdf(part) for part in uniforms]

    def pick_many(
        self, weights: Float[Tensor, "n vocab"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        numbers = [number for k in range(count) for number in self._uniforms(draws, offset=k)]
        uniforms = _upload(numbers, weights.device).view(count, len(weights))
        on_host = weights.device.type == "cpu"
        if replace:
            running = weights.cumsum(-1, dtype=torch.float64)
            running = running if on_host else settled(running, weights)
            return _where(running, running[:, -1:], uniforms.T.contiguous())
        return _without_replacement(weights, uniforms) if on_host else _one_by_one(weights, uniforms)

    def gumbel(self, size: int, draws: Draws) -> Float[Tensor, "n size"]:
        pairs = zip(draws.requests.tolist(), draws.slots.tolist(), strict=True)
        lane = _LANES[draws.purpose]
        return torch.from_numpy(np.stack([self._noise(r, lane, 1 + s, size) for r, s in pairs]))

    def _noise(self, request: int, lane: int, stream: int, size: int) -> Float[np.ndarray, " size"]:
        return np.random.Generator(self._set(request, lane, stream)).gumbel(size=size)
