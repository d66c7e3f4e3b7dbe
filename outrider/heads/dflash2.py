r"""DFlash 2: DFlash with short convolutions inside the block, and a selector that picks among the likeliest tokens of
each position by the token before it.

z-lab 2026, https://github.com/z-lab/dflash
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad

from outrider.core.inputs import InputError
from outrider.drafters.exports import Exports
from outrider.heads.dflash import LATER, DFlashHead
from outrider.heads.dspark import BlockCorrection, DSparkDrafter
from outrider.heads.parts.block_config import BlockConfig, CheckpointHints
from outrider.heads.parts.block_layouts import architecture_of, inner_of, kind_of, merged
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import (
    BlockLayer,
    BlockObjective,
    BlockOptions,
    FusedBlockHead,
    LossOfRows,
    TrainedBlocks,
)
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import MOST_COUNT, factor
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.head_inputs import HeadInputs

STD = 0.02
"""Spread of the new selector's codes of the tokens before."""


@dataclass(frozen=True, kw_only=True)
class DFlash2Options(BlockOptions):
    """Train a DFlash 2 head: DFlash with convolutions inside the block, and a selector among the likeliest tokens.

    Attributes:
        divergence: The loss of the trunk's guesses: ce learns the texts; fkl, rkl, jsd:beta=0.5, tvd, nla, lk learn the
            target's rows.
        conv_kernel_size: How many positions a convolution reads: its own, and those before it.
        conv_group_size: Entries that share a kernel; it divides the target's hidden size.
        selector_rank: Width of the selector.
        selector_top_k: How many tokens of each position it picks among.
        selector_share: Weight of the selector's loss beside that of the trunk's guesses.
    """

    divergence: str = loss("ce")
    conv_kernel_size: int = size(2, least=1)
    conv_group_size: int = size(16, least=1)
    selector_rank: int = size(256, least=1)
    selector_top_k: int = size(16, least=1)
    selector_share: float = loss(1.0, least=0)


@dataclass(frozen=True, kw_only=True)
class DFlash2Sizes:
    """What the config of a DFlash 2 head says alone.

    Attributes:
        taps: Positions that a convolution reads.
        group: Entries that share a kernel.
        rank: Width of the selector.
        top_k: How many tokens of each position it picks among.
        multiplier: Factor of the trunk's logits.
        cap: The trunk's logits are capped here by tanh, behind the factor; None: they are not.
    """

    taps: int = 2
    group: int = 16
    rank: int = 256
    top_k: int = 16
    multiplier: float = 1.0
    cap: float | None = None


