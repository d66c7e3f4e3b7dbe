"""Whether an engine says what the target says: greedily token by token, and drawn by how surprising its tokens are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class TextAgreement:
    """An output beside the target's choices along the same text.

    Attributes:
        first: Index of the first token that is not the target's likeliest one; None where every token is.
        gap: By how much the target's likeliest token is ahead there, in logits; 0 where every token agrees.
    """

    first: int | None
    gap: float


@torch.inference_mode()
def agreement(target: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> TextAgreement:
    """Compare an output that was decoded at temperature 0.

    Only the first difference counts: behind it the texts are different ones.
    """
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    logits = target(ids).logits[0, len(prompt) - 1 : -1].float()
    gaps = logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    wrong = gaps.nonzero()[:, 0].tolist()
    return TextAgreement(first=wrong[0] if wrong else None, gap=float(gaps[wrong[0]]) if wrong else 0.0)


@dataclass(frozen=True, kw_only=True)
class Surprise:
    r"""How surprising drawn tokens are to the target. Sums over several outputs can be added up.

    Attributes:
        excess: Sum of $-\log p(x)$ less its expectation, the entropy.
        variance: Sum of the variance of $-\log p(x)$.
    """

    excess: float
    variance: float

    def __add__(self, other: "Surprise") -> "Surprise":
        return Surprise(excess=self.excess + other.excess, variance=self.variance + other.variance)

    @property
    def deviations(self) -> float:
        """The excess in standard deviations: around 0 where the tokens are drawn from the target's law."""
        return self.excess / math.sqrt(max(self.variance, 1e-12))


@torch.inference_mode()
def surprise(target: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float) -> Surprise:
    """How surprising an output is that was drawn at a temperature."""
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    log_probs = torch.log_softmax(target(ids).logits[0, len(prompt) - 1 : -1].double() / temperature, dim=-1)
    law, entropy = log_probs.exp(), -(log_probs.exp() * log_probs).sum(-1)
    variance = (law * log_probs.square()).sum(-1) - entropy.square()
    drawn = -log_probs.gather(1, ids[0, len(prompt) :, None])[:, 0]
    return Surprise(excess=float((drawn - entropy).sum()), variance=float(variance.sum()))
