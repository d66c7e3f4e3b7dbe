"""EAGLE-1 and EAGLE-3: a new head of a target, or one on disk, as something to be trained."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.checkpoint import read_config, read_tensors
from outrider.heads.eagle import EagleFile, EagleHead, write_eagle
from outrider.heads.eagle3 import Eagle3Config, Eagle3Head, usual_taps
from outrider.heads.eagle3_files import Answers, Eagle3File, write_eagle3
from outrider.heads.objective import Places
from outrider.heads.parts.layer_config import usual_layer
from outrider.learning.batch import Batch
from outrider.learning.divergences import Divergence
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import find_embedding_and_head
from outrider.lm.hf.open import logit_width


class Eagle(Unrolled):
    r"""EAGLE-1. Beside the divergence it lowers the distance of each feature from the target's, a smooth L1.

    Args:
        head: The head, in float32.
        target: The target.
        regression: Weight of the distance; the divergence has the weight 1.

    References:
        Li et al. 2024. https://arxiv.org/abs/2401.15077
    """

    head: EagleHead

    def __init__(
        self,
        head: EagleHead,
        target: PreTrainedModel,
        *,
        loss: Divergence | None,
        num_guesses: int = 1,
        decay: float = 1.0,
        regression: float = 10.0,
        noise: float = 0.0,
        seed: int = 0,
    ) -> None:
        taps = (Anatomy.of(target).num_layers,)
        super().__init__(
            head,
            target,
            taps=taps,
            loss=loss,
            num_guesses=num_guesses,
            decay=decay,
            detached=True,
            noise=noise,
            seed=seed,
        )
        if regression < 0:
            raise InputError(f"regression must be >= 0, got {regression}")
        self._regression = regression

    def beside(
        self, batch: Batch, hidden: Float[Tensor, "rows length hidden"], number: int, places: Places
    ) -> Float[Tensor, ""]:
        """The weighted sum of the mean distances of all features from the target's next ones."""
        wanted = self.last_states(batch)[places.rows, places.at + 1 + number].to(hidden.dtype)
        found = self.head.next_feature(hidden[places.rows, places.at])
        distance = smooth_l1_loss(found, wanted, reduction="none").mean(-1)
        return self._regression * distance.sum()

    def write(self, folder: Path) -> None:
        """Write the head as its authors do."""
        write_eagle(self.head, folder, self.shape, self.dtype)


class Eagle3(Unrolled):
    """EAGLE-3. There is no target for its features: only its guesses are compared with the target's.

    References:
        Li et al. 2025. https://arxiv.org/abs/2503.01840
    """

    head: Eagle3Head

    def write(self, folder: Path) -> None:
        """Write the head in the layout of speculators."""
        write_eagle3(self.head, folder, self.shape, self.dtype, name=str(self._target[0].name_or_path))


def eagle_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    unrolled: int = 1,
    decay: float = 1.0,
    regression: float = 10.0,
    noise: float = 0.0,
    bias: bool = False,
    intermediate_size: int | None = None,
    begin: str | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Eagle:
    """The learner for a new EAGLE-1 head of a target, or for a head on disk.

    Args:
        unrolled: Passes that are learnt; 1 is EAGLE-1, more learn on the head's own features.
        bias: Whether the fusion has a bias. vLLM reads no checkpoint with one.
        intermediate_size: Width of the feed-forward; None: the target's.
        begin: Directory or hub id of a head to train further; the sizes are its own.

    Raises:
        InputError: A size makes no sense, or the head on disk does not fit the target.
    """
    head = eagle_head(target, bias=bias, intermediate_size=intermediate_size, begin=begin, seed=seed)
    return Eagle(
        head.train().to(device or target.device),
        target,
        loss=loss,
        num_guesses=unrolled,
        decay=decay,
        regression=regression,
        noise=noise,
        seed=seed,
    )


