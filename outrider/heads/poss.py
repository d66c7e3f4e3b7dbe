r"""The files of heads with position specialists (PosS): the tensors of an EAGLE or EAGLE-3 head, and one more layer for
each further specialist.

Huang et al. 2025, https://arxiv.org/abs/2506.03566
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from outrider.core.types import InputError
from outrider.heads.checkpoint import KIND, MOST_COUNT, TargetShape, load_into, size, write_head
from outrider.heads.eagle import EagleFile, EagleHead, eagle_config, has_specialists
from outrider.heads.eagle3 import Eagle3Head
from outrider.heads.eagle3_files import Answers, Eagle3File, eagle3_record
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead

NAME, STRIDE = "poss", "steps_per_specialist"
"""The value of `KIND`, and the key of a config that says how many draft steps each specialist takes."""
LAYER = re.compile(r"(?:model\.)?layers\.(\d{1,3})\.(.*)")


@dataclass(frozen=True, kw_only=True)
class PossFile:
    """A checkpoint with position specialists, ours or one of its authors, before it is bound to a target.

    Attributes:
        trunk: The head whose layer is the first specialist.
        further: The tensors of each further specialist's layer.
        stride: Draft steps of each specialist.
    """

    path: str
    trunk: EagleFile | Eagle3File
    further: tuple[Mapping[str, Tensor], ...]
    stride: int

    @classmethod
    def of(
        cls, path: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, stride: int | None = None
    ) -> "PossFile":
        """A checkpoint by its two files.

        Args:
            stride: Draft steps of each specialist, where the config does not say it.

        Raises:
            InputError: Nobody says it, or transformers refuses the config.
        """
        if config.get(STRIDE) is None and stride is None:
            raise InputError(
                f"the config of {path} does not say how many draft steps each specialist takes; add stride=1, 2 or 3 "
                "behind the path, as in poss:path=...,stride=3"
            )
        shared: dict[str, Tensor] = {}
        layers: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            found = LAYER.fullmatch(name)
            if found is None or found[1] == "0":
                shared[name] = tensor
            elif not name.endswith("rotary_emb.inv_freq"):
                layers.setdefault(int(found[1]), {})[found[2]] = tensor
        if "transformer_layer_config" not in config:
            config = {**config, "num_hidden_layers": 1}
        fused = any(name.endswith("layers.0.hidden_norm.weight") for name in shared)
        kind: type[EagleFile] | type[Eagle3File] = Eagle3File if fused else EagleFile
        return cls(
            path=path,
            trunk=kind.of(path, config, shared),
            further=tuple(layers[number] for number in sorted(layers)),
            stride=size(config, STRIDE, path, default=stride, most=MOST_COUNT),
        )

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's hidden states."""
        return self.trunk.config.hidden_size if isinstance(self.trunk, EagleFile) else self.trunk.target_hidden_size

    @property
    def vocab_size(self) -> int:
        """Tokens that the target has."""
        return int(self.trunk.config.vocab_size if isinstance(self.trunk, EagleFile) else self.trunk.layer.vocab_size)

    def head(
        self, ends: EmbeddingAndHead, *, num_layers: int, vocab_size: int, answers: Answers | None = None
    ) -> EagleHead | Eagle3Head:
        """The head, as `Eagle3File.head` makes it. Raises InputError if the tensors are not those of such a head."""
        head: EagleHead | Eagle3Head
        if isinstance(self.trunk, EagleFile):
            head = self.trunk.head(ends, vocab_size)
        else:
            head = self.trunk.head(ends, num_layers=num_layers, vocab_size=vocab_size, answers=answers or Answers())
        head.specialise(1 + len(self.further), self.stride)
        places = {str(i): cast(nn.ModuleList, layers)[0] for i, layers in enumerate(head.specialists, start=1)}
        named = {
            f"layers.{i}.{name}": tensor for i, own in enumerate(self.further, start=1) for name, tensor in own.items()
        }
        load_into(nn.ModuleDict({"layers": nn.ModuleDict(places)}), named, self.path)
        return head


def is_poss(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint has position specialists."""
    if KIND in config:
        return bool(config[KIND] == NAME)
    bare = {name.removeprefix("model.") for name in names}
    return "fc.weight" in bare and "layers.0.mlp.up_proj.weight" in bare and has_specialists(bare)


def write_poss(
    head: EagleHead | Eagle3Head, folder: Path, target: TargetShape, dtype: torch.dtype, *, name: str = ""
) -> None:
    """Write a head with specialists as its trunk is written, with layers 1, 2, ... for the further specialists.

    Args:
        name: The target's directory or hub id.
    """
    if isinstance(head, EagleHead):
        config, tensors = eagle_config(head, target, dtype), head.state_dict()
    else:
        config, tensors = eagle3_record(head, target, dtype, name=name)
    tensors = {_renamed(own): tensor for own, tensor in tensors.items()}
    write_head(folder, {**config, "architectures": ["PossHead"], KIND: NAME, STRIDE: head.stride}, tensors, dtype)


def _renamed(name: str) -> str:
    """The name of a tensor in files: `specialists.0.0.mlp` is `layers.1.mlp` there."""
    return re.sub(r"^specialists\.(\d+)\.0\.", lambda found: f"layers.{int(found[1]) + 1}.", name)
