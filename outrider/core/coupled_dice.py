"""Dice whose noise belongs to a position of the text, so that a draft token and the target's token are drawn alike."""

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from outrider.core.dice import Dice, Draws, Pick, stream
from outrider.core.types import ShortList

LANE = 3
"""The lane of the streams of noise; `PhiloxDice` has its own."""
KEPT = 64
"""Positions whose noise is kept, because a rejected draft is followed by another one for the same positions."""
_SMALLEST, _LARGEST = 2.0**-54, 1 - 2.0**-24
"""Bounds of the uniforms of noise, so that no noise is 0 or infinite in float32."""


@lru_cache(maxsize=KEPT)
def noise_at(seed: int, position: int, vocab_size: int) -> Float[Tensor, " vocab"]:
    r"""The noise of one position of a text: $e^{G_x} = 1 / E_x$ for every token $x$, in float32, on the host.

    $G$ is standard Gumbel noise and $E = -\ln U$ is standard exponential. The noise of a token does not depend on the
    size of the vocabulary. The tensor is shared, so nobody changes it.

    Args:
        seed: The request's seed.
        position: Number of tokens before this one, those of the prompt included.

    Example:
        >>> noise_at(7, 12, 4)
        tensor([ 1.2834,  1.3783,  0.7580, 16.2345])
        >>> bool((noise_at(7, 12, 4) == noise_at(7, 12, 8)[:4]).all())
        True
    """
    raw = stream(seed, step=position, lane=LANE).random_raw(vocab_size) >> np.uint64(11)
    # The smallest times decide races, so uniforms are fine near 0, where float32 has small steps.
    uniforms = torch.from_numpy(raw.view(np.int64)).float().mul_(2.0**-53).clamp_(_SMALLEST, _LARGEST)
    return uniforms.neg_().log1p_().reciprocal_().neg_()


class CoupledDice:
    r"""Dice whose picks are races: of weights $w$ the token with the largest $\ln w + G$ is picked (Gumbel-max).

    $G$ is keyed by the request's seed and by the absolute position of the token in its text, and by nothing else. A
    draft token from $q$ and the target's token from $p$ at the same position race with the same noise, and agree with
    probability $\sum_x 1 / \sum_y \max(p_y / p_x, q_y / q_x)$.

    Keys that leave out the step are wrong for rules that reject a token and draw another one: the second draw would
    know of the first. The verifier `coupled` may use them, because the noise of a position decides one emitted token
    and never a second one.

    Picks of all purposes share the noise. Of several picks without replacement the k-th gets the k-th largest. Of
    several with replacement the first races, and the others are independent of it. Coins and Gumbel noise of other
    kinds are those of `others`.

    Args:
        seeds: One per request of the batch.
        positions: Number of tokens that each request has so far: the position of the token behind its anchor.
        others: Dice of the draws that do not race.

    Example:
        >>> from dataclasses import replace
        >>> from outrider.core.dice import PhiloxDice, Purpose
        >>> dice = CoupledDice(seeds=[7], positions=[12], others=PhiloxDice(seeds=[7], steps=[0]))
        >>> draws = Draws(requests=np.array([0]), slots=np.array([0]), depths=np.array([0]), purpose=Purpose.DRAFT)
        >>> target = replace(draws, purpose=Purpose.RECOVER)
        >>> p, q = torch.tensor([[0.4, 0.3, 0.2, 0.1]]), torch.tensor([[0.1, 0.4, 0.3, 0.2]])
        >>> dice.pick(q, draws), dice.pick(p, target)
        (tensor([3]), tensor([3]))

    References:
        Daliri et al. 2024, coupling without communication, section 3. https://arxiv.org/abs/2408.07978
    """

    def __init__(self, seeds: Sequence[int], positions: Sequence[int], others: Dice) -> None:
        self._keys = list(zip(seeds, positions, strict=True))
        self._others = others
        self._list: ShortList | None = None
        self._noise: dict[tuple[int, int], Float[Tensor, " vocab"]] = {}

    def over(self, few: ShortList) -> "CoupledDice":
        """The same dice for rows over a short list."""
        part = CoupledDice([], [], self._others)
        part._keys, part._noise, part._list = self._keys, self._noise, few
        return part

    def accept(self, probability: Float[np.ndarray, " n"], draws: Draws) -> Bool[np.ndarray, " n"]:
        return self._others.accept(probability, draws)

    def toss(self, probability: Float[Tensor, "..."], draws: Draws) -> Bool[Tensor, "..."]:
        return self._others.toss(probability, draws)

    def pick(self, weights: Float[Tensor, "n width"], draws: Draws) -> Int[Tensor, " n"]:
        return (weights * self._of(draws, weights)).argmax(-1)

    def picks(self, draws: Draws, counts: Sequence[int], device: torch.device) -> list[Pick]:
        ends = np.cumsum(counts).tolist()
        return [partial(self.pick, draws=draws.part(slice(e - n, e))) for e, n in zip(ends, counts, strict=True)]

    def pick_many(
        self, weights: Float[Tensor, "n width"], count: int, replace: bool, draws: Draws
    ) -> Int[Tensor, "n count"]:
        if replace and count > 1:
            behind = Draws(requests=draws.requests, slots=draws.slots + 1, purpose=draws.purpose)
            others = self._others.pick_many(weights, count - 1, True, behind)
            return torch.cat([self.pick(weights, draws)[:, None], others], 1)
        best = (weights * self._of(draws, weights)).topk(min(count, weights.shape[1]), -1)
        picked = torch.where(best.values > 0, best.indices, -1)
        return torch.nn.functional.pad(picked, (0, count - picked.shape[1]), value=-1)

    def gumbel(self, size: int, draws: Draws) -> Float[Tensor, "n size"]:
        return self._others.gumbel(size, draws)

    def _of(self, draws: Draws, weights: Float[Tensor, "n width"]) -> Float[Tensor, "n width"]:
        """The noise of some draws. Rows whose outcome does not matter get that of another row."""
        if draws.depths is None:
            raise ValueError("these draws are for no place in the text")
        keys = list(zip(draws.requests.tolist(), draws.depths.tolist(), strict=True))
        if draws.active is not None and draws.active.any():
            first = keys[int(draws.active.argmax())]
            keys = [key if matters else first for key, matters in zip(keys, draws.active.tolist(), strict=True)]
        vocab_size = weights.shape[1] if self._list is None else len(self._list.places)
        rows = [self._one(request, depth, vocab_size, weights.device) for request, depth in keys]
        noise = rows[0][None] if len(rows) == 1 else torch.stack(rows)
        return noise if self._list is None else noise.index_select(1, self._list.ids)

    def _one(self, request: int, depth: int, vocab_size: int, device: torch.device) -> Float[Tensor, " vocab"]:
        """The noise of one position. It is made once, for the draft and the target."""
        noise = self._noise.get((request, depth))
        if noise is None:
            seed, position = self._keys[request]
            noise = noise_at(seed, position + depth, vocab_size).to(device, non_blocking=True)
            self._noise[request, depth] = noise
        return noise
