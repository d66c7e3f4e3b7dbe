"""GRIFFIN: an EAGLE head that learns a guess only behind draft tokens which the target might have said."""

from dataclasses import dataclass
from typing import cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.griffin import GriffinFile, GriffinHead
from outrider.learning.batch import Batch
from outrider.learning.divergences import Divergence, among_likeliest
from outrider.training.eagle import Eagle, eagle_head


@dataclass(frozen=True, kw_only=True)
class WithLikeliest:
    r"""A divergence, and $-w \sum p \log q$ over the target's k likeliest tokens.

    Attributes:
        of: The divergence.
        weight: $w$.
        k: How many tokens.
    """

    of: Divergence
    weight: float
    k: int = 10

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The sum of both for each row."""
        top = target.detach().float().softmax(-1).topk(min(self.k, target.shape[-1]), -1)
        logs = draft.float().log_softmax(-1).gather(-1, top.indices)
        return self.of(target, draft) - self.weight * (top.values * logs).sum(-1)


class Griffin(Eagle):
    r"""EAGLE-1's losses, with token alignment: guess $j$ at a place is learnt only if the text's token was among the
    head's likeliest `align_top` tokens in all guesses before it at that place.

    Args:
        head: The head, in float32.
        align_top: How many tokens count as likely.
        align_shift: 1 compares the guesses before, as the paper says; 0 compares those of the next place, which
            guess one token later, as the authors' code does.

    References:
        Hu et al. 2025. https://arxiv.org/abs/2502.11018
    """

    def __init__(
        self,
        head: GriffinHead,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        num_guesses: int = 1,
        decay: float = 1.0,
        regression: float = 10.0,
        noise: float = 0.0,
        seed: int = 0,
        align_top: int = 3,
        align_shift: int = 1,
    ) -> None:
        super().__init__(
            head,
            target,
            loss=loss,
            num_guesses=num_guesses,
            decay=decay,
            regression=regression,
            noise=noise,
            seed=seed,
        )
        if align_shift not in (0, 1):
            raise InputError(f"align_shift must be 1 (the paper) or 0 (its authors' code), got {align_shift}")
        if align_top < 1:
            raise InputError(f"align_top must be >= 1, got {align_top}")
        self._top, self._later = align_top, 1 - align_shift

    @torch.no_grad()
    def kept(
        self,
        batch: Batch,
        hidden: Float[Tensor, "rows length hidden"],
        number: int,
        before: Bool[Tensor, "rows length"] | None,
    ) -> Bool[Tensor, "rows length"] | None:
        """The places at which the draft tokens so far are likely ones."""
        asked = torch.zeros_like(batch.learnt)
        for later in range(number + 1, self.num_guesses):
            learnt = batch.learnt[:, 2 + later :]
            asked[:, : learnt.shape[1]] |= learnt
        rows, at = (asked if before is None else asked & before).nonzero(as_tuple=True)
        compared = at + self._later
        found = torch.zeros_like(asked)
        found[rows, at] = self._likely(hidden[rows, compared], batch.tokens[rows, compared + 2 + number], number)
        return found

    def _likely(self, hidden: Float[Tensor, "n hidden"], labels: Int[Tensor, " n"], number: int) -> Bool[Tensor, " n"]:
        """Whether tokens are among the head's likeliest ones."""
        found = [torch.zeros_like(labels[:0], dtype=torch.bool)]
        for states, wanted in zip(hidden.split(self.chunk), labels.split(self.chunk), strict=True):
            found.append(among_likeliest(wanted, self._narrow(self.logits(states, number)), self._top))
        return torch.cat(found)


def griffin_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    unrolled: int = 1,
    decay: float = 1.0,
    regression: float = 10.0,
    noise: float = 0.0,
    bias: bool = False,
    intermediate_size: int | None = None,
    align_top: int = 3,
    align_shift: int = 1,
    likeliest: float = 0.0,
    begin: str | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Griffin:
    """The learner for a new GRIFFIN head of a target, or for a head on disk.

    Args:
        unrolled: Passes that are learnt. The paper trains stages of 1, 2 and 3, each from the head of the one before.
        bias: Whether the fusion has a bias.
        intermediate_size: Width of both feed-forwards; None: the target's.
        align_top: As for `Griffin`.
        align_shift: As for `Griffin`.
        likeliest: Weight of the cross-entropy over the target's ten likeliest tokens; the divergence has weight 1.
        begin: Directory or hub id of a head to train further; the sizes are its own.

    Raises:
        InputError: A size makes no sense, or the head on disk does not fit the target.
    """
    if likeliest < 0:
        raise InputError(f"likeliest must be >= 0, got {likeliest}")
    head = eagle_head(target, GriffinFile, bias=bias, intermediate_size=intermediate_size, begin=begin, seed=seed)
    return Griffin(
        cast(GriffinHead, head).train().to(device or target.device),
        target,
        loss=loss if loss is None or not likeliest else WithLikeliest(of=loss, weight=likeliest),
        num_guesses=unrolled,
        decay=decay,
        regression=regression,
        noise=noise,
        seed=seed,
        align_top=align_top,
        align_shift=align_shift,
    )
