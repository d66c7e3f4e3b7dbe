"""Merging experts: their neurons are put into one order, and then their weights are averaged."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.inputs import needs


@dataclass(frozen=True, kw_only=True)
class Expert:
    """The weights of one expert.

    Attributes:
        gate_up: The rows of the gates, and below them the rows of the values that they scale.
        down: The columns from the neurons back to the residual stream.
    """

    gate_up: Float[Tensor, "rows width"]
    down: Float[Tensor, "width neurons"]

    def permuted(self, order: Int[Tensor, " neurons"]) -> "Expert":
        """The same expert with its neurons in another order. Its outputs stay the same up to the order of sums."""
        return Expert(gate_up=torch.cat([half[order] for half in self.gate_up.chunk(2)]), down=self.down[:, order])


def alignment(anchor: Expert, other: Expert) -> Int[Tensor, " neurons"]:
    r"""The order of another expert's neurons that resembles the anchor's most.

    Neuron i of the anchor is compared with neuron j of the other by $S_{ij} = g_i \cdot g'_j + u_i \cdot u'_j + d_i
    \cdot d'_j$: its row of the gate, its row of the values, and its column back. The order is the assignment of the
    largest sum (the Hungarian method), which also is the one of the smallest distance between the weights.

    Time grows with the cube of the number of neurons, memory with its square.

    Raises:
        InputError: scipy is not installed.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError as error:
        raise needs("merging experts", "scipy", "prune") from error
    (gate, up), (gate2, up2) = anchor.gate_up.chunk(2), other.gate_up.chunk(2)
    similarity = gate @ gate2.T + up @ up2.T + anchor.down.T @ other.down
    _, order = linear_sum_assignment(similarity.cpu().numpy(), maximize=True)
    return torch.as_tensor(order, device=other.down.device)


def merged(experts: Sequence[Expert], usage: Sequence[float]) -> Expert:
    r"""The mean of experts, weighted by usage: $\sum_e u_e P_e(W_e) / \sum_e u_e$.

    The most used expert is the anchor; $P_e$ aligns the neurons of expert e with the anchor's. If none was used, all
    count alike. One expert alone is returned as it is.
    """
    if len(experts) == 1:
        return experts[0]
    shares = weights(usage)
    anchor = experts[shares.index(max(shares))]
    gate_up, down = torch.zeros_like(anchor.gate_up), torch.zeros_like(anchor.down)
    for expert, share in zip(experts, shares, strict=True):
        aligned = expert if expert is anchor else expert.permuted(alignment(anchor, expert))
        gate_up += share * aligned.gate_up
        down += share * aligned.down
    return Expert(gate_up=gate_up, down=down)


def weights(usage: Sequence[float]) -> list[float]:
    """Shares of the usage, which sum to one; equal ones if nothing was used.

    Example:
        >>> weights([3, 1]), weights([0, 0])
        ([0.75, 0.25], [0.5, 0.5])
    """
    total = sum(usage)
    return [each / total for each in usage] if total > 0 else [1 / len(usage)] * len(usage)
