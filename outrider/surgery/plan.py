r"""Which shape of a draft model pays on this machine, before any is trained.

The cost model of "Decoding Speculative Decoding" (Yan et al. 2024, https://arxiv.org/abs/2402.01528): a step drafts K
tokens and verifies them in one forward of the target over K + 1 tokens,

$$\text{speed}(K) = \frac{\tau(K)}{t_v(K + 1) + K\,t_d}, \qquad \tau(K) = \frac{1 - \alpha^{K+1}}{1 - \alpha},$$

if each draft token is accepted with probability $\alpha$ and independently of the others.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.protocol import Segment
from outrider.surgery.family import Sized
from outrider.surgery.shape import ModelShape, config_of

WIDTHS = (1, 2, 3, 5, 9, 17)
"""Tokens of the target's forwards that are timed; what lies between is on a straight line."""
LONGEST_DRAFT = 16
"""The longest draft that is considered."""
BISECTIONS = 50


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds of forwards on a machine.

    Attributes:
        target: Of a target forward over this many tokens; at least over one.
        draft: Of a draft model's forward over one token.

    Example:
        >>> speeds = Speeds(target={1: 0.010, 5: 0.014}, draft=0.001)
        >>> speeds.verify(3)
        0.012
        >>> speeds.best_length(0.8), round(speeds.speedup(0.8, 4), 2)
        (4, 1.87)
    """

    target: Mapping[int, float]
    draft: float

    def verify(self, tokens: int) -> float:
        """A target forward over some tokens. Beyond the widest that was timed it grows by the last slope."""
        known = sorted(self.target)
        if tokens > known[-1] and len(known) > 1:
            low, high = known[-2:]
            slope = (self.target[high] - self.target[low]) / (high - low)
            return self.target[high] + max(0.0, slope) * (tokens - high)
        return float(np.interp(tokens, known, [self.target[n] for n in known]))

    def tokens_per_second(self, alpha: float, length: int) -> float:
        """Tokens per second with drafts of a length; of length 0, plain decoding."""
        return tokens_per_step(alpha, length) / (self.verify(length + 1) + length * self.draft)

    def speedup(self, alpha: float, length: int) -> float:
        """Tokens per second over plain decoding."""
        return self.tokens_per_second(alpha, length) / self.tokens_per_second(alpha, 0)

    def best_length(self, alpha: float) -> int:
        """The length of the most tokens per second; 0 where drafting does not pay."""
        return max(range(LONGEST_DRAFT + 1), key=lambda length: self.tokens_per_second(alpha, length))

    def needed(self, speed: float) -> float | None:
        """The least acceptance with which so many tokens per second are reached; None where even 1 is not enough."""
        best = lambda alpha: self.tokens_per_second(alpha, self.best_length(alpha))  # noqa: E731
        if best(1.0) < speed:
            return None
        low, high = 0.0, 1.0
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if best(middle) < speed else (low, middle)
        return high


def tokens_per_step(alpha: float, length: int) -> float:
    r"""Mean number of tokens that a step emits, $\tau(K) = 1 + \alpha + \ldots + \alpha^K$.

    Example:
        >>> tokens_per_step(0.5, 2), tokens_per_step(1.0, 4), tokens_per_step(0.0, 4)
        (1.75, 5.0, 1.0)
    """
    return float(sum(alpha**depth for depth in range(length + 1)))


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What a shape would be worth.

    Attributes:
        shape: The shape.
        num_parameters: Its number of parameters.
        draft_seconds: A forward over one token.
        alpha: Acceptance that was given for it.
        length: The best draft length.
        tokens_per_second: With drafts of that length.
        speedup: Over plain decoding.
        needed: The acceptance that would make it as fast as the best of all; None where even 1 is not enough.
    """

    shape: ModelShape
    num_parameters: int
    draft_seconds: float
    alpha: float
    length: int
    tokens_per_second: float
    speedup: float
    needed: float | None


