"""Heads with random weights: a toy that goes on with features of its own, a toy that guesses whole blocks, and tiny
ones of the catalog.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, Qwen3Config

from outrider.drafters.block import BlockDrafter
from outrider.drafters.dflash import DFlareDrafter, DFlashDrafter
from outrider.drafters.dspark import DSparkDrafter
from outrider.drafters.own_features import OwnFeatures
from outrider.drafters.protocol import Surroundings
from outrider.heads.blocks import HEADS
from outrider.heads.dflash import BlockConfig, DFlash, Sight
from outrider.heads.layers import Attention, GatedMLP, Rotary
from outrider.lm.head import HeadLM


class ToyModule(nn.Module):
    """One decoder layer over a token's embedding beside a feature; with `masked`, tokens without features too."""

    def __init__(self, around: Surroundings, *, masked: bool = False) -> None:
        super().__init__()
        size = around.hidden_size
        config = LlamaConfig(
            hidden_size=size, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=around.max_context
        )
        self.feature_size, self.vocab_size, self.masked, self.ends = size, around.vocab_size, masked, around.ends()
        self.fc = nn.Linear(2 * size, size)
        self.unknown = nn.Parameter(torch.randn(size))
        self.rotary, self.attention, self.mlp = Rotary(config), Attention(config, 0), GatedMLP(size, 2 * size)

    def forward(self, tokens, features, positions, mask, cache):
        if features is None:
            features = self.unknown.expand(*tokens.shape, -1)
        elif self.masked:
            # What is kept of a position is made of its feature alone.
            tokens = torch.zeros_like(tokens)
        states = self.fc(torch.cat([self.ends.embed(tokens).to(features), features], -1))
        states = states + self.attention(states, self.rotary(states, positions), mask, cache)
        return states + self.mlp(states)

    def logits(self, hidden):
        return self.ends.head(self.ends.norm(hidden))


@dataclass(frozen=True, kw_only=True)
class ToyOwnFeatures(OwnFeatures):
    """Goes on with features of its own."""

    @property
    def taps(self):
        return (1,)


@dataclass(frozen=True, kw_only=True)
class ToyBlock(BlockDrafter):
    """Guesses whole blocks."""

    @property
    def taps(self):
        return (2,)

    def features(self, taps):
        return taps[2]


def toy(kind: str, around: Surroundings, *, compile: bool = False, **more: object) -> OwnFeatures | BlockDrafter:
    """A toy drafter, `own features` or `block`, whose random weights are always the same."""
    if kind in BLOCKS:
        return block_drafter(kind, around)
    torch.manual_seed(5)
    module = ToyModule(around, masked=kind == "block").to(around.device, around.dtype)
    lm = HeadLM(module, max_slots=around.max_slots, max_context=around.max_context, compile=compile)
    if kind == "block":
        return ToyBlock(lm=lm, block_size=4, mask_id=0, **more)
    return ToyOwnFeatures(lm=lm, **more)


BLOCKS: dict[str, type[DFlashDrafter]] = {"dflash": DFlashDrafter, "dflare": DFlareDrafter, "dspark": DSparkDrafter}
"""The drafters of the catalog that guess blocks."""


def block_head(
    kind: str,
    around: Surroundings,
    *,
    block_size: int = 4,
    markov: str = "rnn",
    from_anchor: bool | None = None,
    windows: bool = False,
    taps: tuple[int, ...] = (1, 2),
    seed: int = 5,
) -> DFlash:
    """A tiny head that guesses blocks; its random weights are always the same."""
    size = around.hidden_size
    layers = Qwen3Config(
        vocab_size=around.ends().embed.weight.shape[0],
        hidden_size=size,
        intermediate_size=size + 16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size // 4,
        max_position_embeddings=around.max_context,
    )
    config = BlockConfig(
        method=kind,
        layers=layers,
        block_size=block_size,
        mask_id=0,
        taps=taps,
        target_size=size,
        from_anchor=kind == "dspark" if from_anchor is None else from_anchor,
        sights=(Sight(window=5, causal=True), Sight()) if windows else (),
        apart=kind == "dflare",
        markov=markov,
        markov_rank=6 if kind == "dspark" else 0,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        head = HEADS[kind](config, around.ends(), around.vocab_size)
        for weight in head.parameters():
            noise = torch.randn(weight.shape)
            weight.data.copy_(weight + 0.3 * noise if weight.dim() == 1 else 1.5 * noise / weight.shape[-1] ** 0.5)
    return head.to(around.device, around.dtype).eval()


def block_drafter(kind: str, around: Surroundings, head: DFlash | None = None, **more: object) -> DFlashDrafter:
    """A drafter with such a head."""
    head = block_head(kind, around, **more) if head is None else head
    config = head.config
    lm = HeadLM(head, max_slots=around.max_slots, max_context=around.max_context + config.block_size)
    return BLOCKS[kind](
        lm=lm,
        block_size=config.block_size,
        mask_id=config.mask_id,
        from_anchor=config.from_anchor,
        tapped=config.taps,
    )
