"""Unrolled training of heads that go on with features of their own: position j is what j real draft steps compute."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from outrider.core.types import InputError
from outrider.heads.feature_head import FeatureHead
from outrider.learning.attention import GroupKeys
from outrider.learning.batch import PADDING, Batch
from outrider.learning.divergences import CHUNK, Divergence
from outrider.learning.objective import HeadLearner

NOISE_DRAW = 31
"""What the draw of a row's noise decides, beside its seed, its step and its number."""
NOISE_LENGTH = 512
"""The length of a row whose noise has its full strength; longer rows have less."""


class Unrolled(HeadLearner):
    r"""A head that learns on its own features, as it drafts (training-time test).

    All places of a row are one step each of $J$ passes. In pass $j$ the pair of place $t$ is the token $x_{t+1+j}$ of
    the text with the feature that pass $j - 1$ output at $t$; in pass 0 it is the target's. Its query sees the
    target's features up to $t$ and the features of its own place in passes $1 \ldots j$. So pass $j$ at $t$ is what
    draft step $j$ computes behind the anchor $x_{t+1}$, if the draft tokens are those of the text.

    A specialist of a head reads the pairs of all passes before its first one with its own keys and values.

    Args:
        head: The head, in float32.
        target: The target.
        taps: The hidden states that it reads.
        loss: The divergence; None is the cross-entropy of the text's own tokens.
        num_guesses: $J$, the passes that are learnt.
        decay: Weight of each pass, as a share of the weight of the pass before it.
        ids: The tokens that the head guesses, ascending; None: all.
        detached: Whether no gradient flows from a pass to the one before it.
        noise: Strength of uniform noise on the target's features, in training alone.
        seed: Of the noise.

    References:
        Li et al. 2025, EAGLE-3. https://arxiv.org/abs/2503.01840
        Zhang et al. 2024, HASS. https://arxiv.org/abs/2408.15766
    """

    def __init__(
        self,
        head: FeatureHead,
        target: PreTrainedModel,
        *,
        taps: Sequence[int],
        loss: Divergence | None,
        num_guesses: int,
        decay: float = 1.0,
        ids: Int[Tensor, " width"] | None = None,
        detached: bool = False,
        noise: float = 0.0,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__(
            target, taps=taps, loss=loss, num_guesses=num_guesses, decay=decay, ids=ids, dtype=dtype, chunk=chunk
        )
        if noise < 0:
            raise InputError(f"noise must be >= 0, got {noise}")
        self.head = head
        self._detached, self._noise, self._seed = detached, noise, seed

    def guesses(self, batch: Batch, count: int) -> Iterator[Float[Tensor, "rows length hidden"]]:
        """What the head outputs in pass 0, 1, ..., `count - 1`."""
        length, device = batch.tokens.shape[1], batch.tokens.device
        features = self.features(batch)
        if self.training and self._noise:
            features = features + self._noises(batch).to(features)
        places, own = torch.arange(length, device=device), torch.eye(length, dtype=torch.bool, device=device)
        mask, kept = torch.ones_like(own).tril(), GroupKeys()
        reader, pairs = self.head, list[tuple[Tensor, Tensor, Tensor]]()
        for number in range(count):
            tokens = torch.nn.functional.pad(batch.tokens[:, 1 + number :], (0, min(1 + number, length)), value=PADDING)
            positions = (places + number).expand(len(tokens), -1)
            seen = mask.expand(len(tokens), 1, -1, -1)
            if number and self.head.specialist(number) != self.head.specialist(number - 1):
                reader, kept = self.head.reader(self.head.specialist(number)), GroupKeys()
                for pair in pairs:
                    reader.digest(*pair, kept)
            if self.head.specialists:
                pairs.append((tokens, features, positions))
            head_output = reader(tokens, features, positions, seen, kept)
            yield head_output
            features = self.head.next_feature(head_output.detach() if self._detached else head_output)
            mask = torch.cat([mask, own], -1)

    def features(self, batch: Batch) -> Float[Tensor, "rows length dim"]:
        """The features of pass 0, from the target's hidden states."""
        return self.head.fuse(torch.cat([batch.hidden[tap] for tap in self.taps], -1))

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """Logits of what is output; the same function in every pass."""
        return self.head.logits(hidden)

    def _noises(self, batch: Batch) -> Float[Tensor, "rows length dim"]:
        """Uniform noise, keyed by seed, step and row."""
        size = self.head.feature_size
        rows = []
        for number, length in zip(batch.rows, batch.lengths.tolist(), strict=True):
            dice = np.random.default_rng([self._seed, batch.step, number, NOISE_DRAW])
            strength = self._noise * NOISE_LENGTH / max(length, NOISE_LENGTH)
            rows.append(strength * (dice.random((batch.tokens.shape[1], size), dtype=np.float32) - 0.5))
        return torch.from_numpy(np.stack(rows))
