"""The rows of a pair along given texts."""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.core.types import Sampling, ShortList
from outrider.lm.protocol import LM, Segment


@torch.inference_mode()
def logits_along(
    lm: LM, prompt: Sequence[int], output: Sequence[int], few: ShortList | None = None
) -> Float[Tensor, "output vocab"]:
    """A model's logits before each token of an output, in float32 on the host.

    Args:
        few: The tokens that the model's logits are of; others get -inf. None: all.
    """
    slot = lm.open()
    try:
        told = [*prompt, *output]
        if before := len(prompt) - 1:
            lm.extend([Segment(slot=slot, tokens=torch.tensor(told[:before]).to(lm.device), logits="none")])
            lm.commit({slot: range(before)})
        logits = lm.extend([Segment(slot=slot, tokens=torch.tensor(told[before:-1]).to(lm.device))]).logits
        lm.commit({slot: []})
    finally:
        lm.release(slot)
    wide = logits if few is None else few.widened(logits, -torch.inf)
    return wide.float().cpu()


def rows_at(logits: Float[Tensor, "positions vocab"], temperature: float) -> Float[Tensor, "positions vocab"]:
    """Distributions at a temperature, in float64."""
    owners = np.zeros(len(logits), dtype=np.int64)
    return to_rows(logits.double(), owners, [Sampling(temperature=temperature)], lambda: Before.of([[0]], [[]]))


def log_ratios(
    target: LM,
    draft: LM,
    prompt: Sequence[int],
    output: Sequence[int],
    temperature: float,
    few: ShortList | None = None,
) -> Float[np.ndarray, " output"]:
    r"""$\log p(y) / q(y)$ of each token of an output of the target; inf where the draft model gives the token
    probability 0.

    Args:
        few: The tokens that the draft model proposes; None: all.
    """
    said = torch.tensor(output)[:, None]
    q = rows_at(logits_along(draft, prompt, output, few), temperature).gather(1, said)[:, 0].numpy()
    # A greedy output token is the target's argmax, even if another forward differs in the last bits.
    p = np.ones_like(q)
    if temperature > 0:
        p = rows_at(logits_along(target, prompt, output), temperature).gather(1, said)[:, 0].numpy()
    with np.errstate(divide="ignore"):
        return np.log(p) - np.log(q)
