r"""XPress: DFlash with a small refiner, which corrects each guess of a block by all tokens before it.

XPress 2026, https://arxiv.org/abs/2608.02438
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.core.inputs import InputError
from outrider.core.uploads import upload
from outrider.drafters.exports import Exports
from outrider.heads.dspark import BlockCorrection, DSparkDrafter
from outrider.heads.parts.block_config import BlockConfig, CheckpointHints
from outrider.heads.parts.block_layouts import merged
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockObjective, BlockOptions, FusedBlockHead, LossOfRows, TrainedBlocks
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

WIDEST = 256
"""Usual width of the refiner, where the target is not narrower."""
STD = 0.02
"""Spread of the new refiner's embedding."""
OURS, AUTHORS = "refiner_head.", "xpress_head."
"""What the names of the refiner's tensors begin with, here and in `speculators`, and in the authors' files."""
OF_AUTHORS = {
    "w1.weight": "token_embed.weight",
    "mix.L": "mix_l",
    "mlp.gate_proj.weight": "mlp_gate.weight",
    "mlp.up_proj.weight": "mlp_up.weight",
    "mlp.down_proj.weight": "mlp_down.weight",
    "w2.weight": "readout.weight",
}
"""Names of tensors in the authors' files that differ, and ours."""


@dataclass(frozen=True, kw_only=True)
class XPressOptions(BlockOptions):
    """Train an XPress head: DFlash with a small refiner that corrects each guess by all tokens before it.

    Attributes:
        divergence: The loss: tvd, fkl, rkl, jsd:beta=0.5, nla, lk learn the target's rows; ce learns the texts.
        hard: Share of the cross-entropy of the text's own tokens beside the divergence.
        xpress_rank: Width of the refiner. By default 256, or the target's width if that is smaller.
        xpress_mlp_ratio: How many times wider its feed-forward is.
        base_anchor_weight: Weight of the loss of the guesses before they are corrected.
    """

    divergence: str = loss("tvd")
    hard: float = loss(0.1)
    xpress_rank: int | None = size(None, least=1)
    xpress_mlp_ratio: int = size(2, least=1)
    base_anchor_weight: float = loss(0.6, least=0)


@dataclass(frozen=True, kw_only=True)
class XPressSizes:
    """What the config of an XPress head says alone.

    Attributes:
        rank: Width of the refiner; 0: the usual one.
        ratio: How many times wider its feed-forward is.
        passes: How many Jacobi passes other engines make. Here guesses are corrected one behind the other, which is
            what such passes come to in the end.
    """

    rank: int = 0
    ratio: int = 2
    passes: int = 6


