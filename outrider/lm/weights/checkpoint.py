"""Which checkpoints keep packed weights: GGUF files, AWQ and GPTQ."""

import torch
from transformers import PreTrainedConfig

from outrider.core.place import CheckpointPlace
from outrider.lm.hf.open import KeepBlocks, UnreadBlockModel, as_dtype
from outrider.lm.weights.gguf import BlockModel
from outrider.lm.weights.groups import METHODS, GroupModel, settings_of


def keep_packed(dtype: str | torch.dtype = "auto", *, revision: str | None = None, gguf: bool = True) -> KeepBlocks:
    """What opens a checkpoint of packed weights on a CPU and keeps them.

    Args:
        dtype: Of activations where the checkpoint is of AWQ or GPTQ; `auto` is bfloat16. GGUF files say theirs.
        revision: Branch, tag or commit of a hub id.
        gguf: Whether the blocks of GGUF files stay, too.
    """
    kind = as_dtype(dtype)

    def unread(
        place: CheckpointPlace, config: PreTrainedConfig, attn_implementation: str | None
    ) -> UnreadBlockModel | None:
        if place.file is not None:
            return BlockModel.of(place, config, attn_implementation) if gguf else None
        if settings_of(config).get("quant_method") not in METHODS:
            return None
        computed = torch.bfloat16 if isinstance(kind, str) else kind
        return GroupModel.of(place, config, attn_implementation, dtype=computed, revision=revision)

    return unread
