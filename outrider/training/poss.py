"""PosS: an EAGLE or EAGLE-3 head whose layer has a specialist for each part of a draft."""

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.checkpoint import read_config, read_names, read_tensors
from outrider.heads.eagle import EagleHead
from outrider.heads.eagle3 import Eagle3Head
from outrider.heads.eagle3_files import Answers, is_eagle3
from outrider.heads.poss import PossFile, is_poss, write_poss
from outrider.learning.divergences import Divergence
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import find_embedding_and_head
from outrider.lm.hf.open import logit_width
from outrider.training.eagle import Eagle, Eagle3, check_head, eagle3_head, eagle_head, freeze_embedding


class PossEagle(Eagle):
    """An EAGLE head with specialists.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2506.03566
    """

    def write(self, folder: Path) -> None:
        """Write the head and its specialists."""
        write_poss(self.head, folder, self.shape, self.dtype)


class PossEagle3(Eagle3):
    """An EAGLE-3 head with specialists.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2506.03566
    """

    def write(self, folder: Path) -> None:
        """Write the head and its specialists."""
        write_poss(self.head, folder, self.shape, self.dtype, name=str(self._target[0].name_or_path))


def poss_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    trunk: str = "eagle",
    stride: int = 1,
    unrolled: int = 6,
    decay: float = 1.0,
    regression: float = 10.0,
    noise: float = 0.0,
    bias: bool = False,
    ids: Int[Tensor, " width"] | None = None,
    taps: Sequence[int] | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    intermediate_size: int | None = None,
    begin: str | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> PossEagle | PossEagle3:
    """The learner for a new head with specialists, or for a head on disk.

    Args:
        trunk: The head whose layer is the first specialist; with `begin`, that on disk.
        stride: Draft steps of each specialist; the paper's PosS-1, PosS-2 and PosS-3.
        unrolled: Passes that are learnt. There are `unrolled // stride` specialists; the last one learns the rest.
        regression: Weight of the distance between features; for EAGLE alone.
        bias: Whether the fusion has a bias; for EAGLE alone.
        ids: The tokens that the head guesses, ascending; None: all. For EAGLE-3 alone, as `taps`.
        taps: The hidden states that it reads; None takes a low, a middle and a high one.
        fc_norm: Whether each tapped state has a norm of its own; for EAGLE-3 alone, as the next two.
        norm_output: Whether the normed output is the next feature.
        norm_before_residual: Whether the residual of the first layer is the normed feature.
        intermediate_size: Width of the feed-forward; None: the target's.
        begin: Directory or hub id of a head to train further; the sizes are its own. The layer of an EAGLE or EAGLE-3
            head is copied into every specialist.

    Raises:
        InputError: A size makes no sense, or the head on disk does not fit the target.
    """
    if trunk not in ("eagle", "eagle3"):
        raise InputError(f"trunk must be eagle or eagle3, got {trunk!r}")
    if stride < 1:
        raise InputError(f"stride must be >= 1, got {stride}")
    if unrolled < stride:
        raise InputError(
            f"the first specialist takes {stride} draft steps, so unrolled must be >= {stride}, got {unrolled}"
        )
    head = None if begin is None else _with_specialists(target, begin, stride)
    if head is None:
        if begin is not None:
            trunk = "eagle3" if is_eagle3(read_config(begin), read_names(begin)) else "eagle"
        if trunk == "eagle" and (fc_norm or norm_output or norm_before_residual):
            raise InputError("fc_norm, norm_output and norm_before_residual are for trunk eagle3")
        if trunk == "eagle":
            head = eagle_head(target, bias=bias, intermediate_size=intermediate_size, begin=begin, seed=seed)
        else:
            head = eagle3_head(
                target,
                ids=ids,
                taps=taps,
                fc_norm=fc_norm,
                norm_output=norm_output,
                norm_before_residual=norm_before_residual,
                intermediate_size=intermediate_size,
                begin=begin,
                seed=seed,
            )
        head.specialise(unrolled // stride, stride)
    if head.specialist(unrolled - 1) < len(head.specialists):
        raise InputError(
            f"{1 + len(head.specialists)} specialists of {head.stride} draft steps each do not all learn from "
            f"{unrolled} passes; unrolled must be >= {1 + head.stride * len(head.specialists)}"
        )
    placed = head.train().to(device or target.device)
    if isinstance(placed, EagleHead):
        return PossEagle(
            placed,
            target,
            loss=loss,
            num_guesses=unrolled,
            decay=decay,
            regression=regression,
            noise=noise,
            seed=seed,
        )
    return PossEagle3(
        placed,
        target,
        taps=placed.sizes.taps,
        loss=loss,
        num_guesses=unrolled,
        decay=decay,
        ids=placed.ids,
        noise=noise,
        seed=seed,
    )


def _with_specialists(target: PreTrainedModel, path: str, stride: int) -> EagleHead | Eagle3Head | None:
    """The head with specialists in a directory or at a hub id; None if it is another head."""
    config = read_config(path)
    if not is_poss(config, read_names(path)):
        return None
    anatomy, width = Anatomy.of(target), logit_width(target)
    file = PossFile.of(path, config, read_tensors(path), stride=stride)
    check_head(path, file.target_hidden_size, file.vocab_size, anatomy, width)
    head = file.head(
        find_embedding_and_head(target, anatomy), num_layers=anatomy.num_layers, vocab_size=width, answers=Answers()
    )
    freeze_embedding(head)
    return head.float()
