"""The likeliest tokens of rows of logits, and the mass of all other tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.types import InputError


@dataclass(frozen=True, kw_only=True)
class TopRows:
    r"""The k likeliest tokens of each row, at temperature 1.

    The rest counts as one more outcome, so that a divergence can be taken over k + 1 outcomes. It is at most the
    divergence over the whole vocabulary.

    Attributes:
        tokens: Token ids, the likeliest first.
        log_probs: $\log p(x)$ of these tokens.
        log_rest: $\log$ of the mass of all other tokens.

    Example:
        >>> rows = TopRows.of(torch.tensor([[0.5, 0.2, 0.3]]).log(), 1)
        >>> rows.tokens.tolist(), rows.grouped(torch.zeros(1, 3)).exp()
        ([[0]], tensor([[0.3333, 0.6667]]))
    """

    tokens: Int[Tensor, "*batch k"]
    log_probs: Float[Tensor, "*batch k"]
    log_rest: Float[Tensor, "*batch"]

    @classmethod
    def of(cls, logits: Float[Tensor, "*batch vocab"], k: int) -> "TopRows":
        """The top rows of logits, in float32. Raises InputError unless 1 <= k < vocab."""
        if not 1 <= k < logits.shape[-1]:
            raise InputError(f"the number of likeliest tokens must be in 1..{logits.shape[-1] - 1}, got {k}")
        log_probs = logits.float().log_softmax(-1)
        top = log_probs.topk(k, dim=-1)
        log_rest = log_probs.scatter(-1, top.indices, -torch.inf).logsumexp(-1)
        return cls(tokens=top.indices, log_probs=top.values, log_rest=log_rest)

    @property
    def outcomes(self) -> Float[Tensor, "*batch outcomes"]:
        """Log-probabilities of the k tokens and, last, of the rest."""
        return torch.cat([self.log_probs, self.log_rest[..., None]], -1)

    def grouped(self, logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch outcomes"]:
        """Log-probabilities that other logits give to the same outcomes. Gradients flow to the logits."""
        log_probs = logits.float().log_softmax(-1)
        log_rest = log_probs.scatter(-1, self.tokens, -torch.inf).logsumexp(-1)
        return torch.cat([log_probs.gather(-1, self.tokens), log_rest[..., None]], -1)

    def __getitem__(self, where: slice | tuple[slice, ...]) -> "TopRows":
        """Some of the rows, by slices of the batch axes."""
        return TopRows(tokens=self.tokens[where], log_probs=self.log_probs[where], log_rest=self.log_rest[where])
