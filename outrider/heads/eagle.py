r"""EAGLE-1: a decoder layer that continues the target's last features (Li et al. 2024), and its files."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.feature_head import LEFT_OUT, FeatureHead, described, layer_config, qkv_bias_of
from outrider.heads.files import KIND, TARGET, TargetShape, made, nested, write_head
from outrider.heads.layers import DecoderLayer
from outrider.lm.head import KVCache
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
"""The names that vLLM and SGLang give such a checkpoint. Its authors' have the name of a plain model."""
SPECULATORS = "eagle"
"""The `speculators_model_type` of such a checkpoint."""


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
        ends: EmbeddingAndHead,
        *,
        vocab_size: int,
        bias: bool = False,
        own_embedding: bool = False,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__(config, ends, vocab_size=vocab_size, own_embedding=own_embedding)
        self.fc = self.fusion(bias)
        self.layers = nn.ModuleList(self.layer(i, qkv_bias) for i in range(config.num_hidden_layers))

    def fusion(self, bias: bool) -> nn.Module:
        """What makes one vector of an embedding and a feature, side by side."""
        return nn.Linear(2 * self.feature_size, self.feature_size, bias=bias)

    def layer(self, number: int, qkv_bias: bool | None) -> DecoderLayer:
        """A new decoder layer."""
        return DecoderLayer(self.config, number, input_norm=number > 0, qkv_bias=qkv_bias)

    @property
    def biased(self) -> bool:
        """Whether the fusion has a bias."""
        return any(name.endswith("bias") for name, _ in self.fc.named_parameters())

    def record(self) -> dict[str, Any]:
        """What its config says beside the sizes."""
        return {"architectures": [ARCHITECTURES[0]], "bias": self.biased}

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        weight = next(self.layers.parameters())
        return self.ends.norm(states).to(weight.device, weight.dtype)

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        hidden = self._fused(tokens, features)
        rotary = self.rotary(hidden, positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, mask, cache)
        return hidden

    def digest(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        cache: KVCache,
    ) -> None:
        hidden, layer = self._fused(tokens, features), cast(DecoderLayer, self.layers[0])
        layer.self_attn.keep(layer.input_layernorm(hidden), self.rotary(hidden, positions), cache)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        return self.target_logits(hidden)[..., : self.vocab_size]

    def _fused(
        self, tokens: Int[Tensor, "rows width"], features: Float[Tensor, "rows width dim"]
    ) -> Float[Tensor, "rows width dim"]:
        fused: Tensor = self.fc(torch.cat([self.embed(tokens, features), features], -1))
        return fused


@dataclass(frozen=True, kw_only=True)
class EagleFile:
    """A checkpoint of EAGLE-1 before it is bound to a target.

    Attributes:
        config: The sizes of its layers.
        tensors: Its tensors, under the names of `EagleHead`.
    """

    kind: ClassVar[type[EagleHead]] = EagleHead

    path: str
    config: PreTrainedConfig
    tensors: Mapping[str, Tensor]

    @classmethod
    def of(cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> "EagleFile":
        """A checkpoint by its two files. Raises InputError if transformers refuses the config, or it has norms that
        EAGLE lacks.
        """
        inner: Mapping[str, Any] = config
        left_out: tuple[str, ...] = LEFT_OUT
        if config.get("speculators_model_type") == SPECULATORS:
            if config.get("layernorms"):
                raise InputError(f"the head in {path} is an EAGLE head with further norms, which are not known here")
            inner = {**nested(config, "transformer_layer_config", path), "num_hidden_layers": 1}
            left_out = (*LEFT_OUT, "lm_head.weight")
        kept = {
            _name(name): tensor
            for name, tensor in tensors.items()
            if not name.endswith("rotary_emb.inv_freq") and name not in left_out
        }
        return cls(path=path, config=layer_config(inner, path), tensors=kept)

    def sizes(self) -> dict[str, Any]:
        """What the head is made with beside its layers' sizes."""
        return {}

    def head(self, ends: EmbeddingAndHead, vocab_size: int) -> EagleHead:
        """The head. Raises InputError if the tensors are not those of such a head."""

        def head() -> EagleHead:
            return self.kind(
                self.config,
                ends,
                vocab_size=vocab_size,
                bias=any(name.startswith("fc.") and name.endswith(".bias") for name in self.tensors),
                own_embedding="embed_tokens.weight" in self.tensors,
                qkv_bias=qkv_bias_of(self.tensors),
                **self.sizes(),
            )

        return made(head, self.tensors, self.path)


def is_eagle(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of EAGLE-1: a plain model's config beside the tensors of such a head."""
    if KIND in config:
        return False
    if config.get("speculators_model_type") == SPECULATORS:
        return True
    if any(name in ARCHITECTURES for name in config.get("architectures") or []):
        return True
    bare = {name.removeprefix("model.") for name in names}
    # A damaged head may lack `fc.weight`, which is said when it is loaded. A model has a final norm.
    wanted = {"layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight"}
    other = {"norm.weight", "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight", "fc.fc.weight"}
    foreign = {"speculators_model_type", KIND} & config.keys()
    return wanted <= bare and not other & bare and not foreign and not has_specialists(bare)


def _name(name: str) -> str:
    """The name of a tensor in `EagleHead`. That of `speculators` has one layer, the transformer."""
    name = name.removeprefix("model.")
    for begin, own in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        name = own + name.removeprefix(begin) if name.startswith(begin) else name
    return name


def has_specialists(names: Collection[str]) -> bool:
    """Whether tensors are those of a head whose layers are specialists: no layer norms its attention's input alone."""
    second = "layers.1.self_attn.q_proj.weight" in names
    return second and ("layers.1.input_layernorm.weight" not in names or "layers.1.hidden_norm.weight" in names)


def eagle_config(head: EagleHead, target: TargetShape, dtype: torch.dtype) -> dict[str, Any]:
    """The config that is written."""
    return {
        **described(head.config),
        **head.record(),
        "vocab_size": target.vocab_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        TARGET: target.record(),
    }


def write_eagle(head: EagleHead, folder: Path, target: TargetShape, dtype: torch.dtype) -> None:
    """Write a head as its authors do, with the architecture's name of vLLM."""
    write_head(folder, eagle_config(head, target, dtype), head.state_dict(), dtype)
