r"""EAGLE-3: a decoder layer over three fused hidden states, trained on its own outputs (Li et al. 2025)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.heads.doubt import Doubt, other_taps
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext
from outrider.heads.parts.layer_config import (
    LEFT_OUT,
    described,
    layer_config,
    qkv_bias_of,
    usual_layer,
    without_copies,
)
from outrider.heads.parts.layers import DecoderLayer, norm_of
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.features import FeatureDrafter, FeatureHead, FeatureObjective, FeatureOptions
from outrider.learning.options import loss, size
from outrider.lm.hf.checkpoint import KIND, TARGET, Checkpoint, TargetShape, build_module, nested, whole_numbers
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.target_info import TargetInfo

SPECULATORS = "eagle3"
"""The `speculators_model_type` of the first layout."""
AUTOMODEL = "LlamaEagle3DraftModel"
"""The architecture of the heads of NeMo AutoModel."""
NATIVE = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", AUTOMODEL)
"""Architectures of the second one."""
AUTO_MAP = "auto_map"
"""A key that SpecForge writes, and no other trainer of such heads."""
MASK = "mask_hidden"
"""The tensor that a P-EAGLE head has beside those of an EAGLE-3 head."""
ARCHITECTURE, VERSION = "Eagle3Speculator", "0.2.0"
LEGACY = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
TAPS = "eagle_aux_hidden_state_layer_ids"
"""The key that names the tapped states. In the layout of speculators, id k is what enters layer k."""

UNKNOWN = {
    "sglang": ("norm_before_residual", "norm_before_fc", "fc_norm"),
    "llama.cpp": ("norm_before_fc", "fc_norm", "norm_output"),
    "openvino": ("norm_before_fc", "fc_norm", "norm_output"),
}
"""The choices that engines other than vLLM do not know."""

H = TypeVar("H", bound="Eagle3Head")


@dataclass(frozen=True, kw_only=True)
class Eagle3SizeOptions(FeatureOptions):
    """The sizes of a head on the trunk of EAGLE-3.

    Attributes:
        taps: The target's hidden states that the head reads, such as 2x16x29; tap k enters layer k. By default a low, a
            middle and a high one.
        fc_norm: Norm each of these states.
        norm_output: Take the normed output as the next feature.
        norm_before_residual: Take the normed feature as the residual.
        intermediate_size: Width of the feed-forward. By default the target's.
        draft_vocab: How many tokens the head can guess: the most frequent learnt tokens of --data. By default all.
    """

    taps: tuple[int, ...] | None = size(None)
    fc_norm: bool = size(False)
    norm_output: bool = size(False)
    norm_before_residual: bool = size(False)
    intermediate_size: int | None = size(None, least=1)
    draft_vocab: int | None = size(None, least=1)


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(Eagle3SizeOptions):
    """Train an EAGLE-3 head: a layer that continues three fused hidden states of the target, on its own outputs.

    Attributes:
        unrolled: How many draft tokens are learnt, all but the first from the head's own features.
    """

    unrolled: int = loss(7, least=1)


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """The sizes of an EAGLE-3 head, and the choices that its checkpoints differ in.

    Attributes:
        layer: The sizes of its layers.
        target_hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        draft_vocab_size: Width of the head's logits.
        taps: The hidden states that it reads, in order.
        norm_before_residual: Whether the residual of the first layer is the normed feature.
        norm_before_fc: Whether the tapped states are normed together, side by side.
        fc_norm: Whether each tapped state has a norm of its own.
        norm_output: Whether the normed output is the next feature; the head's logits are always made of the normed one.
        own_embedding: Whether it has an embedding of its own.
        own_output: Whether it has an output layer of its own; otherwise it takes the target's.
        qkv_bias: As for `Attention`.

    Raises:
        InputError: Both kinds of norms are asked for.
    """

    layer: PreTrainedConfig
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_output: bool = True
    qkv_bias: bool | None = None

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise InputError("norm_before_fc and fc_norm are two ways to norm the tapped states; choose one")


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The hidden states that a head reads if its checkpoint does not say so: what enters layers 2, L/2 and L-3."""
    return 2, num_layers // 2, num_layers - 3


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """The hidden states that a new head reads: the default ones, or three others of a target with few layers.

    Example:
        >>> usual_taps(32), usual_taps(4), usual_taps(2)
        ((2, 16, 29), (1, 2, 3), (0, 1, 2))
    """
    low, middle, high = default_taps(num_layers)
    if low < middle < high:
        return low, middle, high
    if num_layers < 3:
        return tuple(max(0, num_layers - 2 + i) for i in range(3))
    return 1, max(2, num_layers // 2), max(3, num_layers - 1)


class FusedLayer(DecoderLayer):
    """The first layer: it attends to a token's embedding and a feature side by side. The residual is the feature.

    Args:
        config: The sizes.
        norm_before_residual: Whether the residual is the normed feature.
        qkv_bias: As for `Attention`.
    """

    def __init__(
        self, config: PreTrainedConfig, *, norm_before_residual: bool = False, qkv_bias: bool | None = None
    ) -> None:
        super().__init__(config, 0, input_size=2 * config.hidden_size, qkv_bias=qkv_bias)
        self.hidden_norm = norm_of(config)
        self.norm_before_residual = norm_before_residual

    def fused(
        self, embeds: Float[Tensor, "rows width hidden"], rotary: Float[Tensor, "2 rows width dim"], inputs: HeadInputs
    ) -> Float[Tensor, "rows width hidden"]:
        """The layer's output."""
        features = inputs.needed_features
        residual = self.hidden_norm(features) if self.norm_before_residual else features
        hidden: Tensor = residual + self.self_attn(self.pair(embeds, features), rotary, inputs)
        return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))

    def pair(
        self, embedded: Float[Tensor, "rows width hidden"], features: Float[Tensor, "rows width hidden"]
    ) -> Float[Tensor, "rows width both"]:
        """What the attention reads."""
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(features)], -1)


