"""Open an assistant all of whose layers read keys and values of its target.

Relied on in transformers (read and run in 5.23): the layers of `gemma4_text` ask their config's `kv_sharing_modes`, and
only when they are made. It refuses a model in which no layer makes keys and values, and every assistant is one.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from outrider.lm.hf.open import open_config, open_model


def open_assistant(
    path: str, *, dtype: torch.dtype, device: torch.device, revision: str | None = None
) -> PreTrainedModel:
    """The assistant in a directory or at a hub id.

    Raises:
        InputError: There is none, or transformers cannot load it.
    """
    config = open_config(path, revision=revision)
    with layers_that_share(type(config.get_text_config())):
        model = open_model(path, dtype=dtype, device=device, revision=revision, attn_implementation="sdpa")
    return model.requires_grad_(False)


@contextmanager
def layers_that_share(kind: type[PreTrainedConfig]) -> Iterator[None]:
    """Inside it, a model with a text config of this class may have only layers that share others' keys and values."""
    original = vars(kind).get("kv_sharing_modes")
    if not isinstance(original, property):
        yield
        return

    def modes(config: PreTrainedConfig) -> list[str | None]:
        if config.num_kv_shared_layers == config.num_hidden_layers:
            return ["reuse"] * config.num_hidden_layers
        listed: list[str | None] = original.__get__(config)
        return listed

    kind.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        kind.kv_sharing_modes = original
