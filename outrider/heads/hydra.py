r"""Hydra: Medusa heads that read the draft tokens before them; Hydra++ has a prefix layer (Ankner et al. 2024)."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from outrider.core.types import InputError, Request, Running
from outrider.drafters.exports import Exports
from outrider.drafters.protocol import Observed
from outrider.heads.head import TrainedHead
from outrider.heads.parts.layer_config import layer_config, qkv_bias_of
from outrider.heads.parts.layers import DecoderLayer, Rotary, norm_of
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.last_state import LastStateHead, randomise
from outrider.heads.trunks.sequential import SequentialDrafter, SequentialHead, SequentialState
from outrider.lm.forwards.compilable import ForwardKind
from outrider.lm.head import HeadLM
from outrider.lm.hf.checkpoint import Checkpoint, build_module, size
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.open import open_config
from outrider.lm.protocol import Segment
from outrider.lm.slots.batch import upload
from outrider.lm.slots.head_inputs import HeadInputs
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo

PREFIX = "prefix_embeding_layer."
"""What the names of a prefix layer begin with, as its authors spell it."""
EMBEDDING = "input_embed_fn."
"""What the names of a copy of the target's embedding begin with. It is not read."""
ARCHITECTURES = ("mlp", "prefix-mlp")
"""The kinds of Hydra heads that are known; the second has a prefix layer."""
_LAYER = re.compile(r"hydra_mlp\.(\d{1,2})\.(\d{1,2})\.(linear|res_connection)\.(weight|bias)")
_OUTPUT = re.compile(r"hydra_lm_head\.(\d{1,2})\.(?:1\.)?(weight|bias)")


