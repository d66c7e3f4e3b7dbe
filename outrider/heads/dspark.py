r"""DSpark: DFlash with a small sequential head, which corrects each guess by the token before it.

DeepSeek 2026, https://arxiv.org/abs/2607.05147
"""

from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.inputs import unknown
from outrider.core.types import InputError
from outrider.heads.dflash import BlockConfig, DFlash, Method
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead


class MarkovHead(nn.Module):
    r"""Logits that depend on the token before: $W_2 e$ with $e = W_1[y]$. At the start they are 0.

    Args:
        num_tokens: Tokens that may stand before.
        num_outputs: Width of the logits.
        rank: Width of $e$.
        hidden_size: Width of the trunk's output features.
    """

    def __init__(self, num_tokens: int, num_outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(num_tokens, rank)
        self.markov_w2 = nn.Linear(rank, num_outputs, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.zeros_(self.markov_w2.weight)

    def step(
        self, state: Float[Tensor, "n rank"], tokens: Int[Tensor, " n"], hidden: Float[Tensor, "n hidden"] | None
    ) -> tuple[Float[Tensor, "n rank"], Float[Tensor, "n rank"]]:
        """Read one more token.

        Args:
            state: What was read before; `start` at the anchor.
            tokens: The token before each guess.
            hidden: The trunk's output feature of the position that guesses.

        Returns:
            The new state, and $e$.
        """
        return state, self.markov_w1(tokens)

    def start(self, count: int) -> Float[Tensor, "count rank"]:
        """The state before the anchor is read."""
        weight = self.markov_w1.weight
        return torch.zeros(count, self.rank, dtype=weight.dtype, device=weight.device)

    def along(
        self, tokens: Int[Tensor, "n depth"], hidden: Float[Tensor, "n depth hidden"]
    ) -> Float[Tensor, "n depth rank"]:
        """The $e$ of all guesses of blocks whose tokens are known."""
        state, found = self.start(len(tokens)), []
        for depth in range(tokens.shape[1]):
            state, read = self.step(state, tokens[:, depth], hidden[:, depth])
            found.append(read)
        return torch.stack(found, 1)

    def forward(self, read: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch vocab"]:
        """The logits that are added."""
        return self.markov_w2(read)


class GatedMarkovHead(MarkovHead):
    r"""The same with $e = \sigma(G [h; W_1[y]]) \cdot W_1[y]$, where $h$ is the trunk's output feature."""

    def __init__(self, num_tokens: int, num_outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__(num_tokens, num_outputs, rank, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def step(
        self, state: Float[Tensor, "n rank"], tokens: Int[Tensor, " n"], hidden: Float[Tensor, "n hidden"] | None
    ) -> tuple[Float[Tensor, "n rank"], Float[Tensor, "n rank"]]:
        read = self.markov_w1(tokens)
        return state, self.gate_proj(torch.cat([_given(hidden), read], -1)).sigmoid() * read


class RecurrentMarkovHead(MarkovHead):
    r"""The same with a state $s$ that has read all tokens since the anchor.

    $[g; c; o] = J [s; W_1[y]; h]$, then $s \leftarrow \sigma(g)\, s + (1 - \sigma(g)) \tanh c$, and $e = \tanh o$.
    """

    def __init__(self, num_tokens: int, num_outputs: int, rank: int, hidden_size: int) -> None:
        super().__init__(num_tokens, num_outputs, rank, hidden_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(
        self, state: Float[Tensor, "n rank"], tokens: Int[Tensor, " n"], hidden: Float[Tensor, "n hidden"] | None
    ) -> tuple[Float[Tensor, "n rank"], Float[Tensor, "n rank"]]:
        joint = self.joint_proj(torch.cat([state, self.markov_w1(tokens), _given(hidden)], -1))
        gate, candidate, out = joint.chunk(3, -1)
        kept = gate.sigmoid()
        return kept * state + (1 - kept) * candidate.tanh(), out.tanh()


KINDS: dict[str, type[MarkovHead]] = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}
"""The sequential heads by name."""


class ConfidenceHead(nn.Module):
    r"""The probability that a guess is accepted if all before it are: $\sigma(w [h; W_1[y]] + b)$, or
    $\sigma(w h + b)$.

    $h$ is the trunk's output feature of the position that guesses, and $y$ the token before the guess.

    Args:
        hidden_size: Width of the trunk's output features; 0: it reads none.
        rank: Width of $W_1[y]$; 0: it does not read it.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(
        self, hidden: Float[Tensor, "*batch hidden"] | None, before: Float[Tensor, "*batch rank"]
    ) -> Float[Tensor, "*batch"]:
        """The logit of that probability."""
        parts = [*([] if hidden is None else [hidden]), *([before] if self.rank else [])]
        logits: Tensor = self.proj(torch.cat(parts, -1).to(self.proj.weight.dtype))
        return logits[..., 0]


class DSpark(DFlash):
    r"""A DFlash head whose guess after $y$ has the logits $U_k + W_2 e(y)$, with $U_k$ those of the trunk.

    So a guess depends on the tokens of the block before it, and the guesses of a block have a joint law.

    References:
        DeepSeek 2026. https://arxiv.org/abs/2607.05147
    """

    method: ClassVar[Method] = "dspark"

    def __init__(self, config: BlockConfig, ends: EmbeddingAndHead, vocab_size: int) -> None:
        super().__init__(config, ends, vocab_size)
        if config.markov_rank < 1:
            raise InputError(f"markov_rank must be >= 1, got {config.markov_rank}; without it the head is dflash")
        if config.markov not in KINDS:
            raise unknown("sequential head", config.markov, KINDS)
        outputs = config.num_outputs or config.layers.vocab_size
        self.markov_head = KINDS[config.markov](
            config.layers.vocab_size, outputs, config.markov_rank, config.layers.hidden_size
        )
        self.confidence_head: ConfidenceHead | None = None
        if config.confidence is not None:
            rank = config.markov_rank if config.confidence == "markov" else 0
            self.confidence_head = ConfidenceHead(config.layers.hidden_size, rank)

    def informed(
        self, hidden: Float[Tensor, "*batch depth hidden"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        read = self.markov_head.along(before.flatten(0, -2), hidden.flatten(0, -3))
        parts = [hidden, read.unflatten(0, hidden.shape[:-2]).to(hidden.dtype)]
        if self.confidence_head is not None:
            parts.append(self.markov_head.markov_w1(before).to(hidden.dtype))
        return torch.cat(parts, -1)

    def informed_logits(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        size, rank = self.config.layers.hidden_size, self.config.markov_rank
        logits, added = self.logits(inner[..., :size]), self.markov_head(inner[..., size : size + rank])
        width = min(logits.shape[-1], added.shape[-1])
        return logits[..., :width] + added[..., :width]

    def confidence(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch"] | None:
        if self.confidence_head is None:
            return None
        size, rank = self.config.layers.hidden_size, self.config.markov_rank
        logits: Tensor = self.confidence_head(inner[..., :size], inner[..., size + rank :])
        return logits


def _given(hidden: Float[Tensor, "n hidden"] | None) -> Float[Tensor, "n hidden"]:
    if hidden is None:
        raise ValueError("this sequential head reads the trunk's output features")
    return hidden
