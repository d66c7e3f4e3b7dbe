"""The base of heads that each guess one depth of a draft, all from the target's last hidden state."""

from abc import abstractmethod

from jaxtyping import Float
from torch import Tensor, nn


class StateHeads(nn.Module):
    r"""Head $i = 0, 1, \ldots$ reads the target's normed last hidden state at $t$ and guesses $x_{t+2+i}$; the target
    itself has said $x_{t+1}$.

    Attributes:
        num_heads: How many heads there are.
    """

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    @property
    @abstractmethod
    def weight(self) -> Float[Tensor, "_ _"]:
        """A weight whose device and dtype are those of all tensors."""

    @abstractmethod
    def forward(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch hidden"]:
        """What a head's output layer reads."""

    @abstractmethod
    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """A head's logits, from what `forward` returns."""
