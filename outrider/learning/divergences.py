r"""How far a drafter's rows are from the target's: the losses of distillation, by name.

$p$ is the target's row, $q$ the drafter's, and $\alpha = \sum_x \min(p(x), q(x))$ the probability that a draft token
is accepted. Every divergence is at least 0, and 0 only where $p = q$. Gradients flow to the drafter alone.
"""

import dataclasses
import math
import typing
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from outrider.core.inputs import unknown
from outrider.core.option import Bounds, CheckedOptions, option
from outrider.core.types import InputError
from outrider.learning.top_rows import TopRows

Divergence = Callable[[Float[Tensor, "n vocab"], Float[Tensor, "n vocab"]], Float[Tensor, " n"]]
"""The divergence of each row, from the target's logits and the drafter's."""
HARD = "ce"
"""The name of training on the tokens of the text, without the target's rows."""
CHUNK = 512
"""Rows whose logits are in memory at once: 300 MB for a vocabulary of 150,000."""
KEPT = 1 << 26
"""Logits of one call of `chunked` that stay until the backward, at most; more than these are computed again."""
CACHED = 1 << 18
"""Logits that fit the cache of a processor's core: 1 MB in float32."""


@dataclass(frozen=True, kw_only=True)
class ForwardKl:
    r"""$\sum p \log(p/q)$. Its gradient with respect to the drafter's logits is $q - p$."""

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        return typing.cast(Tensor, _ForwardKl.apply(target, draft))


@dataclass(frozen=True, kw_only=True)
class ReverseKl:
    r"""$\sum q \log(q/p)$, with the gradient $q (\log(q/p) - \mathrm{RKL})$. It is infinite if $p(x) = 0$ for an $x$
    with $q(x) > 0$.
    """

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        log_p, log_q = _logs(target).detach(), _logs(draft)
        return (log_q.exp() * (log_q - log_p)).sum(-1)


@dataclass(frozen=True, kw_only=True)
class JensenShannon:
    r"""$\beta \mathrm{KL}(p \| m) + (1 - \beta) \mathrm{KL}(q \| m)$ with $m = \beta p + (1 - \beta) q$.

    Divided by $\beta$ it tends to the forward KL for $\beta \to 0$; divided by $1 - \beta$ to the reverse KL for
    $\beta \to 1$. Its gradient is $q (g - \sum q g)$ with $g = (1 - \beta) \log(q/m)$.
    """

    beta: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.beta < 1:
            raise InputError(f"beta must be above 0 and below 1, got {self.beta}; use fkl or rkl at the ends")

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        log_p, log_q = _logs(target).detach(), _logs(draft)
        log_m = torch.logaddexp(log_p + math.log(self.beta), log_q + math.log(1 - self.beta))
        p = log_p.exp()
        of_target = torch.where(p > 0, p * (log_p - log_m), 0).sum(-1)
        of_draft = (log_q.exp() * (log_q - log_m)).sum(-1)
        return self.beta * of_target + (1 - self.beta) * of_draft


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    r"""$\frac12 \sum |p - q| = 1 - \alpha$: the probability that a draft token is rejected.

    Its gradient is $q (Q - 1[q < p])$ with $Q = \sum_{q < p} q$.
    """

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        return 0.5 * (_logs(target).detach().exp() - _logs(draft).exp()).abs().sum(-1)


@dataclass(frozen=True, kw_only=True)
class NegativeLogAcceptance:
    r"""$-\log \alpha$. Its gradient is that of the total variation divided by $\alpha$: where little is accepted, it
    does not vanish.
    """

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        # A sum of logarithms, so that it stays finite where p and q have nothing in common.
        return -torch.minimum(_logs(target).detach(), _logs(draft)).logsumexp(-1).clamp_max(0)


@dataclass(frozen=True, kw_only=True)
class LikelihoodKl(CheckedOptions):
    r"""$\lambda \mathrm{FKL} + (1 - \lambda) \mathrm{TVD}$ with $\lambda = e^{-c \alpha}$, which has no gradient.

    Far from the target the forward KL leads, which has a gradient everywhere; near it the total variation.

    References:
        LK losses, https://arxiv.org/abs/2602.23881
    """

    decay: float = option(3.0, least=0)

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        kl, tv = ForwardKl()(target, draft), TotalVariation()(target, draft)
        share = torch.exp(-self.decay * (1 - tv.detach()))
        return share * kl + (1 - share) * tv


@dataclass(frozen=True, kw_only=True)
class TopK:
    r"""Another divergence over the target's k likeliest tokens, with all other tokens as one more outcome.

    It is what can be computed from logits that were kept in part. It is biased: merging outcomes can only make a
    divergence smaller, and it is 0 also for rows that differ within the rest. A total variation of 0.1 may be shown
    as 0.

    Attributes:
        of: The divergence over the k + 1 outcomes.
        k: How many tokens keep their own outcome.
    """

    of: Divergence
    k: int

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        return over_top_rows(self.of, TopRows.of(target.detach(), self.k), draft)


NAMED: dict[str, type] = {
    "fkl": ForwardKl,
    "rkl": ReverseKl,
    "jsd": JensenShannon,
    "tvd": TotalVariation,
    "nla": NegativeLogAcceptance,
    "lk": LikelihoodKl,
}
"""The divergences by name."""