@dataclass(frozen=True, kw_only=True)
class HydraConfig:
    """The sizes of Hydra heads.

    Attributes:
        hidden_size: Width of the target's hidden states.
        vocab_size: Width of the logits.
        num_heads: How many tokens they guess.
        num_layers: Residual layers of each head.
        grounded: Whether they read the draft tokens. Otherwise they are Medusa heads.
        offset: They read the hidden state this many layers before the end; 0: the last one, behind the final norm.
        bias: Whether the output layers have a bias.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 4
    num_layers: int = 1
    grounded: bool = True
    offset: int = 0
    bias: bool = True


class ResidualLayer(nn.Module):
    r"""$R x + \mathrm{SiLU}(W x)$ with $R$ the identity where input and output are equally wide."""

    def __init__(self, input_size: int, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(input_size, size)
        self.res_connection = nn.Linear(input_size, size) if input_size != size else nn.Identity()

    def forward(self, states: Float[Tensor, "n input"]) -> Float[Tensor, "n size"]:
        output: Tensor = self.res_connection(states) + silu(self.linear(states))
        return output


class HydraHeads(SequentialHead):
    r"""Head $i$ guesses from $[f_n; E(x_{n+1}); E(y_1); \ldots; E(y_i)]$: the target's state, the anchor, and the draft
    tokens before.

    The names of its tensors are those of its authors.

    Args:
        config: The sizes.
        embedding_and_head: Those of the target.
        prefix: The prefix layer, whose output they read in the place of the target's state; None: there is none.

    References:
        Ankner et al. 2024. https://arxiv.org/abs/2402.05109
    """

    embedding_and_head: EmbeddingAndHead

    def __init__(
        self, config: HydraConfig, embedding_and_head: EmbeddingAndHead, prefix: "PrefixLayer | None" = None
    ) -> None:
        super().__init__()
        self.config, self.embedding_and_head, self.max_depth = config, embedding_and_head, config.num_heads
        # The tuple keeps torch from registering a layer that runs by itself.
        self.prefix = (prefix,)
        size = config.hidden_size

        def layers(head: int) -> nn.Sequential:
            first = ResidualLayer((head + 2) * size if config.grounded else size, size)
            return nn.Sequential(first, *(ResidualLayer(size, size) for _ in range(config.num_layers - 1)))

        self.hydra_mlp = nn.ModuleList(layers(i) for i in range(config.num_heads))
        outputs = (nn.Linear(size, config.vocab_size, bias=config.bias) for _ in range(config.num_heads))
        self.hydra_lm_head = nn.ModuleList(outputs)

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "HydraHeads":
        """The heads, and their prefix layer if they have one. The tensors say how many heads and layers there are."""
        path, raw_config = checkpoint.path, checkpoint.config
        if not published(raw_config, ()):
            raise InputError(f"{path} holds no Hydra heads: its config has no hydra_num_heads")
        kind = raw_config.get("hydra_head_arch", "mlp")
        if kind not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise InputError(f"the Hydra heads in {path} are of the kind {short(kind)}; known are {known}")
        read = checkpoint.tensors()
        tensors = _renamed(read, 2 if kind == "prefix-mlp" else 1)
        config = _sizes(raw_config, tensors, path)
        prefix = PrefixLayer.of(checkpoint, read, trained.base if isinstance(trained, TrainedHydra) else None)
        heads = build_module(lambda: cls(config, target.embedding_and_head(), prefix), tensors, path)
        trained.check_target(checkpoint.target, config.hidden_size, target)
        trained.check_vocabulary(config.vocab_size, target)
        if not 0 <= config.offset <= target.num_layers:
            raise InputError(
                f"the heads in {path} read the state {config.offset} layers before the end, and this target has "
                f"{target.num_layers} layers"
            )
        return heads

    def reads(self, num_layers: int) -> tuple[int, ...]:
        return (num_layers - self.config.offset,)

    @property
    def weight(self) -> Tensor:
        return self.hydra_lm_head[0].weight  # type: ignore[return-value]

    def begin(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n state"]:
        return hidden

    def read(self, state: Float[Tensor, "n before"], tokens: Int[Tensor, " n"], depth: int) -> Float[Tensor, "n state"]:
        if not self.config.grounded:
            return state
        return torch.cat([state, self.embedding_and_head.embed(tokens).to(state.device, state.dtype)], -1)

    def logits(self, state: Float[Tensor, "n state"], depth: int) -> Float[Tensor, "n vocab"]:
        logits: Tensor = self.hydra_lm_head[depth](self.hydra_mlp[depth](state))
        return logits

    def on_tables(self, vocab_size: int, seed: int) -> "HydraHeads":
        table, same = nn.Embedding(vocab_size, TABLE_FEATURES).double().requires_grad_(False), nn.Identity()
        randomise(table, seed)
        config = HydraConfig(hidden_size=TABLE_FEATURES, vocab_size=vocab_size, num_heads=self.max_depth)
        head = HydraHeads(config, EmbeddingAndHead(embed=table, norm=same, head=same)).double().eval()
        randomise(head, seed)
        return head


class PrefixLayer(nn.Module):
    """The prefix layer of Hydra++: a decoder layer over the target's normed states, whose normed output the heads read.

    Attributes:
        feature_size: Width of these states.
        vocab_size: It makes no logits.

    Args:
        config: The sizes of a layer of the target.
        qkv_bias: As for `Attention`.
    """

    kinds: ClassVar[Sequence[ForwardKind]] = (ForwardKind(logits=False),)

    def __init__(self, config: PreTrainedConfig, qkv_bias: bool | None = None) -> None:
        super().__init__()
        self.feature_size, self.vocab_size = config.hidden_size, 1
        self.layers = nn.ModuleList([DecoderLayer(config, 0, qkv_bias=qkv_bias)])
        self.norm, self.rotary = norm_of(config), Rotary(config)

    @classmethod
    def of(cls, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], base: str | None) -> "PrefixLayer | None":
        """The prefix layer of a checkpoint; None if it has none.

        Args:
            tensors: All its tensors.
            base: As of `TrainedHydra`.

        Raises:
            InputError: Nothing says what it is like, or its tensors do not fit together.
        """
        path, config = checkpoint.path, checkpoint.config
        prefix_tensors = {
            name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)
        }
        prefix_tensors = {
            name: prefix_tensors[name]
            for name in prefix_tensors
            if not name.startswith("embed_tokens") and "inv_freq" not in name
        }
        if config.get("hydra_head_arch", "mlp") == "mlp" and not prefix_tensors:
            return None
        place = base or config.get("base_model_name_or_path")
        if not isinstance(place, str) or not place:
            raise InputError(f"config.json of {path} does not name the target of the heads; say it with base=...")
        layers = layer_config(open_config(place).get_text_config().to_dict(), place)
        return build_module(lambda: cls(layers, qkv_bias_of(prefix_tensors)), prefix_tensors, path)

    def forward(self, inputs: HeadInputs) -> Float[Tensor, "rows width hidden"]:
        """What the heads read at each position."""
        features = inputs.needed_features
        hidden: Tensor = self.layers[0](features, self.rotary(features, inputs.positions), inputs)
        return self.norm(hidden)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch one"]:
        """Zeros: there are none."""
        return torch.zeros_like(hidden[..., :1])


@dataclass(kw_only=True)
class HydraState(SequentialState):
    """What Hydra heads keep of a request; changes in place.

    Attributes:
        slot: Where the prefix layer keeps the request; None without one.
    """

    slot: int | None = None


@dataclass(frozen=True, kw_only=True)
class HydraDrafter(SequentialDrafter[HydraState]):
    """Guess by `HydraHeads`. With a prefix layer, that layer reads the target's states of all positions, and the heads
    read its newest output.

    Attributes:
        prefix: The prefix layer.
    """

    keeps_cache: ClassVar[bool] = True
    state: ClassVar[type[Any]] = HydraState

    prefix: HeadLM | None = None

    @classmethod
    def fields_of(cls, head: LastStateHead, target: TargetInfo, trained: TrainedHead) -> dict[str, Any]:
        fields = super().fields_of(head, target, trained)
        [layer] = fields["head"].prefix
        return fields | {"prefix": None if layer is None else trained.lm(layer, target)}

    @property
    def max_context(self) -> int | None:
        return None if self.prefix is None else self.prefix.max_context

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        return {**super().modules, **({} if self.prefix is None else {"prefix": self.prefix.module})}

    def features(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n hidden"]:
        return super().features(hidden) if self.prefix is None else hidden

    def open(self, request: Request) -> HydraState:
        return HydraState(slot=None if self.prefix is None else self.prefix.open())

    def observe(self, states: Sequence[Running], observed: Observed) -> None:
        prefix = self.prefix
        if prefix is None:
            super().observe(states, observed)
            return
        features = self.norm(observed.taps[self.tap]).to(prefix.device, prefix.dtype, non_blocking=True)
        [tokens], segments = upload([observed.tokens], prefix.device), []
        for i, state in enumerate(states):
            slot, first, end = _slot(self.state_of(state)), int(observed.offsets[i]), int(observed.offsets[i + 1])
            end = min(end, first + prefix.max_context - prefix.length(slot))
            segments.append(Segment(slot=slot, tokens=tokens[first:end], features=features[first:end], logits="none"))
        outputs = cast(Tensor, prefix.extend(segments).features)
        prefix.commit({segment.slot: range(len(segment.tokens)) for segment in segments})
        end = 0
        for state, segment in zip(states, segments, strict=True):
            drafter_state, end = self.state_of(state), end + len(segment.tokens)
            drafter_state.num_seen = prefix.length(segment.slot)
            if len(segment.tokens):
                drafter_state.newest = outputs[end - 1].clone()

    def reuse(self, state: object, request: Request, length: int) -> HydraState:
        drafter_state = self.checked(state)
        if self.prefix is not None:
            self.prefix.truncate(_slot(drafter_state), self.needs(drafter_state, length))
        return replace(super().reuse(state, request, length), slot=drafter_state.slot)

    def fork(self, state: object, request: Request, length: int) -> HydraState:
        drafter_state = self.checked(state)
        slot = (
            None if self.prefix is None else self.prefix.copy(_slot(drafter_state), self.needs(drafter_state, length))
        )
        return replace(super().fork(state, request, length), slot=slot)

    def close(self, state: object) -> None:
        if self.prefix is not None:
            self.prefix.release(_slot(self.checked(state)))

    def cast(self, target_info: TargetInfo) -> "HydraDrafter":
        prefix = None if self.prefix is None else self.prefix.cast(target_info.dtype)
        return replace(super().cast(target_info), prefix=prefix)

    def on_tables(self, vocab_size: int, seed: int) -> "HydraDrafter":
        return replace(super().on_tables(vocab_size, seed), prefix=None)


@dataclass(frozen=True, kw_only=True)
class TrainedHydra(TrainedHead):
    """Hydra heads on disk.

    Attributes:
        base: Directory or hub id of the target, whose config says what a prefix layer is like; by default as the heads'
            config names it.
    """

    base: str | None = None


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is Hydra heads."""
    return "hydra_num_heads" in config