class Eagle3Head(FeatureHead):
    r"""With the tapped states $s_1, s_2, s_3$ of the target at $t$, $g_t = W_{fc} [s_1; s_2; s_3]$; the layer's
    output $u$ at the pair $(x_{t+1}, g_t)$ is the next feature, and the logits are those of $\mathrm{norm}(u)$.

    Args:
        config: The sizes.
        embedding_and_head: Those of the target.
        ids: The tokens that the head guesses, ascending; None: all.

    References:
        Li et al. 2025. https://arxiv.org/abs/2503.01840
    """

    def __init__(
        self, config: Eagle3Config, embedding_and_head: EmbeddingAndHead, ids: Int[Tensor, " width"] | None = None
    ) -> None:
        layer = config.layer
        super().__init__(
            layer, embedding_and_head, vocab_size=config.draft_vocab_size, own_embedding=config.own_embedding
        )
        self.sizes = config
        size, count = config.target_hidden_size, len(config.taps)
        self.fc = nn.Linear(count * size, layer.hidden_size, bias=False)
        self.input_norm = norm_of(layer, count * size) if config.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(norm_of(layer, size) for _ in config.taps if config.fc_norm)
        first = FusedLayer(layer, norm_before_residual=config.norm_before_residual, qkv_bias=config.qkv_bias)
        others = [DecoderLayer(layer, i, qkv_bias=config.qkv_bias) for i in range(1, layer.num_hidden_layers)]
        self.layers = nn.ModuleList([first, *others])
        self.norm = norm_of(layer)
        width = config.draft_vocab_size
        self.lm_head = nn.Linear(layer.hidden_size, width, bias=False) if config.own_output else None
        self.ids: Int[Tensor, " width"] | None
        self.register_buffer("ids", ids, persistent=False)

    @classmethod
    def new(cls, options: Eagle3SizeOptions, context: HeadContext) -> "Eagle3Head":
        info, ids = context.info, context.frequent_tokens(options.draft_vocab)
        config = Eagle3Config(
            layer=usual_layer(context.anatomy, vocab_size=info.vocab_size, intermediate_size=options.intermediate_size),
            target_hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            draft_vocab_size=info.vocab_size if ids is None else len(ids),
            taps=usual_taps(info.num_layers) if options.taps is None else tuple(options.taps),
            norm_before_residual=options.norm_before_residual,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
        )
        head = cls(config, info.embedding_and_head(), ids)
        output = context.target.get_output_embeddings()
        head.begin_from(None if output is None else output.weight)
        return head

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "Eagle3Head":
        layout = Eagle3Layout.of(checkpoint)
        trained.check_target(checkpoint.target, layout.target_hidden_size, target)
        trained.check_vocabulary(int(layout.layer.vocab_size), target)
        tensors = without_copies(dict(layout.tensors), target.embed, target.device)
        answers = trained if isinstance(trained, TrainedEagle3) else TrainedEagle3(spec=SPEC, path=checkpoint.path)
        return replace(layout, tensors=tensors).head(cls, target, answers)

    def reads(self, num_layers: int) -> tuple[int, ...]:
        return self.sizes.taps

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """In the layout of speculators, as vLLM loads it."""
        sizes = self.sizes
        proposal = {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
        config = {
            "architectures": [ARCHITECTURE],
            "speculators_model_type": SPECULATORS,
            "speculators_version": VERSION,
            "torch_dtype": str(dtype).removeprefix("torch."),
            **self.choices,
            TAPS: list(sizes.taps),
            "transformer_layer_config": {**described(sizes.layer), "vocab_size": target.vocab_size},
            "speculators_config": {
                "algorithm": SPECULATORS,
                "default_proposal_method": "greedy",
                "proposal_methods": [proposal],
                "verifier": {"name_or_path": name, "architectures": []},
            },
            TARGET: target.record(),
        }
        return config, self.state_dict() if self.ids is None else self.with_list(self.ids, target.vocab_size)

    def exported(self, engine: str, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """vLLM reads the layout of speculators, and others that of the authors."""
        if engine == "vllm":
            return self.record(target, dtype, name)
        sizes = self.sizes
        choices = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        if foreign := [choice for choice in choices if choice in UNKNOWN[engine] and getattr(sizes, choice)]:
            raise InputError(
                f"{engine} knows no EAGLE-3 head with {foreign[0]}; train one without it: outrider train eagle3"
            )
        if sizes.layer.num_hidden_layers > 1:
            raise InputError(
                f"{engine} reads EAGLE-3 heads of one layer, and this one has {sizes.layer.num_hidden_layers}; train "
                "one: outrider train eagle3"
            )
        if engine == "llama.cpp" and sizes.taps != default_taps(target.num_layers):
            raise InputError(
                f"llama.cpp reads the hidden states {list(default_taps(target.num_layers))} of this target, and the "
                f"head reads {list(sizes.taps)}; train one with --taps "
                f"{'x'.join(map(str, default_taps(target.num_layers)))}"
            )
        config, tensors = self.native(target, dtype)
        if engine == "sglang":
            # Its id k is what leaves layer k.
            config["eagle_config"][TAPS] = [tap - 1 for tap in sizes.taps]
        return config, {_of_authors(name): tensor for name, tensor in tensors.items()}

    def native(self, target: TargetShape, dtype: torch.dtype) -> HeadFiles:
        """The config of the authors' layout, and the tensors under our names, with the list of tokens."""
        sizes = self.sizes
        config = {
            **described(sizes.layer),
            "architectures": [NATIVE[0]],
            "vocab_size": target.vocab_size,
            "torch_dtype": str(dtype).removeprefix("torch."),
            **self.choices,
            "num_aux_hidden_states": len(sizes.taps),
            "eagle_config": {TAPS: list(sizes.taps), "use_aux_hidden_state": True},
            TARGET: target.record(),
        }
        ids = torch.arange(sizes.draft_vocab_size) if self.ids is None else self.ids
        return config, self.with_list(ids, target.vocab_size)

    @property
    def choices(self) -> dict[str, Any]:
        """What its checkpoints differ in, as every layout names it."""
        names = ("draft_vocab_size", "target_hidden_size")
        norms = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return {name: getattr(self.sizes, name) for name in (*names, *norms)}

    def with_list(self, ids: Int[Tensor, " width"], vocab_size: int) -> dict[str, Tensor]:
        """Its tensors with the list of the tokens that it guesses, as differences, and with a mark for each token.

        Args:
            vocab_size: Width of the target's logits.
        """
        ids = ids.cpu()
        listed = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        return {**self.state_dict(), "d2t": ids - torch.arange(len(ids)), "t2d": listed}

    def extra_repr(self) -> str:
        """The choices that no tensor shows."""
        names = ("taps", "norm_before_residual", "norm_output")
        return ", ".join(f"{name}={getattr(self.sizes, name)}" for name in names)

    def doubts(self, target: TargetInfo) -> Sequence[Doubt]:
        sizes, first = self.sizes, cast(FusedLayer, self.layers[0])
        doubts = list(super().doubts(target))
        for taps, how in other_taps(sizes.taps, target.num_layers):
            doubts.append(
                Doubt(
                    about="taps",
                    means=f"it reads the hidden states {_listed(sizes.taps)}, and was trained on others, {how}",
                    advice=f"say taps={'x'.join(map(str, taps))} behind its path",
                    changes=[(self, "sizes", replace(sizes, taps=taps))],
                )
            )
        residual, output = not sizes.norm_before_residual, not sizes.norm_output
        doubts.append(
            Doubt(
                about="residual",
                means="its config is wrong on which residual its first layer has",
                advice=f"write norm_before_residual {str(residual).lower()} into its config",
                changes=[(first, "norm_before_residual", residual)],
            )
        )
        doubts.append(
            Doubt(
                about="feedback",
                means="its config is wrong on which feature a draft token is read with",
                advice=f"say norm_output={str(output).lower()} behind its path",
                changes=[(self, "sizes", replace(sizes, norm_output=output))],
            )
        )
        return doubts

    def fuse(self, states: Float[Tensor, "*batch all"]) -> Float[Tensor, "*batch hidden"]:
        states = states.to(self.fc.weight.device, self.fc.weight.dtype)
        if self.fc_norm:
            parts = states.split(self.sizes.target_hidden_size, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return cast(Tensor, self.fc(self.input_norm(states)))

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        features, first = inputs.needed_features, cast(FusedLayer, self.layers[0])
        rotary = self.rotary(features, inputs.positions)
        hidden = first.fused(self.embed(inputs.tokens, features), rotary, inputs)
        for layer in self.layers[1:]:
            hidden = layer(hidden, rotary, inputs)
        return hidden

    def prefill(self, inputs: HeadInputs) -> None:
        features, first = inputs.needed_features, cast(FusedLayer, self.layers[0])
        both = first.pair(self.embed(inputs.tokens, features), features)
        first.self_attn.keep(both, self.rotary(features, inputs.positions), inputs.cache)

    def next_feature(self, head_output: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        return self.norm(head_output) if self.sizes.norm_output else head_output

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch width"]:
        normed = self.norm(hidden)
        logits = self.target_logits(normed) if self.lm_head is None else cast(Tensor, self.lm_head(normed))
        return logits[..., : self.vocab_size]

    @torch.no_grad()
    def begin_from(self, output: Float[Tensor, "vocab hidden"] | None) -> None:
        """Let the head's own output layer begin as the target's.

        Args:
            output: The weight of that layer; None leaves random weights, as does one of another width.
        """
        if self.lm_head is None or output is None or output.shape[1] != self.lm_head.in_features:
            return
        chosen = output[: len(self.lm_head.weight)] if self.ids is None else output[self.ids.to(output.device)]
        self.lm_head.weight.copy_(chosen)


@dataclass(frozen=True, kw_only=True)
class Eagle3Layout:
    """An EAGLE-3 checkpoint of any layout under our own names.

    Attributes:
        config: Its config.
        layer: The sizes of its layers.
        tensors: Its tensors, under the names of `Eagle3Head`.
        target: The target that the config names; None if it names none.
    """

    path: str
    config: Mapping[str, Any]
    layer: Any
    tensors: Mapping[str, Tensor]
    target: TargetShape | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Eagle3Layout":
        """Raises InputError if it is a checkpoint of P-EAGLE, or its config makes no sense."""
        path, config, tensors = checkpoint.path, checkpoint.config, checkpoint.tensors()
        if any(name.removeprefix("model.") == MASK for name in tensors):
            raise InputError(f"the head in {path} is a P-EAGLE head (it has {MASK}); use drafter parallel")
        inner = config
        if _is_speculators(config) and "transformer_layer_config" in config:
            inner = nested(config, "transformer_layer_config", path)
        kept = {_name(name): tensor for name, tensor in tensors.items() if not name.endswith("rotary_emb.inv_freq")}
        return cls(path=path, config=config, layer=layer_config(inner, path), tensors=kept, target=checkpoint.target)

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return size_in(self.config, "target_hidden_size", self.path, default=self.layer.hidden_size)

    def head(self, kind: type[H], info: TargetInfo, answers: "TrainedEagle3") -> H:
        """The head. Tokens that the target lacks are not guessed.

        Args:
            kind: Its class.
            info: The target.
            answers: What the user says where the files leave it open.

        Raises:
            InputError: The tensors are not those of such a head, or a question is open.
        """
        tensors, ids = self._for(info.vocab_size)
        width = info.vocab_size if ids is None else len(ids)
        config = Eagle3Config(
            layer=self.layer,
            target_hidden_size=self.target_hidden_size,
            vocab_size=int(self.layer.vocab_size),
            draft_vocab_size=width if "lm_head.weight" not in tensors else len(tensors["lm_head.weight"]),
            taps=self._taps(info.num_layers, answers),
            norm_before_residual=self._norm_before_residual(answers),
            norm_before_fc=self._flag("norm_before_fc") or "input_norm.weight" in tensors,
            fc_norm=self._flag("fc_norm") or self._flag("use_aux_norm") or "fc_norm.0.weight" in tensors,
            norm_output=self._norm_output(answers),
            own_embedding="embed_tokens.weight" in tensors,
            own_output="lm_head.weight" in tensors,
            qkv_bias=qkv_bias_of(tensors),
        )
        if not config.own_embedding and self.layer.hidden_size != self.target_hidden_size:
            raise InputError(f"the head in {self.path} is narrower than its target and has no embed_tokens.weight")
        head = build_module(
            lambda: kind(config, info.embedding_and_head(), ids), tensors, self.path, unused=("d2t", *LEFT_OUT)
        )
        head.vocab_size = min(width, config.draft_vocab_size)
        return head

    def _for(self, vocab_size: int) -> tuple[dict[str, Tensor], Int[Tensor, " width"] | None]:
        """The tensors, and the tokens that the head guesses in ascending order, without those that the target lacks."""
        tensors, offsets = dict(self.tensors), self.tensors.get("d2t")
        output = tensors.get("lm_head.weight")
        if output is None or offsets is None:
            vocabulary = int(self.layer.vocab_size)
            narrow = size_in(self.config, "draft_vocab_size", self.path, default=vocabulary)
            if narrow < vocabulary:
                raise InputError(
                    f"the head in {self.path} guesses {narrow} tokens, and lm_head.weight or d2t is missing"
                )
            return tensors, None
        if offsets.dim() != 1 or offsets.is_floating_point() or offsets.dtype is torch.bool:
            raise InputError(f"d2t in {self.path} must be a list of whole numbers")
        if len(offsets) != len(output):
            raise InputError(
                f"d2t in {self.path} names {len(offsets)} tokens, and lm_head.weight has {len(output)} rows"
            )
        ids = torch.arange(len(offsets)) + offsets.long()
        if int(ids.min()) < 0 or int(ids.max()) >= int(self.layer.vocab_size) or len(ids.unique()) < len(ids):
            raise InputError(f"d2t in {self.path} names tokens twice, or tokens that its target does not have")
        order = ids.argsort()
        order = order[ids[order] < vocab_size]
        if len(order) < len(ids) or not torch.equal(order, torch.arange(len(ids))):
            tensors["lm_head.weight"] = output[order]
        return tensors, ids[order]

    def _flag(self, name: str) -> bool:
        return bool(self.config.get(name))

    def _norm_before_residual(self, answers: "TrainedEagle3") -> bool:
        value = self.config.get("norm_before_residual")
        if value is None:
            value = answers.norm_before_residual
        if value is None and _is_speculators(self.config):
            raise InputError(
                f"the config of {self.path} has no norm_before_residual, which vLLM takes for true and speculators for "
                "false; add norm_before_residual=true or false behind the path, as the head was trained"
            )
        return bool(value)

    def _norm_output(self, answers: "TrainedEagle3") -> bool:
        if answers.norm_output is not None:
            return answers.norm_output
        if self._flag("norm_output") and not _is_speculators(self.config) and self.target is None:
            if AUTOMODEL in (self.config.get("architectures") or ()):
                return True
            if AUTO_MAP in self.config:
                # There it says that the output layer reads the normed output, as it does in all heads.
                return False
            raise InputError(
                f"the config of {self.path} has norm_output, which vLLM and SGLang read as: feed the normed output "
                "back. Heads of SpecForge were trained without that. Add norm_output=true behind the path to feed the "
                "normed output back, or norm_output=false"
            )
        return self._flag("norm_output")

    def _taps(self, num_layers: int, answers: "TrainedEagle3") -> tuple[int, ...]:
        if answers.taps is not None:
            taps: tuple[int, ...] = answers.taps
        elif self.target is not None:
            taps = self.target.taps
        else:
            listed = self.config.get(TAPS) or nested(self.config, "eagle_config", self.path).get(TAPS) or ()
            named = whole_numbers(listed, TAPS, self.path)
            if named and not _is_speculators(self.config):
                raise InputError(
                    f"the config of {self.path} has {TAPS} {list(named)}; vLLM reads id k as what enters layer k, and "
                    f"SGLang as what leaves it. Add taps={'x'.join(map(str, named))} behind the path for the first, or "
                    f"taps={'x'.join(str(each + 1) for each in named)} for the second"
                )
            taps = named or default_taps(num_layers)
        if not all(0 <= tap <= num_layers for tap in taps):
            raise InputError(
                f"the head in {self.path} reads the hidden states {list(taps)}, and this target has 0..{num_layers}; "
                "give a head that was trained for this target"
            )
        return taps


@dataclass(frozen=True, kw_only=True)
class TrainedEagle3(TrainedHead):
    """A head on the trunk of EAGLE-3 on disk, whose files may leave questions open.

    Attributes:
        norm_before_residual: Whether the residual of the first layer is the normed feature, where the config does not
            say it.
        norm_output: Whether the normed output is the next feature; it goes before the config.
        taps: The target's hidden states that the head reads, such as 2x16x29; tap k enters layer k. They go before
            the config.
    """

    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    taps: tuple[int, ...] | None = None


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is one of EAGLE-3."""
    if KIND in config or any(name.removeprefix("model.") == MASK for name in names):
        return False
    native = any(name in NATIVE for name in config.get("architectures") or [])
    return _is_speculators(config) or native or any(name.startswith("midlayer.hidden_norm") for name in names)


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _is_speculators(config: Mapping[str, Any]) -> bool:
    return config.get("speculators_model_type") == SPECULATORS


def _name(name: str) -> str:
    """The name of a tensor in `Eagle3Head`."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for old, new in LEGACY.items():
        name = name.replace(f"{old}.", f"{new}.")
    return name


def _of_authors(name: str) -> str:
    """The name of a tensor of `Eagle3Head` in the authors' layout."""
    return name.replace("layers.0.", "midlayer.")


SPEC = HeadSpec(
    name="eagle3",
    head=Eagle3Head,
    drafter=FeatureDrafter,
    published=published,
    trained=TrainedEagle3,
    options=Eagle3Options,
    objective=FeatureObjective,
    exports=Exports(vllm="eagle3", sglang="EAGLE3", llama="draft-eagle3", openvino="eagle3"),
)
