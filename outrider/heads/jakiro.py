r"""Jakiro: an EAGLE head with two small experts, which also guesses one token further.

Huang et al. 2025, https://arxiv.org/abs/2502.06282
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.eagle import EagleFile, EagleHead
from outrider.heads.files import KIND
from outrider.heads.layers import DecoderLayer, GatedMLP
from outrider.lm.head import KVCache
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

MIXTURES = ("features", "gate", "half")
"""What is mixed: the experts' outputs, or their distributions by the gate's weights or by halves."""
NAME = "jakiro"
EXPERTS = ("layers.0.mlp_moe.", "layers.0.mlp.")
"""What the names of the experts and their gate begin with: in files, and in `JakiroHead`."""


class Experts(nn.Module):
    """Two experts and the four logits of their gate: for the next token and for the one behind it.

    Args:
        hidden_size: Width of what they read.
        expert_size: Width of each expert's feed-forward.
    """

    def __init__(self, hidden_size: int, expert_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, 4, bias=False)
        self.experts = nn.ModuleList(GatedMLP(hidden_size, expert_size) for _ in range(2))

    def forward(self, states: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch parts"]:
        """Both outputs and the gate's logits, side by side."""
        return torch.cat([*(expert(states) for expert in self.experts), self.gate(states)], -1)


class ExpertLayer(DecoderLayer):
    """A decoder layer with two experts in place of its feed-forward. It returns the attention's output $y$, the
    experts' outputs and the gate's logits, side by side.
    """

    def __init__(self, config: PreTrainedConfig, expert_size: int, *, qkv_bias: bool | None = None) -> None:
        super().__init__(config, 0, input_norm=False, qkv_bias=qkv_bias)
        self.mlp = Experts(config.hidden_size, expert_size)

    def forward(
        self,
        hidden: Float[Tensor, "rows width hidden"],
        rotary: Float[Tensor, "2 rows width dim"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width parts"]:
        hidden = hidden + self.self_attn(hidden, rotary, mask, cache)
        return torch.cat([hidden, self.mlp(self.post_attention_layernorm(hidden))], -1)


class JakiroHead(EagleHead):
    r"""An EAGLE head of one layer with two experts $e_0, e_1$ over the attention's output $y$.

    The next feature is their mixture, $h_1 = y + w_0 e_0 + w_1 e_1$. The contrast
    $h_2 = y + c_{hi} e_{hi} - c_{lo} e_{lo}$ guesses one token further, without a forward. The weights are softmaxes of
    two logits of the gate each.

    The next token is guessed from $h_1$; or, where distributions are mixed, with
    $q = w_0 \mathrm{softmax}(W(y + e_0)) + w_1 \mathrm{softmax}(W(y + e_1))$. The authors' own sampler over two
    experts does not keep the target's law; drawing from $q$ does.

    Args:
        config: The sizes of its layer.
        ends: The target's ends.
        vocab_size: Width of the target's logits.
        expert_size: Width of each expert's feed-forward; None: the hidden size.
        mixture: What is mixed.

    References:
        Huang et al. 2025. https://arxiv.org/abs/2502.06282
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        ends: EmbeddingAndHead,
        *,
        vocab_size: int,
        bias: bool = False,
        own_embedding: bool = False,
        qkv_bias: bool | None = None,
        expert_size: int | None = None,
        mixture: str = "features",
    ) -> None:
        if mixture not in MIXTURES:
            raise InputError(f"mixture must be one of {', '.join(MIXTURES)}, got {mixture!r}")
        self._expert_size, self.mixture = expert_size or config.hidden_size, mixture
        super().__init__(config, ends, vocab_size=vocab_size, bias=bias, own_embedding=own_embedding, qkv_bias=qkv_bias)

    def extra_repr(self) -> str:
        """The choice that no tensor shows."""
        return f"mixture={self.mixture}"

    def layer(self, number: int, qkv_bias: bool | None) -> DecoderLayer:
        if number:
            raise InputError(f"a Jakiro head has one layer, got {self.config.num_hidden_layers}")
        return ExpertLayer(self.config, self._expert_size, qkv_bias=qkv_bias)

    def record(self) -> dict[str, Any]:
        return super().record() | {"architectures": ["JakiroHead"], KIND: NAME, "mixture": self.mixture}

    def next_feature(self, head_output: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch hidden"]:
        """$h_1$."""
        attended, first, second, gate = self._parts(head_output)
        weights = gate[..., :2].softmax(-1)
        return attended + weights[..., :1] * first + weights[..., 1:] * second

    def contrast(self, head_output: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch hidden"]:
        """$h_2$."""
        attended, first, second, gate = self._parts(head_output)
        weights = gate[..., 2:].softmax(-1)
        difference = weights[..., :1] * first - weights[..., 1:] * second
        return attended + torch.where(gate[..., 2:3] >= gate[..., 3:], difference, -difference)

    def further(self, head_output: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch parts"]:
        """What guesses one token further: its next feature is $h_2$, and its logits are those of $h_2$."""
        size = self.feature_size
        return torch.cat([self.contrast(head_output), torch.zeros_like(head_output[..., size:])], -1)

    def logits(self, hidden: Float[Tensor, "*batch parts"]) -> Float[Tensor, "*batch width"]:
        if self.mixture == "features":
            return super().logits(self.next_feature(hidden))
        attended, first, second, gate = self._parts(hidden)
        wide = torch.promote_types(gate.dtype, torch.float32)
        logs = [super(JakiroHead, self).logits(attended + own).to(wide).log_softmax(-1) for own in (first, second)]
        gate = gate[..., :2] if self.mixture == "gate" else torch.zeros_like(gate[..., :2])
        weights = gate.to(wide).log_softmax(-1)
        return torch.logaddexp(logs[0] + weights[..., :1], logs[1] + weights[..., 1:])

    def _parts(self, head_output: Float[Tensor, "*batch parts"]) -> tuple[Tensor, ...]:
        """The attention's output, the experts' outputs, and the gate's logits."""
        size = self.feature_size
        return head_output.split([size, size, size, 4], -1)


@dataclass(frozen=True, kw_only=True)
class JakiroFile(EagleFile):
    """A Jakiro checkpoint, ours or one of its authors, before it is bound to a target.

    Attributes:
        mixture: What is mixed.
    """

    kind: ClassVar[type[EagleHead]] = JakiroHead

    mixture: str = "features"

    @classmethod
    def of(cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "JakiroFile":
        file = EagleFile.of(path, config, {name.replace(*EXPERTS): tensor for name, tensor in tensors.items()})
        return cls(path=path, config=file.config, tensors=file.tensors, mixture=config.get("mixture", "features"))

    def sizes(self) -> dict[str, Any]:
        gate = self.tensors.get(f"{EXPERTS[1]}experts.0.gate_proj.weight")
        return {"mixture": self.mixture, "expert_size": None if gate is None or not len(gate) else len(gate)}


def jakiro_tensors(head: JakiroHead) -> dict[str, Tensor]:
    """The tensors of a head, under the names of its authors' checkpoints."""
    return {name.replace(EXPERTS[1], EXPERTS[0]): tensor for name, tensor in head.state_dict().items()}


def is_jakiro(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of Jakiro."""
    published = {"fc.weight", f"{EXPERTS[0]}gate.weight"} <= {name.removeprefix("model.") for name in names}
    return config.get(KIND) == NAME if KIND in config else published
