"""Which drafter a checkpoint holds, by its config and the names of its tensors."""

import os
from collections.abc import Collection, Mapping
from typing import Any

from outrider.core.place import check_place
from outrider.core.types import InputError
from outrider.lm.hf.checkpoint import CONFIG, read_config, read_names

PLAIN, STEERED, STEERING = "model", "steered", "steering.json"
"""The drafters that are transformers models, and the file that tells them apart."""


def is_place(text: str) -> bool:
    """Whether a text is a directory, or looks like one or like a hub id.

    Example:
        >>> is_place("ngram"), is_place("org/name"), is_place("suffix:corpus=texts/all")
        (False, True, False)
    """
    return os.path.isdir(text) or "/" in text.partition(":")[0]


def drafter_at(path: str, kinds: Mapping[str, Any]) -> str:
    """The name of the drafter that a directory or a hub id holds.

    Args:
        kinds: The unbound drafters by name. Those of heads say what they recognise.

    Raises:
        InputError: There is no config, or it is that of no drafter.
    """
    check_place(path, "drafter")
    config, names = read_config(path), read_names(path)
    for name, make in kinds.items():
        if recognised(make, config, names):
            return name
    if os.path.isfile(os.path.join(path, STEERING)):
        return STEERED
    architectures = config.get("architectures") or []
    if "model_type" in config and any("ForCausalLM" in str(each) or "LMHead" in str(each) for each in architectures):
        return PLAIN
    heads = ", ".join(name for name, make in kinds.items() if is_head(make))
    raise InputError(
        f"{path} holds no drafter that is known: its {CONFIG} has the architectures {architectures}; known are causal "
        f"language models of transformers, and {heads}"
    )


def is_head(kind: object) -> bool:
    """Whether a drafter is a head of its own file."""
    return hasattr(kind, "published") or hasattr(kind, "recognises")


def recognised(kind: Any, config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Whether a checkpoint is of a kind of head."""
    if hasattr(kind, "published"):
        return bool(kind.published(config, names))
    return hasattr(kind, "recognises") and bool(kind.recognises(config, names))
