"""A steered draft model with random weights, for a tiny target."""

import torch

from outrider.drafters.steered import SteeredDrafter
from outrider.drafters.steering import Steering, SteeringConfig
from outrider.lm.model import LanguageModel
from outrider.lm.steered import SteeredLM
from tests.world.models import llama


def steered_drafter(
    target: LanguageModel, *, strength: float = 0.3, rank: int | None = None, num_layers: int = 1, max_slots: int = 8
) -> SteeredDrafter:
    """The target's first layers, steered by vectors of this strength; 0 is the start of training."""
    lm = SteeredLM(llama(num_layers).to(target.dtype), max_slots=max_slots)
    config = SteeringConfig(
        taps=(2, 1),
        target_layers=target.num_layers,
        target_size=target.hidden_size,
        widths=tuple(part.width for part in lm.parts),
        rank=rank,
    )
    steering = Steering(config).to(target.dtype)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        weight = steering.inject.weight
        weight.copy_(strength * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return SteeredDrafter(lm=lm, steering=steering.eval())