class Refiner(nn.Module):
    r"""What is added to the logits of a block's positions: $W_o (c_k + W_d(\mathrm{SiLU}(W_a c_k) \cdot W_b c_k))$.

    $c_k = x_k + \sum_{j \le k} L_{kj} \cdot x_j$ and $x_k = W_i [W_h h_k; W_g \bar h; E[y_k]]$, where $h_k$ is the
    trunk's output feature of position k, $\bar h$ the mean over the block, and $y_k$ the token before the one that
    position k guesses. At the start $W_o = 0$ and $L = 0$.

    Args:
        num_tokens: Tokens that may stand before.
        num_outputs: Width of the logits.
        hidden_size: Width of the trunk's output features.
        block_size: Positions of a block.
        extra: The sizes.
    """

    def __init__(
        self, num_tokens: int, num_outputs: int, hidden_size: int, block_size: int, extra: XPressSizes
    ) -> None:
        super().__init__()
        rank, inner = extra.rank, extra.rank * extra.ratio
        self.token_embed = nn.Embedding(num_tokens, rank)
        self.down_h = nn.Linear(hidden_size, rank, bias=False)
        self.down_g = nn.Linear(hidden_size, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix_l = nn.Parameter(torch.zeros(rank, block_size, block_size))
        self.mlp_gate = nn.Linear(rank, inner, bias=False)
        self.mlp_up = nn.Linear(rank, inner, bias=False)
        self.mlp_down = nn.Linear(inner, rank, bias=False)
        self.readout = nn.Linear(rank, num_outputs, bias=False)
        nn.init.normal_(self.token_embed.weight, std=STD)
        nn.init.zeros_(self.readout.weight)

    def around(self, hidden: Float[Tensor, "*batch block hidden"]) -> Float[Tensor, "*batch block twice"]:
        r"""$[W_h h_k; W_g \bar h]$ of the positions of blocks."""
        own, mean = self.down_h(hidden), self.down_g(hidden.mean(-2, keepdim=True))
        return torch.cat([own, mean.expand_as(own)], -1)

    def read(
        self, around: Float[Tensor, "*batch twice"], tokens: Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch rank"]:
        """$x_k$ behind tokens."""
        read: Tensor = self.in_proj(torch.cat([around, self.token_embed(tokens)], -1))
        return read

    def fed(self, mixed: Float[Tensor, "*batch rank"]) -> Float[Tensor, "*batch rank"]:
        """What the output layer reads, from $c_k$."""
        inner: Tensor = silu(self.mlp_gate(mixed)) * self.mlp_up(mixed)
        return mixed + self.mlp_down(inner)


class XPressHead(FusedBlockHead):
    r"""A DFlash head whose guess at position k has the logits $U_k + R_k(y_0, \ldots, y_k)$.

    $U_k$ are those of the trunk, and $R$ is the refiner, which reads the tokens of the block before each guess. Where
    the anchor's position guesses nothing, the refiner reads it too, with the token before the anchor; at the start of a
    text that is the anchor itself.

    So the guesses of a block have a joint law, and a token that is drawn from a row is drawn from the row that its
    verifier is given. The authors run K passes over the block at once instead, each with the likeliest tokens of the
    pass before. At temperature 0 these settle, from the front, on the same tokens.

    References:
        XPress 2026. https://arxiv.org/abs/2608.02438
    """

    name: ClassVar[str] = "xpress"
    architectures: ClassVar[Sequence[str]] = ("Qwen3XPressModel", "Qwen3XPressForCausalLM", "XPressDraftModel")
    speculators: ClassVar[str | None] = "XPressSpeculator"
    # Other files have the selector's sizes even where they have no selector.
    keys: ClassVar[Collection[str]] = ("xpress_rank", "xpress_refinement_steps", "selector_rank", "selector_top_k")

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        width, extra = config.layers.hidden_size, config.extra or XPressSizes()
        self.extra: XPressSizes = replace(extra, rank=extra.rank or min(width, WIDEST))
        super().__init__(replace(config, extra=self.extra), embedding_and_head, vocab_size)
        outputs = config.num_outputs or config.layers.vocab_size
        self.refiner_head = Refiner(config.layers.vocab_size, outputs, width, config.block_size, self.extra)

    @classmethod
    def sizes(cls, options: XPressOptions) -> dict[str, Any]:
        return {"extra": XPressSizes(rank=options.xpress_rank or 0, ratio=options.xpress_mlp_ratio)}

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        keys = merged(config)
        if keys.get("xpress_backbone", "dflash") != "dflash" or keys.get("xpress_selector"):
            raise InputError(
                f"the head in {path} has the convolutions or the selector of DFlash 2, which are not supported of "
                f"{cls.name} heads; give one with the trunk of DFlash"
            )
        if "xpress_block_size" in keys:
            config = {**config, "block_size": keys["xpress_block_size"]}
        rank = size_in(keys, "xpress_rank", path, default=256)
        ratio = size_in(keys, "xpress_mlp_ratio", path, default=2)
        inner = size_in(keys, "xpress_mlp_hidden", path, default=rank * ratio)
        if inner % rank:
            raise InputError(
                f"xpress_mlp_hidden in config.json of {path} must be a multiple of xpress_rank, {rank}, got {inner}"
            )
        names = ("num_jacobi_passes", "xpress_num_passes", "xpress_refinement_steps")
        passes = next((size_in(keys, name, path, least=0) for name in names if keys.get(name) is not None), 6)
        extra = XPressSizes(rank=rank, ratio=inner // rank, passes=passes)
        return replace(super().read_config(config, path, hints), extra=extra)

    @classmethod
    def rename(cls, tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
        names = {AUTHORS + name: OURS + own for name, own in OF_AUTHORS.items()}
        named = super().rename(tensors, config)
        return {names.get(name, name.replace(AUTHORS, OURS)): tensor for name, tensor in named.items()}

    def written_keys(self) -> dict[str, Any]:
        extra = self.extra
        return {
            "xpress_rank": extra.rank,
            "xpress_mlp_ratio": extra.ratio,
            "num_jacobi_passes": extra.passes,
        }

    def draw(self) -> None:
        super().draw()
        # The head begins as DFlash.
        nn.init.zeros_(self.refiner_head.readout.weight)

    @property
    def sequential(self) -> BlockCorrection:
        """What corrects the guesses: the head itself."""
        return self

    def guess_features(
        self, hidden: Float[Tensor, "*batch block hidden"], before: Int[np.ndarray, "*batch"]
    ) -> Float[Tensor, "*batch block features"]:
        """Beside the trunk's output features, what the refiner reads of them, and what a position that guesses nothing
        adds to each.
        """
        refiner, first = self.refiner_head, self.config.first
        around = refiner.around(hidden)
        added = around.new_zeros(*around.shape[:-1], self.extra.rank)
        if first:
            read = refiner.read(around[..., 0, :], upload(before, hidden.device))
            added = refiner.mix_l[:, :, 0].T * read[..., None, :]
        return torch.cat([hidden, around, added.to(hidden.dtype)], -1)

    def start(self, count: int) -> Float[Tensor, "count state"]:
        """The state before the anchor is read: what was read for each guess, and behind it how many were made."""
        weight = self.refiner_head.mix_l
        size = self.config.max_depth * self.extra.rank + 1
        return torch.zeros(count, size, dtype=weight.dtype, device=weight.device)

    def corrected(
        self,
        base: Float[Tensor, "n width"],
        state: Float[Tensor, "n state"],
        tokens: Int[Tensor, " n"],
        hidden: Float[Tensor, "n features"] | None,
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n state"]]:
        """As `BlockCorrection` says."""
        if hidden is None:
            raise ValueError("an XPress head reads the trunk's output features")
        around, added = self._parts(hidden)
        read, number = self.refiner_head.read(around, tokens), state[:, -1].long()
        before = state[:, :-1].unflatten(-1, (-1, self.extra.rank))
        here = torch.arange(before.shape[1], device=number.device) == number[:, None]
        every = torch.where(here[..., None], read[:, None], before)
        mixed = read + added + torch.einsum("rnd,ndr->nr", self._mixture()[:, number], every)
        correction = self.refiner_head.readout(self.refiner_head.fed(mixed))
        after = torch.cat([every.flatten(1), state[:, -1:] + 1], -1)
        return base + correction[:, : base.shape[1]], after

    def states_given_previous(
        self, hidden: Float[Tensor, "*batch depth features"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        around, added = self._parts(hidden)
        read, depth = self.refiner_head.read(around, before), before.shape[-1]
        mixed = read + added + torch.einsum("rkd,...dr->...kr", self._mixture()[:, :depth, :depth], read)
        width = self.config.layers.hidden_size
        return torch.cat([hidden[..., :width], self.refiner_head.fed(mixed).to(hidden.dtype)], -1)

    def logits_given_previous(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        logits = self.base_logits(inner)
        added = self.refiner_head.readout(inner[..., self.config.layers.hidden_size :])
        width = min(logits.shape[-1], added.shape[-1])
        return logits[..., :width] + added[..., :width]

    def base_logits(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of guesses that are not corrected, from what `logits_given_previous` reads."""
        return self.logits(inner[..., : self.config.layers.hidden_size])

    def _mixture(self) -> Float[Tensor, "rank depth depth"]:
        """$L$ of the positions that guess, with zeros above the diagonal."""
        first, depth = self.config.first, self.config.max_depth
        return self.refiner_head.mix_l.tril()[:, first : first + depth, first : first + depth]

    def _parts(self, features: Float[Tensor, "*batch features"]) -> tuple[Tensor, Tensor]:
        """The two parts that `guess_features` puts behind the trunk's output features."""
        rank = self.extra.rank
        around, added = features[..., self.config.layers.hidden_size :].split([2 * rank, rank], -1)
        return around, added


class XPressObjective(BlockObjective):
    """Beside the corrected guesses, those of the trunk alone learn.

    The authors also train rounds in which the refiner reads the likeliest tokens of the round before, as passes do in
    their engine. Here it reads the tokens that are drafted, so such rounds are left out.
    """

    head: XPressHead
    options: XPressOptions

    def values(
        self, batch: TrainBatch, inner: Float[Tensor, "n inner"], labels: Int[Tensor, " n"], each: LossOfRows
    ) -> Float[Tensor, " n"]:
        weight = self.options.base_anchor_weight
        base = weight * self.of_rows(inner, self.head.base_logits, each) if weight else 0.0
        return self.of_rows(inner, self.head.logits_given_previous, each) + base


SPEC = HeadSpec(
    name="xpress",
    head=XPressHead,
    drafter=DSparkDrafter,
    published=XPressHead.published,
    trained=TrainedBlocks,
    options=XPressOptions,
    objective=XPressObjective,
    exports=Exports(instead="dspark"),
)
