r"""Hydra heads: Medusa heads that read the draft tokens before them (Ankner et al. 2024)."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as short
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.parts.layer_config import layer_config, qkv_bias_of
from outrider.heads.parts.layers import DecoderLayer, Rotary, norm_of
from outrider.heads.sequential import SequentialHead
from outrider.lm.forwards.head_package import Kind
from outrider.lm.head import KVCache
from outrider.lm.hf.checkpoint import made, read_config, read_tensors, size
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead
from outrider.lm.hf.open import open_config

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
        found: Tensor = self.res_connection(states) + silu(self.linear(states))
        return found


class HydraHeads(SequentialHead):
    r"""Head $i$ guesses from $[f_n; E(x_{n+1}); E(y_1); \ldots; E(y_i)]$: the target's state, the anchor, and the draft
    tokens before.

    The names of its tensors are those of its authors.

    Args:
        config: The sizes.
        ends: The target's ends.

    References:
        Ankner et al. 2024. https://arxiv.org/abs/2402.05109
    """

    def __init__(self, config: HydraConfig, ends: EmbeddingAndHead) -> None:
        super().__init__()
        self.config, self.ends = config, ends
        self.hidden_size, self.max_depth = config.hidden_size, config.num_heads
        size = config.hidden_size

        def layers(head: int) -> nn.Sequential:
            first = ResidualLayer((head + 2) * size if config.grounded else size, size)
            return nn.Sequential(first, *(ResidualLayer(size, size) for _ in range(config.num_layers - 1)))

        self.hydra_mlp = nn.ModuleList(layers(i) for i in range(config.num_heads))
        outputs = (nn.Linear(size, config.vocab_size, bias=config.bias) for _ in range(config.num_heads))
        self.hydra_lm_head = nn.ModuleList(outputs)

    @property
    def weight(self) -> Tensor:
        return self.hydra_lm_head[0].weight  # type: ignore[return-value]

    def begin(self, hidden: Float[Tensor, "n hidden"]) -> Float[Tensor, "n state"]:
        return hidden

    def read(self, state: Float[Tensor, "n before"], tokens: Int[Tensor, " n"], depth: int) -> Float[Tensor, "n state"]:
        if not self.config.grounded:
            return state
        return torch.cat([state, self.ends.embed(tokens).to(state.device, state.dtype)], -1)

    def logits(self, state: Float[Tensor, "n state"], depth: int) -> Float[Tensor, "n vocab"]:
        found: Tensor = self.hydra_lm_head[depth](self.hydra_mlp[depth](state))
        return found


class PrefixLayer(nn.Module):
    """The prefix layer of Hydra++: a decoder layer over the target's normed states, whose normed output the heads read.

    Attributes:
        feature_size: Width of these states.
        vocab_size: It makes no logits.

    Args:
        config: The sizes of a layer of the target.
        qkv_bias: As for `Attention`.
    """

    kinds: ClassVar[Sequence[Kind]] = (Kind(logits=False),)

    def __init__(self, config: PreTrainedConfig, qkv_bias: bool | None = None) -> None:
        super().__init__()
        self.feature_size, self.vocab_size = config.hidden_size, 1
        self.layers = nn.ModuleList([DecoderLayer(config, 0, qkv_bias=qkv_bias)])
        self.norm, self.rotary = norm_of(config), Rotary(config)

    def forward(
        self,
        tokens: Int[Tensor, "rows width"],
        features: Float[Tensor, "rows width dim"],
        positions: Int[Tensor, "rows width"],
        mask: Bool[Tensor, "rows 1 width keys"],
        cache: KVCache,
    ) -> Float[Tensor, "rows width hidden"]:
        """What the heads read at each position."""
        hidden: Tensor = self.layers[0](features, self.rotary(features, positions), mask, cache)
        return self.norm(hidden)

    def logits(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch one"]:
        """Zeros: there are none."""
        return torch.zeros_like(hidden[..., :1])


def is_hydra(config: Mapping[str, Any]) -> bool:
    """Whether a config is that of Hydra heads."""
    return "hydra_num_heads" in config


def read_hydra(
    path: str, ends: EmbeddingAndHead, *, base: str | None = None, revision: str | None = None
) -> tuple[HydraHeads, PrefixLayer | None]:
    """The heads in a directory or at a hub id, and their prefix layer if they have one.

    The tensors say how many heads and layers there are.

    Args:
        ends: The target's ends.
        base: Directory or hub id of the target, whose config says what a prefix layer is like; None: as the heads'
            config names it.

    Raises:
        InputError: There are none, they are of an unknown kind, or their tensors do not fit together.
    """
    given = read_config(path, revision=revision)
    if not is_hydra(given):
        raise InputError(f"{path} holds no Hydra heads: its config has no hydra_num_heads")
    kind = given.get("hydra_head_arch", "mlp")
    if kind not in ARCHITECTURES:
        raise InputError(
            f"the Hydra heads in {path} are of the kind {short(kind)}; known are {', '.join(ARCHITECTURES)}"
        )
    read = read_tensors(path, revision=revision)
    tensors = _renamed(read, 2 if kind == "prefix-mlp" else 1)
    sizes = _sizes(given, tensors, path)
    heads = made(lambda: HydraHeads(sizes, ends), tensors, path)
    own = {name.removeprefix(PREFIX): tensor for name, tensor in read.items() if name.startswith(PREFIX)}
    own = {
        name: tensor for name, tensor in own.items() if not name.startswith("embed_tokens") and "inv_freq" not in name
    }
    if kind == "mlp" and not own:
        return heads.eval(), None
    place = base or given.get("base_model_name_or_path")
    if not isinstance(place, str) or not place:
        raise InputError(f"config.json of {path} does not name the target of the heads; say it with base=...")
    layers = layer_config(open_config(place).get_text_config().to_dict(), place)
    prefix = made(lambda: PrefixLayer(layers, qkv_bias_of(own)), own, path)
    return heads.eval(), prefix.eval()


def _renamed(tensors: Mapping[str, Tensor], every: int) -> dict[str, Tensor]:
    """The tensors of the heads, and those that belong to no part. Where dropout stands between layers, each second
    place is a layer.
    """
    found = {}
    for name, tensor in tensors.items():
        if layer := _LAYER.fullmatch(name):
            found[f"hydra_mlp.{layer[1]}.{int(layer[2]) // every}.{layer[3]}.{layer[4]}"] = tensor
        elif output := _OUTPUT.fullmatch(name):
            found[f"hydra_lm_head.{output[1]}.{output[2]}"] = tensor
        elif not name.startswith((PREFIX, EMBEDDING)):
            found[name] = tensor
    return found


def _sizes(given: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str) -> HydraConfig:
    """The sizes that the tensors show."""
    output = tensors.get("hydra_lm_head.0.weight")
    layers = {(int(found[1]), int(found[2])) for name in tensors if (found := _LAYER.fullmatch(name))}
    if output is None or output.dim() != 2 or not layers:
        raise InputError(f"the weights of {path} hold no Hydra heads")
    return HydraConfig(
        hidden_size=output.shape[1],
        vocab_size=output.shape[0],
        num_heads=1 + max(head for head, _ in layers),
        num_layers=1 + max(layer for _, layer in layers),
        grounded="hydra_mlp.0.0.res_connection.weight" in tensors,
        offset=size(given, "hidden_state_offset", path, default=0, least=0),
        bias="hydra_lm_head.0.bias" in tensors,
    )
