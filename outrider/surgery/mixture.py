"""The expert layers of a model: which tensors hold the experts, and which module routes tokens to them.

Relied on in transformers (read in 5.17 - 5.23): a mixture is a module with a child `experts`. All experts of a layer
stand in two parameters, `gate_up_proj` [experts, 2 x neurons, width] and `down_proj` [experts, width, neurons]; an
expert computes `down_proj @ (act_fn(gate) * up)`. The router is the other child with one weight [experts, width]. It
returns the logits, the gates of the chosen experts and their numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.lm.hf.anatomy import Anatomy

_PROBED = 16


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """One expert layer.

    Attributes:
        name: Its name in the model, such as `model.layers.0.mlp`.
        router: Scores the experts for each token.
        rows: Its weight, one row for each expert.
        gate_up: The experts' gates, and below them the values that they scale.
        down: The experts' columns back to the residual stream.
        activation: The function of the gates.
    """

    name: str
    router: nn.Module
    rows: Float[Tensor, "experts width"]
    gate_up: Float[Tensor, "experts rows width"]
    down: Float[Tensor, "experts width neurons"]
    activation: Callable[[Tensor], Tensor]

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.rows)

    def output(self, expert: int, hidden: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """What one expert says to each token, before the gate."""
        gate, up = nn.functional.linear(hidden, self.gate_up[expert]).chunk(2, dim=-1)
        return nn.functional.linear(self.activation(gate) * up, self.down[expert])


def find_mixtures(model: PreTrainedModel) -> list[Mixture]:
    """The expert layers of a model, in order.

    Raises:
        InputError: The model has none, or its experts or routers work in a way unknown here.
    """
    name = Anatomy.of(model).name
    mixtures = [(place, module) for place, module in model.named_modules() if hasattr(module, "experts")]
    if not mixtures:
        raise InputError(
            f"{name} has no experts, so none can be pruned; give a mixture-of-experts model, or use `prune shape`"
        )
    return [_mixture(place, module, name) for place, module in mixtures]


def _mixture(place: str, block: nn.Module, name: str) -> Mixture:
    experts: Any = block.experts
    weights = {key: tuple(weight.shape) for key, weight in experts.named_parameters()}
    gate_up, down = weights.get("gate_up_proj", ()), weights.get("down_proj", ())
    if len(weights) != 2 or not len(gate_up) == len(down) == 3 or gate_up != (down[0], 2 * down[2], down[1]):
        seen = ", ".join([*weights][:3]) or "no weights"
        raise InputError(
            f"{name} stores experts in a way unknown here ({place}.experts has {seen}); pruning knows Mixtral- and "
            "Qwen3-MoE-style models"
        )
    routers = [module for module in block.children() if _weights(module) == {"weight": (down[0], down[1])}]
    if len(routers) != 1 or not hasattr(experts, "act_fn") or not _routes(routers[0]):
        raise InputError(
            f"{name} routes tokens to experts in a way unknown here (in {place}); pruning knows a softmax over one "
            "linear layer, of which the largest are taken"
        )
    [(_, rows)] = routers[0].named_parameters()
    return Mixture(
        name=place,
        router=routers[0],
        rows=rows,
        gate_up=experts.gate_up_proj,
        down=experts.down_proj,
        activation=experts.act_fn,
    )


def _weights(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """The shapes of all parameters and buffers of a module."""
    return {name: tuple(weight.shape) for name, weight in (*module.named_parameters(), *module.named_buffers())}


@torch.no_grad()
def _routes(router: nn.Module) -> bool:
    """Whether a router takes the largest of a softmax over one linear layer, found by trying it."""
    [(_, weight)] = router.named_parameters()
    dice = torch.Generator().manual_seed(0)
    hidden = torch.randn(_PROBED, weight.shape[1], generator=dice).to(weight)
    if weight.is_meta:
        # What it computes is known only once there are weights.
        return True
    try:
        logits, gates, chosen = router(hidden)
    except (TypeError, ValueError, RuntimeError):
        return False
    probs = nn.functional.linear(hidden, weight).float().softmax(-1)
    if chosen.shape != gates.shape or chosen.shape[:-1] != probs.shape[:-1]:
        return False
    taken = probs.gather(-1, chosen)
    least = taken.amin(-1)
    rest = probs.scatter(-1, chosen, 0).amax(-1)
    normed = taken / taken.sum(-1, keepdim=True)
    close = [torch.allclose(gates.float(), each, rtol=1e-2, atol=1e-3) for each in (taken, normed)]
    return logits.shape == probs.shape and bool((least >= rest - 1e-3).all()) and any(close)
