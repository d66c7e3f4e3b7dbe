"""Blockwise heads: a small feed-forward for each guessed token, and the target's output layer (Stern et al. 2018)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import relu

from outrider.core.types import InputError
from outrider.heads.state_heads import StateHeads
from outrider.lm.hf.checkpoint import (
    KIND,
    MOST_COUNT,
    TARGET,
    TargetShape,
    made,
    read_config,
    read_tensors,
    size,
    write_head,
)
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

NAME = "blockwise"
"""The value of the key `KIND`."""


@dataclass(frozen=True, kw_only=True)
class BlockwiseConfig:
    """The sizes of blockwise heads.

    Attributes:
        hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        num_heads: Number of heads; head i guesses the i-th token behind the anchor.
        intermediate_size: Width of each head between its two matrices.

    Raises:
        InputError: A number is below 1.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 5
    intermediate_size: int

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "intermediate_size"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} of blockwise heads must be >= 1, got {getattr(self, name)}")


class FeedForward(nn.Module):
    r"""$f + W_2 \mathrm{ReLU}(W_1 f + b_1) + b_2$. At the start $W_2 = 0$, so that it returns its input."""

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, inner), nn.Linear(inner, size)
        for parameter in self.down.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return hidden + self.down(relu(self.up(hidden)))


class BlockwiseHeads(StateHeads):
    """Heads of two matrices each. All share the target's output layer, which is no part of them.

    In the paper the target learns with its heads, and its own guess of the next token counts as the first head. Here
    the target stays as it is, so that its first guess needs no head.

    Args:
        config: The sizes.
        ends: The target's ends.

    References:
        Stern et al. 2018. https://arxiv.org/abs/1811.03115
    """

    def __init__(self, config: BlockwiseConfig, ends: EmbeddingAndHead) -> None:
        super().__init__(config.num_heads)
        self.config, self.ends = config, ends
        self.heads = nn.ModuleList(
            FeedForward(config.hidden_size, config.intermediate_size) for _ in range(config.num_heads)
        )

    @property
    def weight(self) -> Float[Tensor, "inner hidden"]:
        return cast(FeedForward, self.heads[0]).up.weight

    def forward(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch hidden"]:
        return cast(Tensor, self.heads[number](hidden))

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch vocab"]:
        return self.ends.logits(hidden)[..., : self.config.vocab_size]


def write_blockwise(heads: BlockwiseHeads, folder: Path, target: TargetShape, dtype: torch.dtype) -> None:
    """Write heads: their sizes as JSON, and the tensors `heads.{i}.up` and `heads.{i}.down`, weights and biases."""
    config = heads.config
    described = {
        "architectures": ["BlockwiseHeads"],
        KIND: NAME,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "intermediate_size": config.intermediate_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        TARGET: target.record(),
    }
    write_head(folder, described, heads.state_dict(), dtype)


def is_blockwise(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of blockwise heads."""
    return config.get(KIND) == NAME


def read_blockwise(path: str, ends: EmbeddingAndHead, *, revision: str | None = None) -> BlockwiseHeads:
    """The heads in a directory or at a hub id.

    Args:
        ends: The target's ends.

    Raises:
        InputError: There are none, or their files do not fit together.
    """
    given = read_config(path, revision=revision)
    if not is_blockwise(given):
        raise InputError(f"{path} holds no blockwise heads: its config has no {KIND} {NAME!r}")
    config = BlockwiseConfig(
        hidden_size=size(given, "hidden_size", path),
        vocab_size=size(given, "vocab_size", path),
        num_heads=size(given, "num_heads", path, most=MOST_COUNT),
        intermediate_size=size(given, "intermediate_size", path),
    )
    return made(lambda: BlockwiseHeads(config, ends), read_tensors(path, revision=revision), path).eval()
