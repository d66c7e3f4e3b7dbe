"""Which drafter a checkpoint holds, by its config and the names of its tensors."""

import os
from collections.abc import Mapping
from typing import Any

from outrider.core.place import place_of
from outrider.core.types import InputError
from outrider.heads.spec import HeadSpec
from outrider.lm.hf.checkpoint import CONFIG, read_config, read_names

PLAIN, STEERED, STEERING = "model", "steered", "steering.json"
"""The drafters that are transformers models, and the file that tells them apart."""


def drafter_at(path: str, kinds: Mapping[str, Any]) -> str:
    """The name of the drafter that a directory, a GGUF file or a hub id holds.

    Args:
        kinds: The drafters by name: classes, and the specs of heads.

    Raises:
        InputError: There is no config, or it is that of no drafter.
    """
    if place_of(path, "drafter").gguf is not None:
        return PLAIN
    config, names = read_config(path), read_names(path)
    for name, kind in kinds.items():
        if isinstance(kind, HeadSpec) and kind.published(config, names):
            return name
    if os.path.isfile(os.path.join(path, STEERING)):
        return STEERED
    architectures = config.get("architectures") or []
    if "model_type" in config and any("ForCausalLM" in str(each) or "LMHead" in str(each) for each in architectures):
        return PLAIN
    heads = ", ".join(name for name, kind in kinds.items() if isinstance(kind, HeadSpec))
    raise InputError(
        f"{path} holds no drafter that is known: its {CONFIG} has the architectures {architectures}; known are causal "
        f"language models of transformers, and {heads}"
    )