def _slot(drafter_state: HydraState) -> int:
    if drafter_state.slot is None:
        raise RuntimeError("this request has no slot of the prefix layer")
    return drafter_state.slot


def _renamed(tensors: Mapping[str, Tensor], every: int) -> dict[str, Tensor]:
    """The tensors of the heads, and those that belong to no part. Where dropout stands between layers, each second
    place is a layer.
    """
    renamed = {}
    for name, tensor in tensors.items():
        if layer := _LAYER.fullmatch(name):
            renamed[f"hydra_mlp.{layer[1]}.{int(layer[2]) // every}.{layer[3]}.{layer[4]}"] = tensor
        elif output := _OUTPUT.fullmatch(name):
            renamed[f"hydra_lm_head.{output[1]}.{output[2]}"] = tensor
        elif not name.startswith((PREFIX, EMBEDDING)):
            renamed[name] = tensor
    return renamed


def _sizes(raw_config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> HydraConfig:
    """The sizes that the tensors show."""
    output = tensors.get("hydra_lm_head.0.weight")
    layers = {(int(match[1]), int(match[2])) for name in tensors if (match := _LAYER.fullmatch(name))}
    if output is None or output.dim() != 2 or not layers:
        raise InputError(f"the weights of {path} hold no Hydra heads")
    return HydraConfig(
        hidden_size=output.shape[1],
        vocab_size=output.shape[0],
        num_heads=1 + max(head for head, _ in layers),
        num_layers=1 + max(layer for _, layer in layers),
        grounded="hydra_mlp.0.0.res_connection.weight" in tensors,
        offset=size(raw_config, "hidden_state_offset", path, default=0, least=0),
        bias="hydra_lm_head.0.bias" in tensors,
    )


SPEC = HeadSpec(
    name="hydra",
    head=HydraHeads,
    drafter=HydraDrafter,
    published=published,
    trained=TrainedHydra,
    exports=Exports(instead="medusa"),
)
