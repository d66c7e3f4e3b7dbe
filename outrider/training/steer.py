"""SD²: a draft model and the module that steers it by the target's hidden states learn together.

Berdoz et al. 2025, https://arxiv.org/abs/2511.09844
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.dice import Purpose, step_generator
from outrider.core.option import Bounds
from outrider.core.types import InputError
from outrider.drafters.steering import CONFIG, Steering, SteeringConfig, read_steering, usual_taps, write_steering
from outrider.learning.batch import TrainBatch
from outrider.learning.divergences import CHUNK, Divergence
from outrider.learning.learner import JudgedDrafts, Loss
from outrider.learning.target_rows import states_along
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.steered import steered, up_projections
from outrider.training.distill import Data, Distilled, distilled, guessing
from outrider.training.positions import Positions


class Steered(Distilled):
    r"""A draft model that learns to guess from the target's hidden states some tokens back.

    While drafting, the newest known states are those of the last position before the anchor, so that they are
    $1 \ldots n$ tokens old where $n$ tokens are drafted. Training draws one offset $o$ from $1 \ldots n$ per step. The
    token at $t$ is read with the vectors from the states at $t - o$, but never older than those of the prompt's last
    token. Tokens of the prompt are read without vectors, and so the first learnt token is guessed without them.

    While drafting, all tokens of a draft are read with the same vectors. In training every token has its own vectors.
    Both give the same guesses for $n = 1$. They also do in a draft model of one layer, because its keys and values do
    not depend on the vectors.

    Args:
        model: The draft model, in float32. If none of its weights requires a gradient, the steering alone learns.
        target: The target.
        steering: The module that steers, in float32.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        num_speculative_tokens: $n$, the longest draft.
        seed: Of the offsets.
        positions: Where the draft model sees the tokens in training; None: at 0, 1, 2, ...
        dtype: Of the written weights.
        tokenizer: Written beside the weights.
        chunk: Rows whose logits are in memory at once.

    Raises:
        InputError: The target or the draft model is not of the sizes that the steering has.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        target: PreTrainedModel,
        steering: Steering,
        *,
        loss: Divergence | None,
        num_speculative_tokens: int = 5,
        seed: int = 0,
        positions: Positions | None = None,
        dtype: torch.dtype | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(model, target, loss=loss, positions=positions, dtype=dtype, tokenizer=tokenizer, chunk=chunk)
        Bounds(least=1).check("num_speculative_tokens", num_speculative_tokens)
        self.steering = steering
        self._longest, self._seed = num_speculative_tokens, seed
        self._parts = tuple(up_projections(model))
        self._layers = (Anatomy.of(target).layers,)
        self.captured_taps = tuple(sorted({*steering.config.taps, self._taps}))
        sizes = _sizes(model, target)
        if (steering.config.widths, steering.config.target_layers, steering.config.target_size) != sizes:
            raise InputError(
                f"the steering was made for another pair: it is for a target with {steering.config.target_layers} "
                f"layers of width {steering.config.target_size}, and the target has {sizes[1]} of width {sizes[2]}, or "
                "the draft model differs"
            )

    def forward(self, batch: TrainBatch) -> Loss:
        """The divergence of the rows that guess learnt tokens, at an offset that is drawn for the step."""
        return super().forward(self._with_states(batch))

    def offset(self, step: int) -> int:
        """How many tokens old the states are in a step; the same in all its rows and processes."""
        dice = step_generator(Purpose.AGE, seed=self._seed, step=step)
        return int(dice.integers(1, self._longest, endpoint=True))

    def _hidden(self, batch: TrainBatch) -> Float[Tensor, "rows length hidden"]:
        at = None if self.positions is None else self.positions(batch)
        return self._steered(batch, self.offset(batch.step), at)

    def _steered(
        self, batch: TrainBatch, offset: int, at: Int[Tensor, "rows length"] | None
    ) -> Float[Tensor, "rows length hidden"]:
        """The draft model's states below its output layer, with the vectors of states that are so many tokens old."""
        taps = {tap: batch.hidden[tap].to(self.steering.gather.weight.dtype) for tap in self.steering.config.taps}
        source, reads = sources(batch.learnt, offset)
        inner = self.steering.project(self.steering.concatenate(taps))
        rows = torch.arange(len(inner), device=inner.device)[:, None]
        with steered(self._parts, self.steering.layers(inner[rows, source] * reads[..., None])):
            return self._states[0].of(batch.tokens, at)

    @torch.no_grad()
    def judged(self, batch: TrainBatch, depth: int) -> JudgedDrafts:
        """Drafts along the texts of a batch, which begin behind every learnt token.

        The i-th token of a draft is guessed with states that are i tokens old.
        """
        batch = self._with_states(batch)
        learnt = batch.learnt[:, 1:]
        if learnt.shape[1] < depth:
            empty = np.zeros((0, depth))
            return JudgedDrafts(log_ratios=empty, agrees=empty.astype(bool))
        places, labels = guessing(batch), batch.tokens[:, 1:][learnt]
        states = self._target_states(batch, places)
        ratios, agrees = [], []
        for number in range(depth):
            hidden = self._steered(batch, number + 1, None)[places]
            whole, equal = torch.zeros(learnt.shape, device=learnt.device), torch.zeros_like(learnt)
            whole[learnt], equal[learnt] = self._compared(hidden, states, labels)
            ratios.append(whole.unfold(1, depth, 1)[..., number])
            agrees.append(equal.unfold(1, depth, 1)[..., number])
        # The first draft of a request stands behind a token that the target said.
        begins = learnt.unfold(1, depth, 1).all(-1) & batch.learnt[:, : learnt.shape[1] - depth + 1]
        return JudgedDrafts(
            log_ratios=torch.stack(ratios, -1)[begins].double().cpu().numpy(),
            agrees=torch.stack(agrees, -1)[begins].cpu().numpy(),
        )

    def write(self, folder: Path) -> None:
        """Write a transformers directory with the two files of the steering."""
        super().write(folder)
        write_steering(self.steering, folder, self.dtype)

    def _with_states(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the target's states that are needed: captured ones, or those of a forward now."""
        wanted = {*self.steering.config.taps, *([self._taps] if self.divergence is not None else [])}
        captured = batch.logits_of_target is not None or batch.rows_of_target is not None
        if wanted <= batch.hidden.keys() or (captured and set(self.steering.config.taps) <= batch.hidden.keys()):
            return batch
        target = cast(PreTrainedModel, self._target[0])
        with torch.no_grad():
            hidden = states_along(target.base_model, self._layers[0], sorted(wanted), batch, packed=self._packed)
        return replace(batch, hidden=hidden)

    def pack(self) -> None:
        """Let several texts stand in one row of the target's forward."""
        # The vectors that steer the draft model are made for rows of one text each, so the target alone is packed.
        self._check_target_apart()
        self._packed = True


def sources(
    learnt: Bool[Tensor, "rows length"], offset: int
) -> tuple[Int[Tensor, "rows length"], Bool[Tensor, "rows length"]]:
    """For each token, the place whose states it is read with, and whether it is read with any.

    Args:
        learnt: Which tokens are learnt; the first of them follows the prompt.
        offset: How many tokens old the states are.

    Example:
        >>> where, reads = sources(torch.tensor([[False, False, True, True, True, True]]), 2)
        >>> where.tolist(), reads.tolist()
        ([[0, 0, 1, 1, 2, 3]], [[False, False, True, True, True, True]])
    """
    length = learnt.shape[1]
    # The first learnt token of each row; the length where none is.
    begins = torch.where(learnt.any(1), learnt.int().argmax(1), length)[:, None]
    places = torch.arange(length, device=learnt.device)[None]
    reads = places >= begins
    newest = torch.maximum(places - offset, begins - 1)
    return torch.where(reads, newest, 0), reads


def steered_learner(
    drafter: str,
    target: PreTrainedModel,
    target_tokenizer: PreTrainedTokenizerBase | None,
    *,
    loss: str,
    num_speculative_tokens: int,
    device: torch.device,
    rank: int | None = None,
    taps: Sequence[int] | None = None,
    frozen: bool = False,
    positions: str = "plain",
    seed: int = 0,
    chunk: int = CHUNK,
) -> Steered:
    """The learner for a draft model that lies in a directory or on the hub. If it is steered already, it learns on.

    Args:
        drafter: The draft model.
        loss: Name of a divergence, or `ce` for hard labels.
        rank: Rank of the steering; None: a full matrix.
        taps: The target's hidden states that steer, the highest first; None takes three.
        frozen: Whether the draft model stays as it is and the steering alone learns.
        positions: `plain`, `padding` or `gaps`.
        seed: Of the offsets and the positions.

    Raises:
        InputError: A model cannot be loaded, its tokenizer is not the target's, or a name or a size does not fit.
    """
    plain = distilled(
        drafter,
        target,
        target_tokenizer,
        loss=loss,
        data=Data.of("fixed"),
        seed=seed,
        device=device,
        positions=positions,
        chunk=chunk,
    )
    widths, layers, size = _sizes(plain.model, target)
    if (Path(drafter) / CONFIG).is_file():
        steering = read_steering(drafter).float()
        if (taps is not None and tuple(taps) != steering.config.taps) or rank not in (None, steering.config.rank):
            raise InputError(f"{drafter} is steered already, with {steering.config}; leave out rank and taps")
    else:
        chosen = usual_taps(layers) if taps is None else tuple(taps)
        torch.manual_seed(seed)
        config = SteeringConfig(taps=chosen, target_layers=layers, target_size=size, widths=widths, rank=rank)
        steering = Steering(config)
    plain.model.requires_grad_(not frozen)
    return Steered(
        plain.model,
        target,
        steering.train().to(device),
        loss=plain.divergence,
        num_speculative_tokens=num_speculative_tokens,
        seed=seed,
        positions=plain.positions,
        dtype=plain.dtype,
        tokenizer=plain.tokenizer,
        chunk=chunk,
    )


def _sizes(model: PreTrainedModel, target: PreTrainedModel) -> tuple[tuple[int, ...], int, int]:
    """The widths of the draft model's up projections, the number of the target's layers, the width of its states."""
    anatomy = Anatomy.of(target)
    return tuple(part.width for part in up_projections(model)), anatomy.num_layers, anatomy.hidden_size
