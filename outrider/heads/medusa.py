r"""Medusa: heads that each guess one depth of a draft from the target's last hidden state (Cai et al. 2024)."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import silu

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.heads.head import HeadFiles, TrainedHead
from outrider.heads.objective import HeadContext
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.last_state import (
    StateHeads,
    StateHeadsDrafter,
    StateHeadsObjective,
    StateHeadsOptions,
    randomise,
)
from outrider.learning.options import size
from outrider.lm.hf.checkpoint import TARGET, Checkpoint, TargetShape, build_module, factor
from outrider.lm.hf.checkpoint import size as size_in
from outrider.lm.tabular import TABLE_FEATURES
from outrider.lm.target_info import TargetInfo

NAME = "medusa"
"""The `model_type` of vLLM's form."""
_BLOCK = re.compile(r"(\d{1,2})\.(\d{1,2})\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"(\d{1,2})\.(\d{1,2})\.weight")
_OWN = re.compile(r"blocks\.(\d{1,2})\.layers\.(\d{1,2})\.(weight|bias)")
_PREFIXES = ("medusa_heads.", "medusa_head.")
_AROUND = ("model.", "transformer.", "lm_head.")
"""What the names of a model around the heads begin with. Its tensors are not read."""


@dataclass(frozen=True, kw_only=True)
class MedusaOptions(StateHeadsOptions):
    """Train Medusa heads: each guesses one depth of a draft from the target's last hidden state.

    The command ends with the tree that fits the heads' accuracies, for --tree.

    Attributes:
        layers: Residual layers of each head.
        shared: Use one copy of the target's output layer for all heads, which does not learn. Otherwise each head has
            one of its own, with as many weights as the target's.
        draft_vocab: How many tokens the head can guess: the most frequent learnt tokens of --data. By default all.
    """

    layers: int = size(1, least=0)
    shared: bool = size(False)
    draft_vocab: int | None = size(None, least=1)


@dataclass(frozen=True, kw_only=True)
class MedusaConfig:
    """The sizes of Medusa heads.

    Attributes:
        hidden_size: Width of the target's hidden states.
        vocab_size: Width of the target's logits.
        num_heads: Number of heads; head i guesses the i-th token behind the anchor.
        num_hidden_layers: Residual layers of each head.
        truncated_vocab_size: How many tokens the heads can guess; None: all.
        medusa_fc_bias: Whether the residual layers have a bias.
        original_lm_head: Whether all heads share one output layer.
        logit_scale: A factor of all logits.

    Raises:
        InputError: A number is below 1, or there are more tokens to guess than the target has.
    """

    hidden_size: int
    vocab_size: int
    num_heads: int = 5
    num_hidden_layers: int = 1
    truncated_vocab_size: int | None = None
    medusa_fc_bias: bool = False
    original_lm_head: bool = False
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hidden_size", "vocab_size", "num_heads", "truncated_vocab_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} of Medusa heads must be >= 1, got {value}")
        if self.num_hidden_layers < 0:
            raise InputError(f"num_hidden_layers of Medusa heads must be >= 0, got {self.num_hidden_layers}")
        if self.width > self.vocab_size:
            raise InputError(f"truncated_vocab_size must be at most {self.vocab_size}, got {self.width}")

    @property
    def width(self) -> int:
        """Width of the heads' logits."""
        return self.truncated_vocab_size or self.vocab_size


class Block(nn.Module):
    """Residual layers: $y + \\mathrm{SiLU}(W y)$ each. At the start $W = 0$, so that a block returns its input."""

    def __init__(self, size: int, num_layers: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=bias) for _ in range(num_layers))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        for layer in self.layers:
            hidden = hidden + silu(layer(hidden))
        return hidden


