"""Tiny heads that guess blocks, with random weights, and drafters with them."""

import torch
from transformers import Qwen3Config

from outrider import catalog
from outrider.heads.dspark import DSparkSizes
from outrider.heads.parts.block_config import AttentionSpan, BlockConfig
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockDrafter, BlockHead
from outrider.lm.target_info import TargetInfo

BLOCKS: dict[str, HeadSpec] = {
    name: row.kind
    for name, row in catalog.rows("drafter").items()
    if issubclass(getattr(row.kind, "head", object), BlockHead)
}
"""The heads of the catalog that guess blocks."""


def block_head(
    kind: str,
    around: TargetInfo,
    *,
    block_size: int = 4,
    markov: str = "rnn",
    from_anchor: bool | None = None,
    windows: bool = False,
    taps: tuple[int, ...] = (1, 2),
    extra: object = None,
    seed: int = 5,
) -> BlockHead:
    """A tiny head that guesses blocks; its random weights are always the same."""
    size = around.hidden_size
    layers = Qwen3Config(
        vocab_size=around.embedding_and_head().embed.weight.shape[0],
        hidden_size=size,
        intermediate_size=size + 16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=size // 4,
        max_position_embeddings=around.max_context,
    )
    config = BlockConfig(
        layers=layers,
        block_size=block_size,
        mask_id=0,
        taps=taps,
        target_size=size,
        from_anchor=kind == "dspark" if from_anchor is None else from_anchor,
        sights=(AttentionSpan(window=5, causal=True), AttentionSpan()) if windows else (),
        extra=DSparkSizes(markov=markov, markov_rank=6) if kind == "dspark" else extra,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        head = BLOCKS[kind].head(config, around.embedding_and_head(), around.vocab_size)
        for weight in head.parameters():
            noise = torch.randn(weight.shape)
            weight.data.copy_(weight + 0.3 * noise if weight.dim() == 1 else 1.5 * noise / weight.shape[-1] ** 0.5)
    return head.to(around.device, around.dtype).eval()


def block_drafter(kind: str, around: TargetInfo, head: BlockHead | None = None, **more: object) -> BlockDrafter:
    """A drafter with such a head."""
    head = block_head(kind, around, **more) if head is None else head
    return BLOCKS[kind].drafter.of(head, around, BLOCKS[kind].at(""))
