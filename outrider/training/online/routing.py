"""Routes by clusters: each request goes to the draft model whose prompts are most like its own."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from outrider.core.inputs import InputError
from outrider.core.types import Request
from outrider.lm.protocol import LM, Readable

Embed = Callable[[Int[Tensor, " length"]], Float[Tensor, "length hidden"]]
"""A vector for each token."""


class Clusters:
    r"""Online k-means over the mean embedding of a prompt. Changes in place.

    The first prompts that differ become the centres. Afterwards a prompt belongs to the centre with the largest cosine,
    and moves it: with $n$ prompts so far, $c \leftarrow c + (x - c) / n$. The same prompts in the same order are always
    put into the same clusters.

    Args:
        embed: Vectors of tokens.
        count: Number of clusters.

    Example:
        >>> clusters = Clusters(lambda tokens: torch.eye(4)[tokens], count=2)
        >>> [clusters.cluster(prompt) for prompt in ([0, 0, 1], [2, 3], [1, 0], [3, 3])]
        [0, 1, 0, 1]

    References:
        MacQueen 1967, Some methods for classification and analysis of multivariate observations.
    """

    def __init__(self, embed: Embed, count: int) -> None:
        if count < 1:
            raise InputError(f"the number of clusters must be >= 1, got {count}")
        self._embed, self._count = embed, count
        self._centres: list[Float[Tensor, " hidden"]] = []
        self._sizes: list[int] = []

    @classmethod
    def of(cls, target: LM, count: int) -> "Clusters":
        """Clusters by the target's own input embeddings. Raises InputError if these cannot be read."""
        if not isinstance(target, Readable):
            raise InputError("this target does not show its embeddings, so prompts cannot be put into clusters")
        embedding_and_head, device = target.embedding_and_head(), target.device
        return cls(lambda tokens: embedding_and_head.embed(tokens.to(device)), count)

    def __call__(self, request: Request) -> int:
        """The cluster of a request."""
        return self.cluster(request.prompt)

    @torch.no_grad()
    def cluster(self, prompt: Sequence[int]) -> int:
        """The cluster of a prompt, which moves the cluster's centre."""
        # A sum in float64 on the host has the same roundings on each machine.
        mean = self._embed(torch.tensor(list(prompt))).double().cpu().mean(0)
        point = mean / mean.norm().clamp(min=1e-12)
        if len(self._centres) < self._count and not any(torch.allclose(point, centre) for centre in self._centres):
            self._centres.append(point)
            self._sizes.append(1)
            return len(self._centres) - 1
        cosines = [float(point @ centre / centre.norm().clamp(min=1e-12)) for centre in self._centres]
        nearest = max(range(len(cosines)), key=cosines.__getitem__)
        self._sizes[nearest] += 1
        self._centres[nearest] += (point - self._centres[nearest]) / self._sizes[nearest]
        return nearest