class MedusaHeads(StateHeads):
    """Heads of residual layers, each with an output layer of its own.

    The names of its tensors are those of vLLM's form.

    References:
        Cai et al. 2024. https://arxiv.org/abs/2401.10774
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config, self.max_depth = config, config.num_heads
        width, layers = config.hidden_size, config.num_hidden_layers
        self.blocks = nn.ModuleList(Block(width, layers, config.medusa_fc_bias) for _ in range(config.num_heads))
        count = 1 if config.original_lm_head else config.num_heads
        self.lm_heads = nn.ModuleList(nn.Linear(width, config.width, bias=False) for _ in range(count))
        self.token_map: Int[Tensor, " width"] | None
        self.register_buffer("token_map", torch.arange(config.width) if config.truncated_vocab_size else None)

    @classmethod
    def new(cls, options: MedusaOptions, context: HeadContext) -> "MedusaHeads":
        ids, info = context.frequent_tokens(options.draft_vocab), context.info
        config = MedusaConfig(
            hidden_size=info.hidden_size,
            vocab_size=info.vocab_size,
            num_heads=context.depth,
            num_hidden_layers=options.layers,
            truncated_vocab_size=None if ids is None else len(ids),
            original_lm_head=options.shared,
        )
        heads, output = cls(config), context.target.get_output_embeddings()
        heads.begin_from(None if output is None else output.weight, ids)
        return heads

    @classmethod
    def load(cls, checkpoint: Checkpoint, target: TargetInfo, trained: TrainedHead) -> "MedusaHeads":
        """Heads in the original form (`medusa_lm_head.pt`) or in vLLM's.

        The tensors say how many heads and layers there are; published configs of the original form do not.
        """
        path, raw_config = checkpoint.path, checkpoint.config
        if not published(raw_config, ()):
            raise InputError(
                f"{path} holds no Medusa heads: its config has no model_type 'medusa' and no medusa_num_heads"
            )
        read = checkpoint.tensors(_is_of_heads)
        tensors = _renamed({_name(name): tensor for name, tensor in read.items()})
        config = _sizes(raw_config, tensors, path, target.vocab_size)
        heads = build_module(lambda: cls(config), _sorted(_cut(tensors)), path)
        trained.check_target(checkpoint.target, config.hidden_size, target)
        trained.check_vocabulary(config.vocab_size, target)
        if heads.token_map is None:
            trained.check_vocabulary(config.width, target)
        elif int(heads.token_map.max()) >= target.vocab_size:
            raise InputError(f"token_map in {path} names tokens that this target does not have")
        return heads

    @property
    def ids(self) -> Int[Tensor, " width"] | None:  # type: ignore[override]
        """The tokens that the heads can guess, ascending; None: all."""
        return self.token_map

    @property
    def weight(self) -> Float[Tensor, "width hidden"]:
        """The weight of the first output layer; its device and dtype are those of all tensors."""
        return cast(nn.Linear, self.lm_heads[0]).weight

    def forward(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch hidden"]:
        """What a head's output layer reads."""
        return cast(Tensor, self.blocks[number](hidden))

    def logits(self, hidden: Float[Tensor, "*batch hidden"], number: int) -> Float[Tensor, "*batch width"]:
        """A head's logits, from what `forward` returns."""
        logits = cast(Tensor, self.lm_heads[0 if self.config.original_lm_head else number](hidden))
        return logits if self.config.logit_scale == 1 else self.config.logit_scale * logits

    @torch.no_grad()
    def begin_from(self, output: Float[Tensor, "vocab hidden"] | None, ids: Int[Tensor, " width"] | None) -> None:
        """Let every head begin as the target's output layer.

        Args:
            output: The weight of that layer; None leaves random weights.
            ids: The tokens that the heads can guess, ascending; None: all.
        """
        if ids is not None:
            self.token_map = ids.clone()
        if output is not None:
            chosen = output[: self.config.vocab_size] if ids is None else output[ids.to(output.device)]
            for layer in self.lm_heads:
                cast(nn.Linear, layer).weight.copy_(chosen)

    def freeze(self) -> None:
        if self.config.original_lm_head:
            self.lm_heads.requires_grad_(False)

    def record(self, target: TargetShape, dtype: torch.dtype, name: str) -> HeadFiles:
        """In vLLM's form."""
        config = self.config
        described = {
            "architectures": ["MedusaModel"],
            "model_type": NAME,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_hidden_layers,
            "max_paths": 64,
            "topk": 10,
            "truncated_vocab_size": config.width,
            "medusa_fc_bias": config.medusa_fc_bias,
            "original_lm_head": config.original_lm_head,
            "logit_scale": config.logit_scale,
            "torch_dtype": str(dtype).removeprefix("torch."),
            TARGET: target.record(),
        }
        return described, self.state_dict()

    def on_tables(self, vocab_size: int, seed: int) -> "MedusaHeads":
        config = MedusaConfig(hidden_size=TABLE_FEATURES, vocab_size=vocab_size, num_heads=self.max_depth)
        heads = MedusaHeads(config).double().eval()
        randomise(heads, seed)
        return heads


