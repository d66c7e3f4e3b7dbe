r"""GRIFFIN: an EAGLE head whose fusion is guided by the token, and whose layer has an output of its own for the guess.

Hu et al. 2025, https://arxiv.org/abs/2502.11018
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.heads.eagle import EagleHead, EagleObjective, EagleOptions, TrainedEagle
from outrider.heads.parts.layers import DecoderLayer, GatedMLP, norm_of
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.features import FeatureDrafter
from outrider.learning.batch import TrainBatch
from outrider.learning.divergences import Divergence, among_likeliest
from outrider.learning.options import loss
from outrider.lm.hf.checkpoint import KIND
from outrider.lm.slots.head_inputs import HeadInputs

NAME = "griffin"


@dataclass(frozen=True, kw_only=True)
class GriffinOptions(EagleOptions):
    """Train a GRIFFIN head: an EAGLE head that learns only behind draft tokens which it would have guessed.

    Attributes:
        align_top: A draft token counts as aligned if it is among this many likeliest tokens of the head.
        align_shift: Learn behind aligned tokens as the paper says (1), or one token later as its authors' code does
            (0). By default 1.
        likeliest: Weight of the cross-entropy over the target's ten likeliest tokens; the divergence has weight 1. The
            paper's later stages have 5.
    """

    align_top: int = loss(3, least=1)
    align_shift: int = loss(1, among=(0, 1))
    likeliest: float = loss(0.0, least=0)


class FusionMLP(nn.Module):
    r"""$W_{down}\,\mathrm{SiLU}(W_{up} [N(r); N(e)])$: what the token adds to a fused vector. One norm for both.

    Args:
        config: The sizes.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.input_layernorm = norm_of(config)
        self.up_proj = nn.Linear(2 * config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(
        self, fused: Float[Tensor, "*batch hidden"], embedded: Float[Tensor, "*batch hidden"]
    ) -> Float[Tensor, "*batch hidden"]:
        both = torch.cat([self.input_layernorm(fused), self.input_layernorm(embedded)], -1)
        return self.down_proj(silu(self.up_proj(both)))


class TokenGuidedFusion(nn.Module):
    r"""$r = W_{fc} [e; f]$, and then $r + \mathrm{mlp}(N(r), e)$.

    Args:
        config: The sizes.
        bias: Whether $W_{fc}$ has a bias.
    """

    def __init__(self, config: PreTrainedConfig, *, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.post_attention_layernorm = norm_of(config)
        self.mlp = FusionMLP(config)

    def forward(self, both: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch hidden"]:
        fused = self.fc(both)
        return fused + self.mlp(self.post_attention_layernorm(fused), both[..., : fused.shape[-1]])


class TokenEnhancedLayer(DecoderLayer):
    """A decoder layer with two outputs, side by side: what guesses the next token, and the next feature."""

    def __init__(self, config: PreTrainedConfig, *, qkv_bias: bool | None = None) -> None:
        super().__init__(config, 0, input_norm=False, qkv_bias=qkv_bias)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, 2 * config.hidden_size)

    def forward(
        self, hidden: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width both"]:
        hidden = hidden + self.self_attn(hidden, rotary, inputs)
        return torch.cat([hidden, hidden], -1) + self.mlp(self.post_attention_layernorm(hidden))


class GriffinHead(EagleHead):
    """An EAGLE head of one layer that outputs two vectors: the first guesses the next token, the second is the
    feature of the next pair.

    References:
        Hu et al. 2025. https://arxiv.org/abs/2502.11018
    """

    def fusion(self, bias: bool) -> nn.Module:
        return TokenGuidedFusion(self.config, bias=bias)

    def layer(self, number: int, qkv_bias: bool | None) -> DecoderLayer:
        if number:
            raise InputError(f"a GRIFFIN head has one layer, got {self.config.num_hidden_layers}")
        return TokenEnhancedLayer(self.config, qkv_bias=qkv_bias)

    def own_config(self) -> dict[str, Any]:
        return super().own_config() | {"architectures": ["GriffinHead"], KIND: NAME}

    def next_feature(self, head_output: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch hidden"]:
        return head_output[..., self.feature_size :]

    def logits(self, hidden: Float[Tensor, "*batch both"]) -> Float[Tensor, "*batch width"]:
        return super().logits(hidden[..., : self.feature_size])


@dataclass(frozen=True, kw_only=True)
class WithLikeliest:
    r"""A divergence, and $-w \sum p \log q$ over the target's k likeliest tokens.

    Attributes:
        of: The divergence.
        weight: $w$.
        k: How many tokens.
    """

    of: Divergence
    weight: float
    k: int = 10

    def __call__(self, target: Float[Tensor, "n vocab"], draft: Float[Tensor, "n vocab"]) -> Float[Tensor, " n"]:
        """The sum of both for each row."""
        top = target.detach().float().softmax(-1).topk(min(self.k, target.shape[-1]), -1)
        logs = draft.float().log_softmax(-1).gather(-1, top.indices)
        return self.of(target, draft) - self.weight * (top.values * logs).sum(-1)


class GriffinObjective(EagleObjective):
    r"""EAGLE-1's losses, with token alignment: guess $j$ at a place is learnt only if the text's token was among the
    head's likeliest `align_top` tokens in all guesses before it at that place.

    References:
        Hu et al. 2025. https://arxiv.org/abs/2502.11018
    """

    options: GriffinOptions

    @cached_property
    def divergence(self) -> Divergence | None:
        inner, weight = super().divergence, self.options.likeliest
        return inner if inner is None or not weight else WithLikeliest(of=inner, weight=weight)

    @torch.no_grad()
    def kept(
        self,
        batch: TrainBatch,
        hidden: Float[Tensor, "rows length hidden"],
        number: int,
        before: Bool[Tensor, "rows length"] | None,
    ) -> Bool[Tensor, "rows length"] | None:
        """The places at which the draft tokens so far are likely ones."""
        wanted = torch.zeros_like(batch.learnt)
        for later in range(number + 1, self.num_guesses):
            learnt = batch.learnt[:, 2 + later :]
            wanted[:, : learnt.shape[1]] |= learnt
        rows, at = (wanted if before is None else wanted & before).nonzero(as_tuple=True)
        compared = at + 1 - self.options.align_shift
        likely = torch.zeros_like(wanted)
        likely[rows, at] = self._likely(hidden[rows, compared], batch.tokens[rows, compared + 2 + number], number)
        return likely

    def _likely(self, hidden: Float[Tensor, "n hidden"], labels: Int[Tensor, " n"], number: int) -> Bool[Tensor, " n"]:
        """Whether tokens are among the head's likeliest ones."""
        likely = [torch.zeros_like(labels[:0], dtype=torch.bool)]
        for states, wanted in zip(hidden.split(self.chunk), labels.split(self.chunk), strict=True):
            likely.append(among_likeliest(wanted, self._narrow(self.logits(states, number)), self.options.align_top))
        return torch.cat(likely)


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of GRIFFIN."""
    published = {"fc.fc.weight", "fc.mlp.up_proj.weight"} <= {name.removeprefix("model.") for name in names}
    return config.get(KIND) == NAME if KIND in config else published


SPEC = HeadSpec(
    name=NAME,
    head=GriffinHead,
    drafter=FeatureDrafter,
    published=published,
    trained=TrainedEagle,
    options=GriffinOptions,
    objective=GriffinObjective,
    exports=Exports(instead="eagle"),
)