def eagle_head(
    target: PreTrainedModel,
    kind: type[EagleFile] = EagleFile,
    *,
    bias: bool,
    intermediate_size: int | None,
    begin: str | None,
    seed: int,
    **more: Any,
) -> EagleHead:
    """A new EAGLE-1 head of a target, or one on disk, in float32. Arguments and errors are those of `eagle_learner`.

    Args:
        kind: The files of such a head.
        **more: Sizes of a new head of that kind.
    """
    anatomy, width = Anatomy.of(target), logit_width(target)
    ends = find_embedding_and_head(target, anatomy)
    if begin is None:
        torch.manual_seed(seed)
        layer = usual_layer(anatomy, vocab_size=width, intermediate_size=intermediate_size)
        head = kind.kind(layer, ends, vocab_size=width, bias=bias, **more)
    else:
        file = kind.of(begin, read_config(begin), read_tensors(begin))
        check_head(begin, file.config.hidden_size, file.config.vocab_size, anatomy, width)
        head = file.head(ends, width).float()
    freeze_embedding(head)
    return head


def eagle3_learner(
    target: PreTrainedModel,
    *,
    loss: Divergence | None,
    unrolled: int = 7,
    decay: float = 0.8,
    ids: Int[Tensor, " width"] | None = None,
    taps: Sequence[int] | None = None,
    fc_norm: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
    intermediate_size: int | None = None,
    noise: float = 0.0,
    begin: str | None = None,
    seed: int = 0,
    device: torch.device | None = None,
) -> Eagle3:
    """The learner for a new EAGLE-3 head of a target, or for a head on disk.

    Args:
        unrolled: Passes that are learnt.
        ids: The tokens that the head guesses, ascending; None: all.
        taps: The hidden states that it reads; None takes a low, a middle and a high one.
        fc_norm: Whether each tapped state has a norm of its own.
        norm_output: Whether the normed output is the next feature.
        norm_before_residual: Whether the residual of the first layer is the normed feature.
        intermediate_size: Width of the feed-forward; None: the target's.
        begin: Directory or hub id of a head to train further; the sizes are its own.

    Raises:
        InputError: A size makes no sense, or the head on disk does not fit the target.
    """
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
    return Eagle3(
        head.train().to(device or target.device),
        target,
        taps=head.sizes.taps,
        loss=loss,
        num_guesses=unrolled,
        decay=decay,
        ids=head.ids,
        noise=noise,
        seed=seed,
    )


def eagle3_head(
    target: PreTrainedModel,
    *,
    ids: Int[Tensor, " width"] | None,
    taps: Sequence[int] | None,
    fc_norm: bool,
    norm_output: bool,
    norm_before_residual: bool,
    intermediate_size: int | None,
    begin: str | None,
    seed: int,
) -> Eagle3Head:
    """A new EAGLE-3 head, or one on disk, in float32. Arguments and errors are those of `eagle3_learner`."""
    anatomy, width = Anatomy.of(target), logit_width(target)
    ends = find_embedding_and_head(target, anatomy)
    if begin is None:
        torch.manual_seed(seed)
        config = Eagle3Config(
            layer=usual_layer(anatomy, vocab_size=width, intermediate_size=intermediate_size),
            target_hidden_size=anatomy.hidden_size,
            vocab_size=width,
            draft_vocab_size=width if ids is None else len(ids),
            taps=usual_taps(anatomy.num_layers) if taps is None else tuple(taps),
            norm_before_residual=norm_before_residual,
            fc_norm=fc_norm,
            norm_output=norm_output,
        )
        head = Eagle3Head(config, ends, ids)
        output = target.get_output_embeddings()
        head.begin_from(None if output is None else output.weight)
    else:
        file = Eagle3File.of(begin, read_config(begin), read_tensors(begin))
        check_head(begin, file.target_hidden_size, int(file.layer.vocab_size), anatomy, width)
        answers = Answers(taps=None if taps is None else tuple(taps))
        head = file.head(ends, num_layers=anatomy.num_layers, vocab_size=width, answers=answers).float()
    freeze_embedding(head)
    return head


def check_head(path: str, hidden_size: int, vocab_size: int, anatomy: Anatomy, width: int) -> None:
    """Raise InputError if a head on disk is of another target."""
    if (hidden_size, vocab_size) != (anatomy.hidden_size, width):
        raise InputError(
            f"the head in {path} is for hidden states of width {hidden_size} and {vocab_size:,} tokens, and the target "
            f"has {anatomy.hidden_size} and {width:,}"
        )


def freeze_embedding(head: EagleHead | Eagle3Head) -> None:
    """Let a head's own embedding stay as it is."""
    if head.embed_tokens is not None:
        head.embed_tokens.requires_grad_(False)