def published(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is Medusa heads, in the original form or in vLLM's."""
    return config.get("model_type") == NAME or "medusa_num_heads" in config


def _name(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def _is_of_heads(name: str) -> bool:
    """Whether a tensor belongs to heads, and not to a model around them."""
    return not _name(name).startswith(_AROUND)


def _renamed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the original form under the names of vLLM's."""
    if any(_OWN.fullmatch(name) for name in tensors):
        return dict(tensors)
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if match := _BLOCK.fullmatch(name):
            renamed[f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"] = tensor
        elif match := _OUTPUT.fullmatch(name):
            renamed[f"lm_heads.{match[1]}.weight"] = tensor
        else:
            renamed[name] = tensor
    return renamed


def _sizes(raw_config: Mapping[str, Any], tensors: Mapping[str, Tensor], path: str, vocab: int | None) -> MedusaConfig:
    """The sizes that the tensors show."""
    outputs = [tensor for name, tensor in tensors.items() if name.startswith("lm_heads.")]
    blocks = {(int(match[1]), int(match[2])) for name in tensors if (match := _OWN.fullmatch(name))}
    if not outputs or any(tensor.dim() != 2 for tensor in outputs):
        raise InputError(f"the weights of {path} hold no output layers of Medusa heads")
    num_heads = 1 + max((head for head, _ in blocks), default=len(outputs) - 1)
    token_map = tensors.get("token_map")
    width, hidden_size = outputs[0].shape
    # Heads without a list guess all tokens of their target.
    vocabulary = size_in(raw_config, "vocab_size", path, default=vocab if vocab and token_map is not None else width)
    if token_map is not None:
        _check_list(token_map, vocabulary, path)
    return MedusaConfig(
        hidden_size=hidden_size,
        vocab_size=vocabulary,
        num_heads=num_heads,
        num_hidden_layers=1 + max((layer for _, layer in blocks), default=-1),
        truncated_vocab_size=None if token_map is None else len(token_map),
        medusa_fc_bias=any(name.endswith(".bias") for name in tensors),
        original_lm_head=bool(raw_config.get("original_lm_head")) and len(outputs) == 1,
        logit_scale=factor(raw_config, "logit_scale", path),
    )


def _check_list(chosen: Tensor, vocab_size: int, path: str) -> None:
    """Raise InputError if the tokens that heads can guess are no list of different tokens."""
    whole = chosen.dim() == 1 and not chosen.is_floating_point() and chosen.dtype is not torch.bool and len(chosen)
    if not whole or len(chosen.unique()) < len(chosen) or not 0 <= int(chosen.min()) <= int(chosen.max()) < vocab_size:
        raise InputError(f"token_map in {path} must be a list of different tokens below {vocab_size}")


def _cut(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Output layers with the rows of the tokens that the heads can guess, as vLLM cuts them."""
    chosen = tensors.get("token_map")
    if chosen is None:
        return dict(tensors)
    outputs = {
        name: t[chosen.long()] for name, t in tensors.items() if name.startswith("lm_heads.") and len(t) > len(chosen)
    }
    return {**tensors, **outputs}


def _sorted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same heads with their tokens in ascending order."""
    chosen = tensors.get("token_map")
    if chosen is None:
        return dict(tensors)
    order = chosen.argsort()
    outputs = {name: tensor[order] for name, tensor in tensors.items() if name.startswith("lm_heads.")}
    return {**tensors, **outputs, "token_map": chosen[order].long()}


SPEC = HeadSpec(
    name=NAME,
    head=MedusaHeads,
    drafter=StateHeadsDrafter,
    published=published,
    options=MedusaOptions,
    objective=StateHeadsObjective,
    exports=Exports(vllm="medusa", draws=False, instead="eagle3"),
)
