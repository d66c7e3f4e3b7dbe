r"""EAGLE-1: a decoder layer that continues the target's last features (Li et al. 2024)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.drafters.token_map import check_listed, checked_ids, read_token_map
from outrider.heads.doubt import Doubt
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext, LearntPositions
from outrider.heads.parts.layer_config import (
    LEFT_OUT,
    described,
    layer_config,
    qkv_bias_of,
    usual_layer,
    without_copies,
)
from outrider.heads.parts.layers import DecoderLayer
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.features import FeatureDrafter, FeatureHead, FeatureObjective, FeatureOptions
from outrider.learning.batch import TrainBatch
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import KIND, TARGET, Checkpoint, TargetShape, build_module, nested
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo

ARCHITECTURES = ("EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
"""The names that vLLM and SGLang give such a checkpoint. Its authors' have the name of a plain model."""
SPECULATORS = "eagle"
"""The `speculators_model_type` of such a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class EagleTrunkOptions(FeatureOptions):
    """What every head on the trunk of EAGLE-1 can be told.

    Attributes:
        unrolled: How many draft tokens are learnt from the head's own features; 1 learns from the target's alone.
        regression: Weight of the distance between the head's features and the target's; the divergence has weight 1.
        noise: Strength of the noise on the target's features.
        bias: Give the fusion a bias, as the authors do. vLLM reads no checkpoint with one.
    """

    unrolled: int = loss(1, least=1)
    regression: float = loss(10.0, least=0)
    noise: float = loss(0.2, least=0)
    bias: bool = size(False)


@dataclass(frozen=True, kw_only=True)
class EagleOptions(EagleTrunkOptions):
    """Train an EAGLE head: a layer that continues the target's last hidden states.

    With --tree dynamic it drafts as EAGLE-2.

    Attributes:
        intermediate_size: Width of the feed-forward. By default the target's.
    """

    intermediate_size: int | None = size(None, least=1)


class EagleHead(FeatureHead):
    r"""With the target's normed last state $f_t$,

    $u = W_{fc} [E(x_{t+1}); f_t], \qquad \hat f_{t+1} = \mathrm{layer}(u)$,

    and the target's output layer makes logits of $\hat f_{t+1}$. The first layer does not norm its attention's input.

    Args:
        config: The sizes of its layers.
        embedding_and_head: Those of the target.
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
        embedding_and_head: EmbeddingAndHead,
        *,
        vocab_size: int,
        bias: bool = False,
        own_embedding: bool = False,
        qkv_bias: bool | None = None,
    ) -> None:
        super().__init__(config, embedding_and_head, vocab_size=vocab_size, own_embedding=own_embedding)
        self.ids: Int[Tensor, " width"] | None = None
        self.fc = self.fusion(bias)
        self.layers = nn.ModuleList(self.layer(i, qkv_bias) for i in range(config.num_hidden_layers))

    @classmethod
    def new(cls, options: EagleTrunkOptions, context: HeadContext) -> "EagleHead":
        info, inner = context.info, options.intermediate_size if isinstance(options, EagleOptions) else None
        layer = usual_layer(context.anatomy, vocab_size=info.vocab_size, intermediate_size=inner)
        return cls(
            layer, info.embedding_and_head(), vocab_size=info.vocab_size, bias=options.bias, **cls.sizes(options)
        )

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "EagleHead":
        layer, tensors = cls.layout(checkpoint.path, checkpoint.config, checkpoint.tensors())
        trained.check_target(checkpoint.target, layer.hidden_size, target)
        trained.check_vocabulary(layer.vocab_size, target)
        ids = trained.listed(target) if isinstance(trained, TrainedEagle) else None
        head = cls.of_tensors(checkpoint, layer, without_copies(tensors, target.embed, target.device), target, ids)
        head.ids = None if ids is None else torch.tensor(ids)
        return head

    @classmethod
    def of_tensors(
        cls,
        checkpoint: Checkpoint,
        layer: PreTrainedConfig,
        tensors: Mapping[str, Tensor],
        target: TargetInfo,
        ids: Sequence[int] | None = None,
    ) -> "EagleHead":
        """The head with tensors under its own names.

        Args:
            layer: The sizes of its layers.
            ids: The tokens that it may guess, ascending; None: all.

        Raises:
            InputError: The tensors are not those of such a head.
        """
        embedding_and_head = target.embedding_and_head() if ids is None else target.embedding_and_head().cut(ids)

        def head() -> "EagleHead":
            return cls(
                layer,
                embedding_and_head,
                vocab_size=target.vocab_size if ids is None else len(ids),
                bias=any(name.startswith("fc.") and name.endswith(".bias") for name in tensors),
                own_embedding="embed_tokens.weight" in tensors,
                qkv_bias=qkv_bias_of(tensors),
                **cls.sizes_in(checkpoint.config, tensors),
            )

        return build_module(head, tensors, checkpoint.path)

    @classmethod
    def layout(
        cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> tuple[PreTrainedConfig, dict[str, Tensor]]:
        """The sizes of the layers, and the tensors under the names of the module.

        Raises:
            InputError: transformers refuses the config, or the head has norms that EAGLE lacks.
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
        return layer_config(inner, path), kept

    @classmethod
    def sizes(cls, options: Any) -> dict[str, Any]:
        """What a new head is made with beside what all heads on this trunk are."""
        return {}

    @classmethod
    def sizes_in(cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """The same of a head on disk."""
        return {}

    def fusion(self, bias: bool) -> nn.Module:
        """What makes one vector of an embedding and a feature, side by side."""
        return nn.Linear(2 * self.feature_size, self.feature_size, bias=bias)

    def layer(self, number: int, qkv_bias: bool | None) -> DecoderLayer:
        """A new decoder layer."""
        return DecoderLayer(self.config, number, input_norm=number > 0, qkv_bias=qkv_bias)

    def own_config(self) -> dict[str, Any]:
        """What its config says beside the sizes of its layers."""
        biased = any(name.endswith("bias") for name, _ in self.fc.named_parameters())
        return {"architectures": [ARCHITECTURES[0]], "bias": biased}

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """As its authors write it, with the architecture's name of vLLM."""
        config = {
            **described(self.config),
            **self.own_config(),
            "vocab_size": target.vocab_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
            TARGET: target.record(),
        }
        return config, self.state_dict()

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """vLLM's form has no bias behind the fusion, and SGLang's has one."""
        config, tensors = self.record(target, dtype, name)
        biased = "fc.bias" in tensors
        if engine == "vllm" and biased:
            raise InputError(
                "vllm reads no EAGLE head whose fusion has a bias; train it without --bias, from this head's data"
            )
        if engine == "sglang":
            config |= {"architectures": [ARCHITECTURES[1]], "bias": True}
            # SGLang makes the bias without reading it, where the file has none.
            tensors = {"fc.bias": torch.zeros(len(tensors["fc.weight"])), **tensors}
        return config, tensors

    def doubts(self, target: TargetInfo) -> Sequence[Doubt]:
        doubts = [
            *super().doubts(target),
            Doubt(
                about="norm",
                means="it was trained on the target's last states before the final norm",
                advice="train it further on normed states",
                changes=[(self, "embedding_and_head", replace(self.embedding_and_head, norm=lambda states: states))],
            ),
        ]
        if isinstance(self.fc, nn.Linear):
            swapped = torch.cat(list(reversed(self.fc.weight.chunk(2, -1))), -1)
            doubts.append(
                Doubt(
                    about="columns of fc",
                    means="the columns of fc.weight stand in the order feature, embedding",
                    advice="swap their halves in its file",
                    changes=[(self.fc, "weight", nn.Parameter(swapped, requires_grad=False))],
                )
            )
        return doubts

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        weight = next(self.layers.parameters())
        return self.embedding_and_head.norm(states).to(weight.device, weight.dtype)

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        hidden = self._fused(inputs)
        rotary = self.rotary(hidden, inputs.positions)
        for layer in self.layers:
            hidden = layer(hidden, rotary, inputs)
        return hidden

    def prefill(self, inputs: HeadInputs) -> None:
        hidden, layer = self._fused(inputs), cast(DecoderLayer, self.layers[0])
        layer.self_attn.keep(layer.input_layernorm(hidden), self.rotary(hidden, inputs.positions), inputs.cache)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        return self.target_logits(hidden)[..., : self.vocab_size]

    def _fused(self, inputs: HeadInputs) -> Float[Tensor, "rows width dim"]:
        features = inputs.needed_features
        fused: Tensor = self.fc(torch.cat([self.embed(inputs.tokens, features), features], -1))
        return fused


class EagleObjective(FeatureObjective):
    r"""Beside the divergence, EAGLE-1 lowers the distance of each feature from the target's, a smooth L1.

    References:
        Li et al. 2024. https://arxiv.org/abs/2401.15077
    """

    head: EagleHead
    options: EagleTrunkOptions
    detached = True

    def auxiliary_loss(
        self, batch: TrainBatch, hidden: Float[Tensor, "rows length hidden"], number: int, places: LearntPositions
    ) -> Float[Tensor, ""]:
        """The weighted sum of the mean distances of all features from the target's next ones."""
        wanted = self.last_states(batch)[places.rows, places.at + 1 + number].to(hidden.dtype)
        feature = self.head.next_feature(hidden[places.rows, places.at])
        distance = smooth_l1_loss(feature, wanted, reduction="none").mean(-1)
        return self.options.regression * distance.sum()


@dataclass(frozen=True, kw_only=True)
class TrainedEagle(TrainedHead):
    """A head on the trunk of EAGLE-1 on disk.

    Attributes:
        token_map: A file of the tokens that it may propose, the most frequent first: `read_token_map` says which
            kinds there are. Its output layer, the target's, is cut to these. By default it may propose all tokens.
        vocabulary: How many tokens of the file to take; by default all.

    References:
        Zhao et al. 2025, FR-Spec: the output layer of the most frequent tokens. https://arxiv.org/abs/2502.14856
    """

    token_map: str | None = None
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_listed(self.token_map, self.vocabulary)

    def listed(self, target: TargetInfo) -> Sequence[int] | None:
        """The tokens of the file, ascending; None: all may be proposed."""
        if self.token_map is None:
            return None
        return checked_ids(read_token_map(self.token_map, self.vocabulary), target.vocab_size, self.token_map)


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
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
    for begin, ours in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        name = ours + name.removeprefix(begin) if name.startswith(begin) else name
    return name


def has_specialists(names: Collection[str]) -> bool:
    """Whether tensors are those of a head whose layers are specialists: no layer norms its attention's input alone."""
    second = "layers.1.self_attn.q_proj.weight" in names
    return second and ("layers.1.input_layernorm.weight" not in names or "layers.1.hidden_norm.weight" in names)


SPEC = HeadSpec(
    name="eagle",
    head=EagleHead,
    drafter=FeatureDrafter,
    published=published,
    trained=TrainedEagle,
    options=EagleOptions,
    objective=EagleObjective,
    exports=Exports(vllm="eagle", sglang="EAGLE", instead="eagle3"),
)
