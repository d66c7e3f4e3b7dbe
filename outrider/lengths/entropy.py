"""The entropy of draft rows, which AdaEDL and SVIP use to stop."""

import numpy as np
import torch
from jaxtyping import Float

from outrider.trees.protocol import Level


def entropies(level: Level) -> Float[np.ndarray, " n"]:
    """Entropy of each row in nats, by the raw draft logits at temperature 1; one copy to the host."""
    entropy: torch.Tensor = torch.special.entr(level.scores.exp()).sum(-1)
    return entropy.double().cpu().numpy()
