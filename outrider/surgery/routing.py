"""What the routers of a model do on a text: how often each expert is used, and which experts resemble each other."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider.surgery.mixture import Mixture
from outrider.surgery.texts import Progress, Texts, read


@dataclass(frozen=True, kw_only=True)
class Routing:
    r"""What one router did on a text.

    Attributes:
        num_tokens: Number of tokens of the text.
        usage: How often each expert was among the chosen ones.
        norms: For each expert, the mean over its tokens of $g_e(x)\,\lVert f_e(x)\rVert$: the gate times the norm of
            the expert's output; 0 for an expert that was never chosen, and where it was not asked for.
        correlation: Pearson's correlation of the experts' logits over all tokens; 0 with an expert whose logit never
            changes, 1 of each with itself.
    """

    num_tokens: int
    usage: Int[np.ndarray, " experts"]
    norms: Float[np.ndarray, " experts"]
    correlation: Float[np.ndarray, "experts experts"]


def watch_routing(
    model: PreTrainedModel,
    mixtures: Sequence[Mixture],
    texts: Texts,
    *,
    norms: bool = False,
    progress: Progress | None = None,
) -> list[Routing]:
    """Let the model read texts, and say what each router did.

    Only sums over tokens are kept, so the memory does not grow with the text.

    Args:
        norms: Also compute the outputs of the chosen experts, which takes about as long as the experts themselves.

    Raises:
        InputError: The texts hold no token, or one that the model does not know.
    """
    sums = [_Sums(mixture=mixture, norms=norms) for mixture in mixtures]
    hooks = [each.mixture.router.register_forward_hook(each.add) for each in sums]
    try:
        read(model, texts, progress)
    finally:
        for hook in hooks:
            hook.remove()
    return [each.routing() for each in sums]


@dataclass(kw_only=True)
class _Sums:
    """Sums over the tokens that one router has seen; they change in place."""

    mixture: Mixture
    norms: bool
    num_tokens: int = 0
    usage: Int[np.ndarray, " experts"] = field(init=False)
    outputs: Float[np.ndarray, " experts"] = field(init=False)
    logits: Float[np.ndarray, " experts"] = field(init=False)
    products: Float[np.ndarray, "experts experts"] = field(init=False)

    def __post_init__(self) -> None:
        count = self.mixture.num_experts
        self.usage = np.zeros(count, dtype=np.int64)
        self.outputs, self.logits = np.zeros(count), np.zeros(count)
        self.products = np.zeros((count, count))

    def add(self, router: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        """A forward hook of the router."""
        logits, gates, chosen = output
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])
        rows = logits.double().cpu().numpy()
        self.num_tokens += len(rows)
        self.logits += rows.sum(0)
        self.products += rows.T @ rows
        self.usage += np.bincount(chosen.flatten().cpu().numpy(), minlength=len(self.usage))
        if self.norms:
            for expert in torch.unique(chosen).tolist():
                tokens, places = torch.where(chosen == expert)
                length = self.mixture.output(expert, hidden[tokens]).double().norm(dim=-1)
                self.outputs[expert] += float((gates[tokens, places].double() * length).sum())

    def routing(self) -> Routing:
        """What the sums say."""
        means = self.logits / self.num_tokens
        covariance = self.products / self.num_tokens - np.outer(means, means)
        deviation = np.sqrt(covariance.diagonal().clip(min=0))
        scale = np.outer(deviation, deviation)
        # Differences of large sums: below this, a variance is rounding.
        constant = deviation**2 <= 1e-12 * (self.products.diagonal() / self.num_tokens + 1e-300)
        known = ~(constant[:, None] | constant[None, :])
        correlation = np.divide(covariance, scale, out=np.zeros_like(scale), where=known).clip(-1, 1)
        np.fill_diagonal(correlation, 1.0)
        return Routing(
            num_tokens=self.num_tokens,
            usage=self.usage,
            norms=self.outputs / self.usage.clip(min=1),
            correlation=correlation,
        )
