"""The config files of heads that guess blocks, for other engines."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from outrider.core.types import InputError
from outrider.heads.parts.block_formats import SPECULATORS, AttentionSpan, BlockConfig, speculators_config
from outrider.heads.parts.layer_config import described
from outrider.lm.hf.checkpoint import TargetShape

NATIVE = {"dspark": "Qwen3DSparkModel", "dflash2": "DFlash2DraftModel"}
"""The architectures of the authors' layout; of all other heads it is that of DFlash."""
DFLASH = "DFlashDraftModel"
NOTHING: Mapping[str, Any] = MappingProxyType({})
VANILLA = "vanilla"
"""The one sequential head that vLLM and llama.cpp have."""


SCALE = "input_embedding_scale"
"""The factor of the embeddings in `dflash_config`, which DFlash 2 has there."""


def exported_config(
    config: BlockConfig, engine: str, target: TargetShape, name: str, extra: Mapping[str, Any] = NOTHING
) -> dict[str, Any]:
    """The config file that an engine reads.

    vLLM gets the layout of speculators where that can describe the head. There one key says whether windows are causal,
    and vLLM takes it for layers without windows too. So a head with causal layers is written in its authors' layout.

    Args:
        name: Public name of the target.
        extra: What `dflash_config` says of the sizes that the kind of head has alone.

    Raises:
        InputError: The engine does not know such a head.
    """
    if engine == "vllm" and config.method != "dspark" and config.from_anchor:
        raise InputError(
            f"vllm reads {config.method} heads whose first mask guesses the first token, and in this one the anchor's "
            f"position does; train one: outrider train {config.method}"
        )
    if config.method == "dspark" and config.markov != VANILLA and engine in ("vllm", "llama.cpp"):
        raise InputError(
            f"{engine} reads DSpark heads with the sequential head {VANILLA!r}, and this one is {config.markov!r}; "
            f"train one: outrider train dspark --markov {VANILLA}"
        )
    if engine == "llama.cpp" and (config.num_outputs is not None or config.num_embeddings is not None):
        raise InputError(
            f"llama.cpp reads {config.method} heads that use the target's embedding and output layer, and this one has "
            f"its own; train one: outrider train {config.method}"
        )
    if engine != "vllm" and any(sight != AttentionSpan() for sight in config.sights):
        raise InputError(
            f"{engine} reads {config.method} heads whose positions see all of the context and of their block, and this "
            f"one has windows or causal layers; vllm reads it, or train one: outrider train {config.method}"
        )
    if engine == "vllm" and config.method in SPECULATORS and not any(sight.causal for sight in config.sights):
        return speculators_config(config, name)
    if engine == "llama.cpp" and config.method == "dspark":
        return speculators_config(config, name)
    return native_layout(config, target, extra)


def native_layout(config: BlockConfig, target: TargetShape, extra: Mapping[str, Any] = NOTHING) -> dict[str, Any]:
    """The config file in the layout of the authors.

    Args:
        extra: As for `exported_config`.

    Raises:
        InputError: The layout cannot describe the head.
    """
    if config.embedding_scale != 1 and SCALE not in extra:
        raise InputError(f"no other engine scales the embeddings that a {config.method} head reads, and this one does")
    if not all(0 < tap < target.num_layers for tap in config.taps):
        raise InputError(
            f"the authors' layout of {config.method} heads names hidden states from 1 to {target.num_layers - 1}, and "
            f"this head reads {list(config.taps)}; train one with other --taps"
        )
    inner: dict[str, Any] = {
        "mask_token_id": config.mask_id,
        "target_layer_ids": [tap - 1 for tap in config.taps],
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        **extra,
    }
    layout = {
        **described(config.layers),
        "architectures": [NATIVE.get(config.method, DFLASH)],
        "block_size": config.block_size,
        "num_target_layers": target.num_layers,
        "target_hidden_size": config.target_size,
        "draft_vocab_size": config.num_outputs or config.layers.vocab_size,
        "sample_from_anchor": config.from_anchor,
        "dflash_config": inner,
    }
    causal = {sight.causal for sight in config.sights or (AttentionSpan(),)}
    if len(causal) == 1:
        # Two keys for one thing: engines differ in which they read.
        layout["is_causal"] = inner["causal"] = causal == {True}
    elif any(sight.causal != (sight.window is not None) for sight in config.sights):
        raise InputError(
            "the authors' layout has heads whose layers with a window are causal and whose other layers are not, or "
            "whose layers are all of one kind; this head is of neither kind, and no other engine reads it"
        )
    if config.method == "dspark":
        reads = config.confidence
        layout |= {
            "markov_rank": config.markov_rank,
            "markov_head_type": config.markov,
            "enable_confidence_head": reads is not None,
            "confidence_head_with_markov": reads == "markov",
        }
        inner["projector_type"] = "dspark"
    return layout
