"""The rows of a pair along given texts, and the steps that drafted trees are expected to take for them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from outrider.core.sampling import to_rows
from outrider.core.texts import Before
from outrider.core.types import InputError, Sampling, ShortList
from outrider.lm.protocol import LM, Segment
from outrider.plan.tree_coverage import Chances, DraftedTree
from outrider.theory.coverage import Coverage, expected_coverage

Rows = Float[np.ndarray, "places vocab"]


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


@dataclass(frozen=True, kw_only=True)
class RecordedText:
    """A text that the target said, with both models' rows before each of its tokens.

    Attributes:
        p: Target rows.
        q: Draft rows.
        starts: A uniform draw for each place.
        ended: Whether the last token ended the text.
    """

    tokens: tuple[int, ...]
    p: Rows
    q: Rows
    starts: Float[np.ndarray, " places"]
    ended: bool = False

    @property
    def log_ratios(self) -> Float[np.ndarray, " places"]:
        r"""$\log p(y) / q(y)$ of each token; inf where the draft model rules it out."""
        at = np.arange(len(self.tokens)), np.array(self.tokens)
        with np.errstate(divide="ignore"):
            return np.log(self.p[at]) - np.log(self.q[at])

    @cached_property
    def _known(self) -> dict[object, list[Chances]]:
        return {}

    def covered(self, tree: DraftedTree, before: int) -> Coverage:
        """Expected steps that begin at one of the first `before` places, and the tokens that these emit.

        Raises:
            InputError: A step could begin so late that the text does not show what it emits.
        """
        length = len(self.tokens)
        if not self.ended and before + tree.depth > length:
            raise InputError(
                f"a text of {length} tokens does not show steps of {tree.depth} that begin before {before}"
            )
        if tree.kind not in self._known:
            places = zip(self.p, self.q, self.tokens, self.starts, strict=True)
            self._known[tree.kind] = [tree.chances(p, q, token, start) for p, q, token, start in places]
        places_ = self._known[tree.kind]
        return expected_coverage(
            [tree.survival(places_[i : i + tree.depth]) for i in range(min(before, length))], length
        )
