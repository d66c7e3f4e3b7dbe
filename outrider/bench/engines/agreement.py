"""Whether an engine says what the target says: each of its tokens beside the target's likeliest one."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """An output beside the target's choices along the same text.

    Attributes:
        first: Index of the first token that is not the target's likeliest one; None where every token is.
        gap: By how much the target's likeliest token is ahead there, in logits; 0 where every token agrees.
    """

    first: int | None
    gap: float


@torch.inference_mode()
def agreement(target: PreTrainedModel, prompt: Sequence[int], output: Sequence[int]) -> Agreement:
    """Compare an output that was decoded at temperature 0.

    Only the first difference counts: behind it the texts are different ones.
    """
    ids = torch.tensor([[*prompt, *output]], device=target.device)
    logits = target(ids).logits[0, len(prompt) - 1 : -1].float()
    gaps = logits.max(-1).values - logits.gather(1, ids[0, len(prompt) :, None])[:, 0]
    wrong = gaps.nonzero()[:, 0].tolist()
    return Agreement(first=wrong[0] if wrong else None, gap=float(gaps[wrong[0]]) if wrong else 0.0)
