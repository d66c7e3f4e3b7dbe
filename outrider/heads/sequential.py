"""Heads that guess one token after another from one hidden state of the target, without keys and values."""

from abc import abstractmethod

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


class SequentialHead(nn.Module):
    r"""Reads the target's hidden state $f_n$, then the anchor and the draft tokens one by one.

    What was read is a vector, the state. `begin` makes it of $f_n$; `read` adds the token at depth $d = 0, 1, \ldots$,
    the anchor's first; `logits` guesses the token at depth $d + 1$.

    Attributes:
        hidden_size: Width of the target's hidden states.
        max_depth: Most tokens that it guesses.
    """

    hidden_size: int
    max_depth: int

    @property
    @abstractmethod
    def weight(self) -> Tensor:
        """A weight of each head; its device and dtype are those of all."""

    @abstractmethod
    def begin(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n state"]:
        """The state before the anchor is read."""

    @abstractmethod
    def read(self, state: Float[Tensor, "n before"], tokens: Int[Tensor, " n"], depth: int) -> Float[Tensor, "n state"]:
        """The state after one more token, all at one depth."""

    @abstractmethod
    def logits(self, state: Float[Tensor, "n state"], depth: int) -> Float[Tensor, "n vocab"]:
        """Logits of the token behind one at this depth."""


@torch.no_grad()
def randomise(module: nn.Module, seed: int) -> None:
    """Draw all weights anew, for proofs on tables."""
    dice = torch.Generator().manual_seed(seed)
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=dice, dtype=torch.float64))
