r"""EAGLE-1: a decoder layer that continues the target's last features (Li et al. 2024), and its files."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.heads.feature_head import LEFT_OUT, FeatureHead, described, layer_config, qkv_bias_of
from outrider.heads.files import HEAD, TARGET, TargetShape, load_into, write_head
from outrider.heads.layers import DecoderLayer
from outrider.lm.ends import Ends
from outrider.lm.head import Keeper

ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
"""The names that vLLM and SGLang give such a checkpoint. Its authors' have the name of a plain model."""


class EagleHead(FeatureHead):
    r"""With the target's normed last state $f_t$,

    $u = W_{fc} [E(x_{t+1}); f_t], \qquad \hat f_{t+1} = \mathrm{layer}(u)$,

    and the target's output layer makes logits of $\hat f_{t+1}$. The first layer does not norm its attention's input.

    Args:
        config: The sizes of its layers.
        ends: The target's ends.
        vocab_size: Width of the target's logits.
        bias: Whether $W_{fc}$ has a bias. vLLM reads no checkpoint with one.
        own_embedding: Whether it has an embedding of its own.
        qkv_bias: As for `Attention`.

    References:
        Li et al. 2024. https://arxiv.org/abs/2401.15077
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        ends: Ends,
        *,
        vocab_size: int,
        bias: bool = False,
        own_embedding: bool = False,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__(config, ends, vocab_size=vocab_size, own_embedding=own_embedding)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config, i, input_norm=i > 0, qkv_bias=qkv_bias) for i in range(config.num_hidden_layers)
        )

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        normed = self.ends.norm(states)
        return normed.to(self.fc.weight.device, self.fc.weight.dtype)

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: Keeper,
    ) -> Float[Tensor, "rows width hidden"]:
        hidden: Tensor = self.fc(torch.cat([self.embed(tokens, features), features], -1))
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, mask, cache)
        return hidden

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        return self.target_logits(hidden)[..., : self.vocab_size]


@dataclass(frozen=True, kw_only=True)
class EagleFile:
    """A checkpoint of EAGLE-1 before it is bound to a target.

    Attributes:
        config: The sizes of its layers.
        tensors: Its tensors, under the names of `EagleHead`.
    """

    path: str
    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "EagleFile":
        """A checkpoint by its two files. Raises InputError if transformers refuses the config."""
        kept = {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if not name.endswith("rotary_emb.inv_freq") and name not in LEFT_OUT
        }
        return cls(path=path, config=layer_config(config, path), tensors=kept)

    def head(self, ends: Ends, vocab_size: int) -> EagleHead:
        """The head. Raises InputError if the tensors are not those of such a head."""
        head = EagleHead(
            self.config,
            ends,
            vocab_size=vocab_size,
            bias="fc.bias" in self.tensors,
            own_embedding="embed_tokens.weight" in self.tensors,
            qkv_bias=qkv_bias_of(self.tensors),
        )
        load_into(head, self.tensors, self.path)
        return head


def is_eagle(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of EAGLE-1: a plain model's config beside the tensors of such a head."""
    if any(name in ARCHITECTURES for name in config.get("architectures") or []):
        return True
    bare = {name.removeprefix("model.") for name in names}
    wanted, other = {"fc.weight", "layers.0.self_attn.q_proj.weight"}, {"norm.weight", "layers.0.hidden_norm.weight"}
    foreign = {"speculators_model_type", HEAD} & config.keys()
    return wanted <= bare and not other & bare and not foreign


def write_eagle(head: EagleHead, folder: Path, target: TargetShape, dtype: torch.dtype) -> None:
    """Write a head as its authors do, with the architecture's name of vLLM."""
    config = {
        **described(head.config),
        "architectures": [ARCHITECTURES[0]],
        "vocab_size": target.vocab_size,
        "bias": head.fc.bias is not None,
        "torch_dtype": str(dtype).removeprefix("torch."),
        TARGET: target.record(),
    }
    write_head(folder, config, head.state_dict(), dtype)