class BlockConvolution(nn.Module):
    r"""A short convolution along the positions of a block whose kernel depends on the position.

    $\mathrm{out}_k = \sum_s (K_s + d_{k, s}) \cdot x_{k - s}$, with zeros before the block. $d$ is made of what the
    layer behind the convolution reads. There is one kernel before that layer (side 0) and one behind it (side 1). At
    the start it does nothing.

    Args:
        size: Entries of a state.
        extra: The sizes.
        block_size: Positions of a block.
    """

    def __init__(self, size: int, extra: DFlash2Sizes, block_size: int) -> None:
        super().__init__()
        self.extra, self.block_size = extra, block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, extra.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * extra.taps * (size // extra.group), bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Do nothing."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1
        nn.init.zeros_(self.kernel_projection.weight)

    def kernels(self, states: Float[Tensor, "rows width size"]) -> Float[Tensor, "rows width 2 taps size"]:
        """The kernels of both sides at each position, from what the layer reads."""
        kernels = self.kernel_projection(states).unflatten(-1, (2, self.extra.taps, -1))
        return self.base_kernel + kernels.repeat_interleave(self.extra.group, -1)

    def forward(
        self, states: Float[Tensor, "rows width size"], kernels: Float[Tensor, "rows width 2 taps size"], side: int
    ) -> Float[Tensor, "rows width size"]:
        """Convolve states; blocks stand one behind the other."""
        width = states.shape[1]
        places = torch.arange(width, device=states.device) % self.block_size
        convolved = kernels[:, :, side, 0] * states
        for by in range(1, self.extra.taps):
            earlier = pad(states, (0, 0, by, 0))[:, :width].where((places >= by)[:, None], 0)
            convolved = convolved + kernels[:, :, side, by] * earlier
        return convolved


class ConvolvedLayer(BlockLayer):
    """A decoder layer with a convolution before and behind its attention and its feed-forward.

    Args:
        config: The head's.
        extra: The sizes of the convolutions.
        number: Number of the layer in the cache.
    """

    def __init__(self, config: BlockConfig, extra: DFlash2Sizes, number: int) -> None:
        super().__init__(config.layers, number)
        width = config.layers.hidden_size
        self.attention_conv = BlockConvolution(width, extra, config.block_size)
        self.mlp_conv = BlockConvolution(width, extra, config.block_size)

    def forward(
        self, states: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width hidden"]:
        normed = self.input_layernorm(states)
        kernels = self.attention_conv.kernels(normed)
        mixed = self.self_attn(self.attention_conv(normed, kernels, 0), rotary, inputs)
        states = states + self.attention_conv(mixed, kernels, 1)
        normed = self.post_attention_layernorm(states)
        kernels = self.mlp_conv.kernels(normed)
        return states + self.mlp_conv(self.mlp(self.mlp_conv(normed, kernels, 0)), kernels, 1)


class CandidateSelector(nn.Module):
    r"""Scores of pairs of tokens at neighbouring positions: $\langle A[a] \cdot H h, B[b] \rangle$.

    At the start $B = 0$, and the selector changes no order.

    Args:
        num_tokens: Tokens.
        rank: Width of the codes.
        hidden_size: Width of $h$, the trunk's output feature of the position of $b$.
    """

    def __init__(self, num_tokens: int, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(STD * torch.randn(num_tokens, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(num_tokens, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def read(
        self, tokens: Int[Tensor, "*batch"], hidden: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch rank"]:
        r"""$A[a] \cdot H h$ behind tokens $a$."""
        product: Tensor = self.predecessor_codebook[tokens] * self.hidden_projection(hidden)
        return product

    def forward(
        self, base: Float[Tensor, "*batch vocab"], read: Float[Tensor, "*batch rank"], top_k: int
    ) -> Float[Tensor, "*batch vocab"]:
        """The logits of the likeliest tokens, with the scores of the pairs; the others have the logit -infinity."""
        top = base.topk(min(top_k, base.shape[-1]), -1)
        pairs = (self.successor_codebook[top.indices] @ read[..., None])[..., 0]
        return torch.full_like(base, -torch.inf).scatter(-1, top.indices, top.values + pairs.to(base.dtype))


class DFlash2Head(FusedBlockHead):
    r"""A DFlash head with convolutions in its layers. Its guess after $a$ has the logits
    $S_k(a, b) = U_k(b) + \langle A[a] \cdot H h_k, B[b] \rangle$ for the likeliest b of $U_k$, and for no others.

    At the start it is DFlash, except that only the likeliest tokens are drafted.

    References:
        https://github.com/z-lab/dflash
    """

    name: ClassVar[str] = "dflash2"
    architectures: ClassVar[Sequence[str]] = ("DFlash2DraftModel", "Qwen3DFlash2DraftModel")
    keys: ClassVar[Collection[str]] = (
        *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
        *("output_multiplier", "final_logit_softcapping"),
    )

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        self.extra: DFlash2Sizes = config.extra or DFlash2Sizes()
        width = config.layers.hidden_size
        if width % self.extra.group:
            raise InputError(f"conv_group_size must divide the hidden size {width}, got {self.extra.group}")
        if config.num_outputs is not None:
            raise InputError("DFlash 2 heads with an output layer of their own are not supported")
        super().__init__(replace(config, extra=self.extra), embedding_and_head, vocab_size)
        self.candidate_selector = CandidateSelector(config.layers.vocab_size, self.extra.rank, width)

    def layer(self, config: BlockConfig, number: int) -> BlockLayer:
        return ConvolvedLayer(config, self.extra, number)

    @classmethod
    def sizes(cls, options: DFlash2Options) -> dict[str, Any]:
        extra = DFlash2Sizes(
            taps=options.conv_kernel_size,
            group=options.conv_group_size,
            rank=options.selector_rank,
            top_k=options.selector_top_k,
        )
        return {"extra": extra}

    @classmethod
    def published(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """As of all heads. Some files have the architecture of DFlash, and a selector."""
        if super().published(config, names):
            return True
        plain = kind_of(config) is None and architecture_of(config) in DFlashHead.architectures
        return plain and any(inner_of(config).get(key) is not None for key in LATER)

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        keys = merged(config)
        capped = keys.get("final_logit_softcapping") is not None
        extra = DFlash2Sizes(
            taps=size_in(keys, "conv_kernel_size", path, most=MOST_COUNT),
            group=size_in(keys, "conv_group_size", path),
            rank=size_in(keys, "selector_rank", path),
            top_k=size_in(keys, "selector_top_k", path),
            multiplier=factor(keys, "output_multiplier", path),
            cap=factor(keys, "final_logit_softcapping", path) if capped else None,
        )
        return replace(super().read_config(config, path, hints), extra=extra)

    def written_inner(self) -> dict[str, Any]:
        extra = self.extra
        return {
            **super().written_inner(),
            "conv_kernel_size": extra.taps,
            "conv_group_size": extra.group,
            "selector_rank": extra.rank,
            "selector_top_k": extra.top_k,
            **({"output_multiplier": extra.multiplier} if extra.multiplier != 1 else {}),
            **({"final_logit_softcapping": extra.cap} if extra.cap is not None else {}),
            **({"input_embedding_scale": self.config.embedding_scale} if self.config.embedding_scale != 1 else {}),
        }

    def draw(self) -> None:
        super().draw()
        for module in self.modules():
            if isinstance(module, BlockConvolution):
                # The head begins as DFlash.
                module.reset()

    @property
    def sequential(self) -> BlockCorrection:
        """What corrects the guesses: the head itself."""
        return self

    def start(self, count: int) -> Float[Tensor, "count state"]:
        """The selector reads one token, so there is nothing to remember."""
        return self.norm.weight.new_zeros(count, 0)

    def corrected(
        self,
        base: Float[Tensor, "n width"],
        state: Float[Tensor, "n state"],
        tokens: Int[Tensor, " n"],
        hidden: Float[Tensor, "n hidden"] | None,
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n state"]]:
        """As `BlockCorrection` says."""
        if hidden is None:
            raise ValueError("a DFlash 2 head reads the trunk's output features")
        read = self.candidate_selector.read(tokens, hidden)
        return self.candidate_selector(base, read, self.extra.top_k), state

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        logits, cap = super().logits(hidden), self.extra.cap
        if self.extra.multiplier != 1:
            logits = logits * self.extra.multiplier
        return logits if cap is None else (logits / cap).tanh() * cap

    def states_given_previous(
        self, hidden: Float[Tensor, "*batch depth hidden"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        return torch.cat([hidden, self.candidate_selector.read(before, hidden).to(hidden.dtype)], -1)

    def logits_given_previous(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        return self.candidate_selector(
            self.base_logits(inner), inner[..., self.config.layers.hidden_size :], self.extra.top_k
        )

    def base_logits(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        """The trunk's logits, from what `logits_given_previous` reads."""
        return self.logits(inner[..., : self.config.layers.hidden_size])


class DFlash2Objective(BlockObjective):
    """The trunk's guesses learn as those of DFlash. Beside that, the selector learns to pick the text's token behind
    the text's own token before it, wherever that token is among the likeliest.
    """

    head: DFlash2Head
    options: DFlash2Options

    def values(
        self, batch: TrainBatch, inner: Float[Tensor, "n inner"], labels: Int[Tensor, " n"], each: LossOfRows
    ) -> Float[Tensor, " n"]:
        def selected(rows: slice, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, " rows"]:
            right = logits.float().log_softmax(-1).gather(-1, labels[rows, None])[:, 0]
            return -torch.where(right.isfinite(), right, 0.0)

        picked = self.of_rows(inner, self.head.logits_given_previous, selected)
        return self.of_rows(inner, self.head.base_logits, each) + self.options.selector_share * picked


SPEC = HeadSpec(
    name="dflash2",
    head=DFlash2Head,
    drafter=DSparkDrafter,
    published=DFlash2Head.published,
    trained=TrainedBlocks,
    options=DFlash2Options,
    objective=DFlash2Objective,
    exports=Exports(vllm="dflash", newer_runner=True, instead="dflash"),
)
