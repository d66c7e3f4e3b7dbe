r"""ParallelSpec: a decoder layer that guesses all tokens of a draft in one forward, at learnt mask slots (2024)."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.checkpoint import (
    KIND,
    MOST_COUNT,
    TARGET,
    TargetShape,
    made,
    nested,
    read_config,
    read_tensors,
    size,
    write_head,
)
from outrider.heads.parts.layer_config import described, layer_config
from outrider.heads.parts.layers import DecoderLayer
from outrider.heads.trunks.features import FeatureHead
from outrider.lm.head import KVCache
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

NAME = "parallel"
"""The value of the key `KIND`."""
FORMS = ("eagle", "medusa")
"""What a real position reads: the next token beside the target's state, or the state alone."""
STD = 0.02
"""Spread of new mask slots."""


class ParallelHead(FeatureHead):
    r"""With the target's normed last state $f_t$, a position $t$ of the text reads

    $u_t = W_{fc} [E(x_{t+1}); f_t]$ in the form `eagle`, and $u_t = f_t$ in the form `medusa`.

    Behind the last position $n$ stand the slots $k = 1 \ldots K$ at the positions $n + k$. Slot k reads a learnt vector
    $m_k$ in the place of $[E; f]$ or of $f$. A slot sees all of the text, the slots before it, and itself. What the
    layers return at $n$ guesses the first token behind the anchor $x_{n+1}$, and slot k guesses the one k tokens later.
    The target's output layer makes the logits.

    The token $-k$ stands for slot k. Without slots, the form `eagle` is an EAGLE head.

    Args:
        config: The sizes of its layers.
        ends: The target's ends.
        vocab_size: Width of the target's logits.
        form: What a position of the text reads.
        num_slots: $K$.

    References:
        ParallelSpec 2024. https://arxiv.org/abs/2410.05589
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        ends: EmbeddingAndHead,
        *,
        vocab_size: int,
        form: str = "eagle",
        num_slots: int = 4,
    ) -> None:
        super().__init__(config, ends, vocab_size=vocab_size, own_embedding=False)
        if form not in FORMS:
            raise InputError(f"the form of a parallel head must be eagle or medusa, got {form!r}")
        if num_slots < 0:
            raise InputError(f"a parallel head must have >= 0 mask slots, got {num_slots}")
        size = config.hidden_size
        self.form, self.num_slots = form, num_slots
        self.slots = nn.Parameter(STD * torch.randn(num_slots, 2 * size if form == "eagle" else size))
        self.fc = nn.Linear(2 * size, size, bias=False) if form == "eagle" else nn.Identity()
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, input_norm=i > 0 or form == "medusa") for i in range(config.num_hidden_layers)
        )

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        normed = self.ends.norm(states)
        return normed.to(self.slots.device, self.slots.dtype)

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        given = features
        if self.form == "eagle":
            given = torch.cat([self.embed(tokens.clamp_min(0), features), features], -1)
        if self.num_slots:
            masked = self.slots[(-1 - tokens).clamp_min(0)]
            given = torch.where(tokens[..., None] < 0, masked, given)
        hidden: Tensor = self.fc(given)
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, mask, cache)
        return hidden

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        return self.target_logits(hidden)[..., : self.vocab_size]


@dataclass(frozen=True, kw_only=True)
class ParallelFile:
    """A checkpoint of a parallel head before it is bound to a target.

    Attributes:
        layer: The sizes of its layers.
        form: What a position of the text reads.
        num_slots: Mask slots.
        tensors: Its tensors, under the names of `ParallelHead`.
    """

    path: str
    layer: PreTrainedConfig
    form: str
    num_slots: int
    tensors: Mapping[str, Tensor]

    @classmethod
    def read(cls, path: str, *, revision: str | None = None) -> "ParallelFile":
        """The checkpoint in a directory or at a hub id. Raises InputError if there is none, or it is damaged."""
        given = read_config(path, revision=revision)
        if not is_parallel(given):
            raise InputError(f"{path} holds no parallel head: its config has no {KIND} {NAME!r}")
        return cls(
            path=path,
            layer=layer_config(nested(given, "layer", path), path),
            form=str(given.get("form")),
            num_slots=size(given, "num_slots", path, least=0, most=MOST_COUNT),
            tensors=read_tensors(path, revision=revision),
        )

    def head(self, ends: EmbeddingAndHead, vocab_size: int) -> ParallelHead:
        """The head. Raises InputError if the tensors are not those of such a head."""

        def head() -> ParallelHead:
            return ParallelHead(self.layer, ends, vocab_size=vocab_size, form=self.form, num_slots=self.num_slots)

        return made(head, self.tensors, self.path)


def is_parallel(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of a parallel head."""
    return config.get(KIND) == NAME


def write_parallel(head: ParallelHead, folder: Path, target: TargetShape, dtype: torch.dtype) -> None:
    """Write a head: `slots`, `fc` of the form `eagle`, and the layers under the names of a Llama's."""
    config = {
        "architectures": ["ParallelHead"],
        KIND: NAME,
        "form": head.form,
        "num_slots": head.num_slots,
        "layer": {**described(head.config), "vocab_size": target.vocab_size},
        "torch_dtype": str(dtype).removeprefix("torch."),
        TARGET: target.record(),
    }
    write_head(folder, config, head.state_dict(), dtype)