def divergence(name: str) -> Divergence:
    """The divergence of `name:field=value,field=value`. Every divergence also has the field `top_k`.

    Raises:
        InputError: There is no such name or field, or the value is not a number that the field allows.

    Example:
        >>> divergence("jsd:beta=0.3"), divergence("tvd:top_k=20")
        (JensenShannon(beta=0.3), TopK(of=TotalVariation(), k=20))
    """
    kind, _, rest = name.partition(":")
    if kind not in NAMED:
        raise unknown("divergence", kind, NAMED)
    known = {field.name: float for field in dataclasses.fields(NAMED[kind])} | {"top_k": int}
    values: dict[str, float] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise unknown(f"divergence {kind!r} field", key, known)
        try:
            values[key] = known[key](value)
        except ValueError:
            what = "a whole number" if known[key] is int else "a number"
            raise InputError(f"divergence {kind!r} field {key!r} must be {what}, got {value!r}") from None
    k = values.pop("top_k", None)
    inner: Divergence = NAMED[kind](**values)
    if k is None:
        return inner
    if k < 1:
        raise InputError(f"divergence {kind!r} field 'top_k' must be >= 1, got {k}")
    return TopK(of=inner, k=int(k))


def over_top_rows(of: Divergence, rows: TopRows, draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    """A divergence over the outcomes of captured rows: their tokens, and the rest as one more. Biased as `TopK` is."""
    return of(rows.outcomes, rows.grouped(draft))


def cross_entropy(tokens: Int[Tensor, " n"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    r"""$-\log q(y)$ of the tokens that stand in the text: training on hard labels, without a target."""
    return F.cross_entropy(_wide(draft), tokens, reduction="none")


RowLoss = Callable[[slice, Float[Tensor, "rows vocab"]], Float[Tensor, " rows"]]
"""The loss of some rows: which rows they are, and the drafter's logits there."""


def chunked(
    loss: RowLoss,
    hidden: Float[Tensor, "n hidden"],
    head: Callable[[Float[Tensor, "rows hidden"]], Float[Tensor, "rows vocab"]],
    *,
    chunk: int = CHUNK,
    width: int | None = None,
) -> Float[Tensor, " n"]:
    """The loss of every row, from logits that are made one chunk at a time.

    The values are those of `loss(slice(0, n), head(hidden))`.

    Args:
        loss: Of some rows, from their logits. It computes the target's logits itself, so that these come in chunks
            too. Called again it must return the same.
        hidden: The drafter's states below its output layer.
        head: Its output layer.
        chunk: Rows of a chunk.
        width: Of the logits. If the logits of all rows are few, they stay until the backward. Otherwise, and without
            it, those of a chunk are dropped after the forward and computed again, so that one chunk is in memory.
    """
    Bounds(least=1).check("chunk", chunk)

    def one(states: Float[Tensor, "rows hidden"], begin: int) -> Float[Tensor, " rows"]:
        return loss(slice(begin, begin + len(states)), head(states))

    keep = width is not None and worth_keeping(len(hidden), width)
    run = one if keep else partial(checkpoint, one, use_reentrant=False)
    parts = [typing.cast(Tensor, run(states, i * chunk)) for i, states in enumerate(hidden.split(chunk))]
    return torch.cat(parts)


def among_likeliest(tokens: Int[Tensor, " n"], logits: Float[Tensor, "n vocab"], count: int = 1) -> Bool[Tensor, " n"]:
    """Whether fewer than `count` tokens are likelier than each of these. A token without a logit is not among them.

    Example:
        >>> among_likeliest(torch.tensor([0, 1, 3]), torch.tensor([[1.0, 2.0, 2.0]]).expand(3, -1))
        tensor([False,  True, False])
    """
    width = logits.shape[-1]
    last = logits.amax(-1) if count == 1 else logits.topk(min(count, width), -1).values[:, -1]
    logit = logits.gather(-1, tokens.clamp_max(width - 1)[:, None])[:, 0]
    return (logit >= last) & (tokens < width)


def worth_keeping(rows: int, width: int) -> bool:
    """Whether the logits of so many rows are few enough to stay in memory from a forward to its backward.

    Example:
        >>> worth_keeping(1000, 8192), worth_keeping(1000, 128_000)
        (True, False)
    """
    return rows * width <= KEPT


class _ForwardKl(torch.autograd.Function):
    """The forward KL with its gradient in closed form: fewer passes over the vocabulary than autograd makes.

    On a CPU these passes run over few rows at a time, so that only logits and gradient go through memory.
    """

    @staticmethod
    def forward(ctx: Any, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The divergence of each row."""
        difference, values = torch.empty_like(draft), []
        for rows in _few_rows(draft):
            log_p, log_q = _logs(target[rows]), _logs(draft[rows])
            p = log_p.exp()
            values.append(_mean(log_p.sub_(log_q), p))
            difference[rows] = log_q.exp_().sub_(p)
        ctx.save_for_backward(difference)
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Float[Tensor, " n"]) -> tuple[None, Float[Tensor, "n vocab"]]:
        """The gradient with respect to the draft logits."""
        (difference,) = ctx.saved_tensors
        return None, difference * gradients[0][:, None].to(difference.dtype)


def _mean(values: Float[Tensor, "n vocab"], p: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
    """The mean of each row; what is impossible counts for nothing, even where its value is infinite."""
    means = torch.linalg.vecdot(p, values)
    if values.device.type == "cpu" and bool(means.isfinite().all()):
        return means
    return (p * values).masked_fill_(p == 0, 0).sum(-1)


def _few_rows(logits: Float[Tensor, "n vocab"]) -> list[slice]:
    """All rows in parts that fit the cache; on another device than a CPU, at once."""
    size = max(1, CACHED // logits.shape[-1]) if logits.device.type == "cpu" else len(logits)
    return [slice(first, first + size) for first in range(0, len(logits), size or 1)] or [slice(0, 0)]


def _wide(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    """Logits in float32; float64 stays."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _logs(logits: Float[Tensor, "n vocab"]) -> Float[Tensor, "n vocab"]:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