def prospects(
    family: Sequence[Sized], alphas: Sequence[float], target: Mapping[int, float], drafts: Sequence[float]
) -> list[Prospect]:
    """What each shape would be worth, the fastest first.

    Args:
        alphas: Acceptance of each shape.
        target: Seconds of a target forward, by its number of tokens.
        drafts: Seconds of a forward of each shape over one token.

    Raises:
        InputError: There is not one acceptance for each shape, or one is not a probability.
    """
    if len(alphas) != len(family):
        raise InputError(f"there are {len(family)} shapes and {len(alphas)} values of alpha; give one for each shape")
    if wrong := [alpha for alpha in alphas if not 0 <= alpha <= 1]:
        raise InputError(f"alpha must be in 0..1, the share of draft tokens that is accepted, got {wrong[0]}")
    speeds = [Speeds(target=target, draft=seconds) for seconds in drafts]
    lengths = [each.best_length(alpha) for each, alpha in zip(speeds, alphas, strict=True)]
    rates = [s.tokens_per_second(a, n) for s, a, n in zip(speeds, alphas, lengths, strict=True)]
    results = [
        Prospect(
            shape=sized.shape,
            num_parameters=sized.num_parameters,
            draft_seconds=each.draft,
            alpha=alpha,
            length=length,
            tokens_per_second=rate,
            speedup=each.speedup(alpha, length),
            needed=each.needed(max(rates)),
        )
        for sized, each, alpha, length, rate in zip(family, speeds, alphas, lengths, rates, strict=True)
    ]
    return sorted(results, key=lambda each: -each.tokens_per_second)


def random_draft(
    config: PreTrainedConfig, shape: ModelShape, dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """A model of a shape with random weights, to be timed."""
    kept = torch.random.get_rng_state()
    model = AutoModelForCausalLM.from_config(config_of(config, shape), dtype=dtype)
    torch.random.set_rng_state(kept)
    return model.to(device).eval()


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model with a text in its cache, whose next forward is made again and again."""

    lm: LanguageModel
    slot: int

    @classmethod
    def of(cls, model: PreTrainedModel, context: int) -> "Trial":
        """Open a model behind a context of this many tokens. Raises InputError if it cannot be run so."""
        lm = as_lm(model, max_slots=1, max_context=context + LONGEST_DRAFT + 2)
        if not isinstance(lm, LanguageModel):
            raise InputError(
                f"{model.config.model_type} has recurrent layers, and shapes of such models are not planned"
            )
        slot = lm.open()
        lm.extend([Segment(slot=slot, tokens=torch.zeros(context, dtype=torch.long, device=lm.device), logits="none")])
        lm.commit({slot: range(context)})
        return cls(lm=lm, slot=slot)

    def forward(self, tokens: int) -> Callable[[], object]:
        """The forward over this many further tokens, which leaves the context as it is."""
        ids = torch.zeros(tokens, dtype=torch.long, device=self.lm.device)
        return self.lm.repeated([Segment(slot=self.slot, tokens=ids)])


def seconds_of(forwards: Sequence[Callable[[], object]], device: torch.device, rounds: int) -> list[float]:
    """The median time of each forward. They take turns, so that a busy moment does not hit only one of them."""
    spent: list[list[float]] = [[] for _ in forwards]
    for turn in range(rounds + 1):
        for times, forward in zip(spent, forwards, strict=True):
            _wait(device)
            began = time.perf_counter()
            forward()
            _wait(device)
            if turn:  # The first one warms up.
                times.append(time.perf_counter() - began)
    return [statistics.median(times) for times in spent]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan(
    target: PreTrainedModel,
    family: Sequence[Sized],
    alphas: Sequence[float],
    *,
    context: int = 256,
    rounds: int = 20,
) -> list[Prospect]:
    """Time the target and a random model of each shape on this machine, and say what each shape would be worth.

    Forwards run as transformers runs them (`eager`), the target's too. All models are in the target's dtype.

    Raises:
        InputError: A model cannot be run, or the acceptances do not fit.
    """
    prospects(family, alphas, {1: 1.0}, [1.0] * len(family))
    if context < 1 or rounds < 1:
        raise InputError(f"context and rounds must be >= 1, got {context} and {rounds}")
    trial = Trial.of(target, context)
    drafts = [Trial.of(random_draft(target.config, s.shape, target.dtype, target.device), context) for s in family]
    forwards = [*(trial.forward(n) for n in WIDTHS), *(draft.forward(1) for draft in drafts)]
    times = seconds_of(forwards, target.device, rounds)
    return prospects(family, alphas, dict(zip(WIDTHS, times, strict=False)), times[len(WIDTHS) :])
