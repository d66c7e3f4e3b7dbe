r"""DFlare: DFlash with a mixture of the target's layers for each of its own, and projections of the context.

Tencent 2026, https://github.com/Tencent/AngelSlim
"""

from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from outrider.heads.dflash import DFlash, Method

START = 2.0
"""The weight, before the softmax, of the tap that a layer reads most at the start of training."""


class DFlare(DFlash):
    r"""A DFlash head in which layer d reads $c_d = \mathrm{RMSNorm}_d(\sum_i \mathrm{softmax}(w_d)_i\, o_i)$.

    At the start every layer reads mostly the tap that lies as deep in the target as the layer in the head. Where
    `config.apart`, keys and values of the context have projections of their own.

    References:
        https://github.com/Tencent/AngelSlim
    """

    method: ClassVar[Method] = "dflare"

    def contexts(self, features: Float[Tensor, "*batch dim"]) -> list[Float[Tensor, "*batch hidden"]]:
        taps = features.unflatten(-1, (len(self.config.taps), -1))
        mixed = torch.einsum("...th,dt->...dh", taps, self.fusion_weights.softmax(-1))
        return [norm(mixed[..., i, :]) for i, norm in enumerate(self.fusion_norms)]

    def _fuse(self, size: int, eps: float) -> None:
        count, taps = len(self.layers), len(self.config.taps)
        start = torch.zeros(count, taps)
        start[torch.arange(count), torch.arange(count) * taps // count] = START
        self.fusion_weights = nn.Parameter(start)
        self.fusion_norms = nn.ModuleList(nn.RMSNorm(size, eps=eps) for _ in range(count))
