r"""DFlash: a head that guesses a whole block of tokens in one forward, from the target's hidden states.

DFlash 2026, https://arxiv.org/abs/2602.06036
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor
from transformers import AutoConfig

from outrider.core.types import InputError
from outrider.drafters.exports import Exports
from outrider.heads.parts.block_config import AttentionSpan, BlockConfig, CheckpointHints
from outrider.heads.parts.block_layouts import (
    AUTOMODEL,
    architecture_of,
    inner_of,
    kind_of,
    read_taps,
    sliding_layers,
    words_on_causality,
)
from outrider.heads.parts.layer_config import made_config
from outrider.heads.spec import HeadSpec
from outrider.heads.trunks.blocks import BlockDrafter, BlockObjective, BlockOptions, FusedBlockHead, TrainedBlocks
from outrider.lm.hf.checkpoint import MOST_COUNT, size
from outrider.lm.hf.open import reason_of

RELATIVES = {"Qwen3DFlyModel": "DFly", "LiLiCorrDraftModel": "LiLiCorr"}
"""The architectures of relatives that compute something else, and their names."""
ASSISTANTS = ("muse_glimmer_assistant",)
"""The model types of transformers that are such heads."""
OF_ASSISTANTS = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
"""Names of an assistant's tensors, and ours."""
OF_FILES = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Keys of an assistant's config that are no sizes."""
LATER = ("selector_rank", "selector_top_k")
"""Keys that a file of DFlash 2 has, whose architecture may be that of DFlash."""


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """Train a DFlash head: it guesses a block of tokens in one forward, each without the others."""


class DFlashHead(FusedBlockHead):
    """A head that guesses every token of a block without the others.

    References:
        DFlash 2026. https://arxiv.org/abs/2602.06036
    """

    name: ClassVar[str] = "dflash"
    architectures: ClassVar[Sequence[str]] = ("DFlashDraftModel", AUTOMODEL, *RELATIVES)
    speculators: ClassVar[str | None] = "DFlashSpeculator"

    @classmethod
    def published(cls, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """As of all heads; an assistant of transformers is such a head too. A causal one is a JetSpec head."""
        if kind_of(config) is not None:
            return super().published(config, names)
        return config.get("model_type") in ASSISTANTS or (is_plain(config) and words_on_causality(config) != {True})

    @classmethod
    def read_config(cls, config: Mapping[str, Any], path: str, hints: CheckpointHints) -> BlockConfig:
        relative = next((RELATIVES[name] for name in config.get("architectures") or () if name in RELATIVES), None)
        if relative is not None:
            raise InputError(f"the head in {path} is a {relative} head, which is not supported; give a {cls.name} head")
        if config.get("model_type") in ASSISTANTS:
            return _of_assistant(config, path)
        return super().read_config(config, path, hints)

    @classmethod
    def rename(cls, tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
        named = super().rename(tensors, config)
        return {OF_ASSISTANTS.get(name, name): tensor for name, tensor in named.items()}


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether an author's file has the architecture of DFlash, and neither the projector nor the selector of another
    head.
    """
    inner = inner_of(config)
    plain = inner.get("projector_type") in (None, DFlashHead.name) and all(inner.get(key) is None for key in LATER)
    return plain and architecture_of(config) in DFlashHead.architectures


def _of_assistant(config: Mapping[str, Any], path: str) -> BlockConfig:
    """The sizes of an assistant of Muse Glimmer, whose file leaves out what is the default of its class. It has no
    vocabulary of its own. Its layers with a window w see positions up to a distance of w, as their masks in
    transformers say.
    """
    try:
        assistant = AutoConfig.for_model(**{key: value for key, value in config.items() if key not in OF_FILES})
    except Exception as error:
        raise InputError(f"the config of the head in {path} is refused by transformers: {reason_of(error)}") from error
    sizes = {name: getattr(assistant, name, None) for name in ("block_size", "mask_token_id", "sliding_window")}
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act")
    shared = {name: getattr(assistant, name) for name in (*same, *more)}
    near = AttentionSpan(window=size(sizes, "sliding_window", path) + 1)
    return BlockConfig(
        layers=made_config("qwen3", {"vocab_size": 0, **shared}, path, least_vocab=0),
        block_size=size(sizes, "block_size", path, least=2, most=MOST_COUNT),
        mask_id=size(sizes, "mask_token_id", path, least=0),
        taps=read_taps(assistant.target_layer_ids, 1, path),
        target_size=assistant.hidden_size,
        sights=tuple(near if slides else AttentionSpan() for slides in sliding_layers(assistant, path)),
    )


SPEC = HeadSpec(
    name="dflash",
    head=DFlashHead,
    drafter=BlockDrafter,
    published=DFlashHead.published,
    trained=TrainedBlocks,
    options=DFlashOptions,
    objective=BlockObjective,
    exports=Exports(vllm="dflash", sglang="DFLASH", llama="draft-dflash", instead="eagle3"),
)
