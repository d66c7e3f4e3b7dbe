r"""Domino: DFlash with a recurrent layer over the tokens drafted so far, which corrects each guess.

Domino 2026, https://arxiv.org/abs/2605.29707
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from outrider.core.inputs import InputError
from outrider.drafters.exports import Exports
from outrider.heads.dspark import BlockCorrection, DSparkDrafter
from outrider.heads.parts.block_config import BlockConfig, CheckpointHints
from outrider.heads.parts.block_layouts import merged, read_truth
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockObjective, BlockOptions, FusedBlockHead, LossOfRows, TrainedBlocks
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

WIDEST_STATE, WIDEST_INNER = 1024, 256
"""Usual widths of the recurrent layer and of the bottleneck, where the target is not narrower."""


@dataclass(frozen=True, kw_only=True)
class DominoOptions(BlockOptions):
    """Train a Domino head: DFlash with a recurrent layer over the tokens drafted so far, which corrects each guess.

    Attributes:
        divergence: The loss: ce learns the texts; fkl, rkl, jsd:beta=0.5, tvd, nla, lk learn the target's rows.
        shift_label: Let the anchor's position guess the first token. The last position of a block then guesses nothing.
        gru_hidden_dim: Width of the recurrent layer. By default 1024, or the target's width if that is smaller.
        emb_dim: Width of the bottleneck. By default 256, or the target's width if that is smaller.
        pure_draft_prefix_len: How many guesses at the beginning of a block are not corrected.
        base_steps: Steps over which the loss of the guesses before they are corrected fades out.
    """

    divergence: str = loss("ce")
    shift_label: bool = size(False)
    gru_hidden_dim: int | None = size(None, least=1)
    emb_dim: int | None = size(None, least=1)
    pure_draft_prefix_len: int = size(1, least=0)
    base_steps: int = loss(1000, least=1)


@dataclass(frozen=True, kw_only=True)
class DominoSizes:
    """What the config of a Domino head says alone.

    Attributes:
        state: Width of the recurrent layer; 0: the usual one.
        inner: Width of the bottleneck; 0: the usual one.
        pure: How many guesses at the beginning of a block are not corrected.
    """

    state: int = 0
    inner: int = 0
    pure: int = 1


class PrefixGRU(nn.Module):
    """A recurrent layer (GRU) without biases, one token at a time, under torch's names.

    Args:
        input_size: Width of what it reads.
        size: Width of its state.
    """

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size))
        for weight in self.parameters():
            nn.init.uniform_(weight, -(size**-0.5), size**-0.5)

    def forward(self, read: Float[Tensor, "n input"], state: Float[Tensor, "n size"]) -> Float[Tensor, "n size"]:
        """The state behind what is read."""
        reset, update, new = (read @ self.weight_ih_l0.T).chunk(3, -1)
        by_reset, by_update, by_new = (state @ self.weight_hh_l0.T).chunk(3, -1)
        kept = (update + by_update).sigmoid()
        candidate = (new + (reset + by_reset).sigmoid() * by_new).tanh()
        return (1 - kept) * candidate + kept * state


class DominoHead(FusedBlockHead):
    r"""A DFlash head whose guess number n has the logits $U_n + W_2\,\mathrm{SiLU}(W_1 [h_n; s_n])$.

    $s_n$ is the state of a recurrent layer that has read the embeddings of the anchor and of the draft tokens before
    the guess. The first guesses of a block are $U_n$ alone. At the start $W_2 = 0$, and the head is DFlash.

    References:
        Domino 2026. https://arxiv.org/abs/2605.29707
    """

    name: ClassVar[str] = "domino"
    architectures: ClassVar[Sequence[str]] = ("DominoDraftModel",)
    projectors: ClassVar[Collection[str]] = ("domino", "causal_v5")
    keys: ClassVar[Collection[str]] = ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label")

    def __init__(self, config: BlockConfig, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> None:
        width = config.layers.hidden_size
        extra: DominoSizes = config.extra or DominoSizes()
        state, inner = extra.state or min(width, WIDEST_STATE), extra.inner or min(width, WIDEST_INNER)
        self.extra = replace(extra, state=state, inner=inner)
        super().__init__(replace(config, extra=self.extra), embedding_and_head, vocab_size)
        outputs = config.num_outputs or config.layers.vocab_size
        self.prefix_gru = PrefixGRU(width, self.extra.state)
        self.embed_proj = nn.Sequential(
            nn.Linear(width + self.extra.state, self.extra.inner, bias=False),
            nn.SiLU(),
            nn.Linear(self.extra.inner, outputs, bias=False),
        )
        nn.init.zeros_(cast(nn.Linear, self.embed_proj[2]).weight)

    @classmethod
    def sizes(cls, options: DominoOptions) -> dict[str, Any]:
        extra = DominoSizes(
            state=options.gru_hidden_dim or 0, inner=options.emb_dim or 0, pure=options.pure_draft_prefix_len
        )
        return {"from_anchor": options.shift_label, "unused_positions": int(options.shift_label), "extra": extra}

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        keys = merged(config)
        extra = DominoSizes(
            state=size_in(keys, "gru_hidden_dim", path),
            inner=size_in(keys, "emb_dim", path),
            pure=size_in(keys, "pure_draft_prefix_len", path, least=0),
        )
        shifted = read_truth(keys, "shift_label", path)
        shifted = hints.shift_label if shifted is None else shifted
        if shifted is None:
            raise InputError(
                f"config.json of {path} does not say shift_label, and published Domino heads differ in it; ask who "
                "trained the head, and say shift_label=true (position k of a block guesses the token k + 1 behind the "
                "anchor) or shift_label=false behind the path"
            )
        sizes = super().read_config(config, path, hints)
        return replace(sizes, from_anchor=shifted, unused_positions=int(shifted), extra=extra)

    def written_inner(self) -> dict[str, Any]:
        return {
            "projector_type": self.name,
            "gru_hidden_dim": self.extra.state,
            "emb_dim": self.extra.inner,
            "pure_draft_prefix_len": self.extra.pure,
            "shift_label": self.config.from_anchor,
        }

    def draw(self) -> None:
        super().draw()
        # The head begins as DFlash.
        nn.init.zeros_(cast(nn.Linear, self.embed_proj[2]).weight)

    @property
    def sequential(self) -> BlockCorrection:
        """What corrects the guesses: the head itself."""
        return self

    def start(self, count: int) -> Float[Tensor, "count state"]:
        """The state before the anchor is read, and behind it how many tokens were read."""
        weight = self.prefix_gru.weight_hh_l0
        return torch.zeros(count, self.extra.state + 1, dtype=weight.dtype, device=weight.device)

    def corrected(
        self,
        base: Float[Tensor, "n width"],
        state: Float[Tensor, "n state"],
        tokens: Int[Tensor, " n"],
        hidden: Float[Tensor, "n hidden"] | None,
    ) -> tuple[Float[Tensor, "n width"], Float[Tensor, "n state"]]:
        """As `BlockCorrection` says."""
        if hidden is None:
            raise ValueError("a Domino head reads the trunk's output features")
        after = self._after(state, tokens)
        added = self.embed_proj[2](self._read(hidden, after))
        return base + added[:, : base.shape[1]], after

    def states_given_previous(
        self, hidden: Float[Tensor, "*batch depth hidden"], before: Int[Tensor, "*batch depth"]
    ) -> Float[Tensor, "*batch depth inner"]:
        tokens, outputs = before.flatten(0, -2), hidden.flatten(0, -3)
        state, reads = self.start(len(tokens)), []
        for depth in range(tokens.shape[1]):
            state = self._after(state, tokens[:, depth])
            reads.append(self._read(outputs[:, depth], state))
        read = torch.stack(reads, 1).unflatten(0, hidden.shape[:-2])
        return torch.cat([hidden, read.to(hidden.dtype)], -1)

    def logits_given_previous(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        logits = self.base_logits(inner)
        added = self.embed_proj[2](inner[..., self.config.layers.hidden_size :])
        width = min(logits.shape[-1], added.shape[-1])
        return logits[..., :width] + added[..., :width]

    def base_logits(self, inner: Float[Tensor, "*batch inner"]) -> Float[Tensor, "*batch vocab"]:
        """Logits of guesses that are not corrected, from what `logits_given_previous` reads."""
        return self.logits(inner[..., : self.config.layers.hidden_size])

    def _after(self, state: Float[Tensor, "n state"], tokens: Int[Tensor, " n"]) -> Float[Tensor, "n state"]:
        """The state behind one more token."""
        read = self.prefix_gru(self.embed(tokens), state[:, :-1])
        return torch.cat([read, state[:, -1:] + 1], -1)

    def _read(self, hidden: Float[Tensor, "n hidden"], state: Float[Tensor, "n state"]) -> Float[Tensor, "n inner"]:
        """What the output of the bottleneck reads; 0 where a guess is not corrected."""
        inner: Tensor = self.embed_proj[1](self.embed_proj[0](torch.cat([hidden, state[:, :-1]], -1)))
        return inner * (state[:, -1:] > self.extra.pure)


class DominoObjective(BlockObjective):
    r"""Beside the corrected guesses, those of the trunk alone learn: $(1 - \lambda) L + \lambda L_0$.

    $\lambda$ falls from 1 to 0 over the first steps.
    """

    head: DominoHead
    options: DominoOptions

    def values(
        self, batch: TrainBatch, inner: Float[Tensor, "n inner"], labels: Int[Tensor, " n"], each: LossOfRows
    ) -> Float[Tensor, " n"]:
        share = max(0.0, 1 - batch.step / self.options.base_steps)
        base = self.of_rows(inner, self.head.base_logits, each) if share else 0.0
        return (1 - share) * self.of_rows(inner, self.head.logits_given_previous, each) + share * base


SPEC = HeadSpec(
    name="domino",
    head=DominoHead,
    drafter=DSparkDrafter,
    published=DominoHead.published,
    trained=TrainedBlocks,
    options=DominoOptions,
    objective=DominoObjective,
    exports=Exports(instead="dspark"),
)
