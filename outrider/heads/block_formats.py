"""The config files of DFlash, DFlare and DSpark heads: vLLM's `speculators` layout, and those of their authors.

A layout that leaves open what a head computes is not guessed at: the user is asked.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

from transformers import AutoConfig, PreTrainedConfig

from outrider.heads.dflash import BlockConfig, Method, Sight
from outrider.types import InputError

SPECULATORS = {"dflash": "DFlashSpeculator", "dflare": "DFlareSpeculator", "dspark": "DSparkSpeculator"}
"""The architectures of the `speculators` layout."""
AUTHORS = {"DFlashDraftModel": "dflash", "QwenDFlareDraftModel": "dflare", "Qwen3DSparkModel": "dspark"}
"""The architectures of the authors' own layouts, and which head each is."""
ASSISTANTS = ("muse_glimmer_assistant",)
"""The model types of transformers that are DFlash heads."""
LATER = ("selector_rank", "conv_kernel_size", "conv_group_size")
"""Keys that only DFlash 2 has."""
ROTARY = ("rope_theta", "rope_scaling")
"""Keys of decoder layers that a config has in older files."""
_OF_FILES = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
VERSION = "0.5.0"
"""The version of the `speculators` layout that is written."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What a user says of a head whose files leave it open.

    Attributes:
        mask_token_id: The token that stands for an unknown token.
        sample_from_anchor: Whether the anchor's position guesses the first token.
    """

    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None


def method_of(found: Mapping[str, Any]) -> Method | None:
    """Which head a config describes; None if it is none of these.

    Example:
        >>> method_of({"speculators_model_type": "dspark"}), method_of({"architectures": ["DFlashDraftModel"]})
        ('dspark', 'dflash')
    """
    if found.get("model_type") in ASSISTANTS:
        return "dflash"
    named = found.get("speculators_model_type")
    if named is None:
        inner = _inner(found)
        if inner.get("projector_type") == "dspark":
            return "dspark"
        architectures = found.get("architectures") or [None]
        named = AUTHORS.get(architectures[0])
    return cast(Method, named) if named in get_args(Method) else None


def block_config(found: Mapping[str, Any], path: str, answers: Answers) -> BlockConfig:
    """The sizes of the head that a config describes.

    Args:
        path: Where the config lies, for messages.

    Raises:
        InputError: It describes no such head, lacks something, or leaves open what only the user can say.
    """
    method = method_of(found)
    if method is None:
        raise InputError(f"config.json of {path} describes no head of {', '.join(get_args(Method))}")
    _refuse_others(found, path)
    try:
        if found.get("model_type") in ASSISTANTS:
            return _assistant(found)
        if "speculators_model_type" in found:
            return _speculators(found, path, method, answers)
        return _authors(found, path, method, answers)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"config.json of {path} does not describe a {method} head: {error!r}") from error


def record(config: BlockConfig, target: str, architecture: str) -> dict[str, Any]:
    """The config file of a head in the `speculators` layout.

    Args:
        target: Directory or hub id of its target.
        architecture: The target's class.

    Raises:
        InputError: The layout cannot describe the head.
    """
    windows = {sight.causal for sight in config.sights if sight.window is not None}
    causal = any(sight.causal for sight in config.sights if sight.window is None)
    if causal or len(windows) > 1 or config.embedding_scale != 1:
        raise InputError(
            "the head cannot be written in the layout of speculators, which has no causal layers without a window and "
            "no scaled embeddings"
        )
    layers = config.layers.to_diff_dict() | {"model_type": config.layers.model_type}
    layers.pop("transformers_version", None)
    rotary = layers.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        # Engines with an older transformers read this key.
        layers["rope_theta"] = rotary["rope_theta"]
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.max_depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    own: dict[str, Any] = {}
    if config.method == "dflare":
        own = {"use_heterogeneous_kv": config.apart}
    elif config.method == "dspark":
        own = {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        reads = config.confidence
        own |= {"enable_confidence_head": reads is not None, "confidence_head_with_markov": reads == "markov"}
    return {
        "architectures": [SPECULATORS[config.method]],
        "speculators_model_type": config.method,
        "speculators_version": VERSION,
        "draft_vocab_size": config.num_outputs or config.layers.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_id,
        "aux_hidden_state_layer_ids": list(config.taps),
        "target_hidden_size": config.target_size,
        "sample_from_anchor": config.from_anchor,
        # vLLM takes false for causal layers without windows too.
        "sliding_window_non_causal": windows != {True},
        **own,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": [architecture]},
        },
    }


def _speculators(found: Mapping[str, Any], path: str, method: Method, answers: Answers) -> BlockConfig:
    """A head of the `speculators` layout. Its tap k is the state that enters layer k."""
    layers = _layers(found["transformer_layer_config"], path)
    size = int(found.get("block_size", 8))
    return BlockConfig(
        method=method,
        layers=layers,
        block_size=size,
        mask_id=_mask_id(found.get("mask_token_id"), path, answers),
        taps=_taps(found.get("aux_hidden_state_layer_ids"), 0, path),
        target_size=int(found.get("target_hidden_size") or layers.hidden_size),
        from_anchor=_from_anchor(found.get("sample_from_anchor"), found, method, size, path, answers),
        sights=_sights(layers, None, not found.get("sliding_window_non_causal", False), path),
        apart=method == "dflare" and bool(found.get("use_heterogeneous_kv", True)),
        markov=found.get("markov_head_type", "vanilla"),
        markov_rank=_rank(found.get("markov_rank"), method),
    )


def _authors(found: Mapping[str, Any], path: str, method: Method, answers: Answers) -> BlockConfig:
    """A head of an author's layout. Its layer k is the output of layer k, which enters layer k + 1."""
    inner = _inner(found)
    said = {**found, **inner}
    if said.get("attention_sink_bias"):
        raise InputError(f"the head in {path} has attention sinks, which are not supported")
    layers = _layers(found, path)
    taps = _taps(said.get("target_layer_ids"), 1, path)
    if found.get("num_target_layers") in taps:
        raise InputError(
            f"the head in {path} reads the output of the target's last layer, and its config does not say whether "
            "before or after the final norm; give a head that reads other layers"
        )
    size = int(said.get("block_size", 16))
    causal, other = inner.get("causal"), found.get("is_causal")
    if None not in (causal, other) and causal != other:
        raise InputError(f"config.json of {path} says both that blocks are causal and that they are not")
    return BlockConfig(
        method=method,
        layers=layers,
        block_size=size,
        mask_id=_mask_id(said.get("mask_token_id"), path, answers),
        taps=taps,
        target_size=int(said.get("target_hidden_size") or layers.hidden_size),
        from_anchor=_from_anchor(said.get("sample_from_anchor"), found, method, size, path, answers),
        sights=_sights(layers, inner, other if causal is None else causal, path),
        embedding_scale=float(said.get("input_embedding_scale") or 1.0),
        apart=method == "dflare",
        markov=said.get("markov_head_type", "vanilla"),
        markov_rank=_rank(said.get("markov_rank"), method),
    )


def _assistant(found: Mapping[str, Any]) -> BlockConfig:
    """An assistant of Muse Glimmer, whose file leaves out what is the default of its class. It has no vocabulary of its
    own. Its layers with a window w see positions up to a distance of w, as their masks in transformers say.
    """
    own = AutoConfig.for_model(**{key: value for key, value in found.items() if key not in _OF_FILES})
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act")
    layers = AutoConfig.for_model("qwen3", vocab_size=0, **{name: getattr(own, name) for name in (*same, *more)})
    near = Sight(window=own.sliding_window + 1)
    return BlockConfig(
        method="dflash",
        layers=layers,
        block_size=own.block_size,
        mask_id=own.mask_token_id,
        taps=tuple(layer + 1 for layer in own.target_layer_ids),
        target_size=own.hidden_size,
        sights=tuple(near if kind == "sliding_attention" else Sight() for kind in own.layer_types),
    )


def _refuse_others(found: Mapping[str, Any], path: str) -> None:
    """Raise InputError for relatives that compute something else."""
    said = {**found, **_inner(found)}
    if later := [key for key in LATER if said.get(key) is not None]:
        raise InputError(f"the head in {path} is a DFlash 2 head (it has {later[0]}), which is not supported")
    projector = said.get("projector_type")
    if projector not in (None, "dflash", "dflare", "dspark"):
        raise InputError(f"the head in {path} has the projector {projector!r}, which is not supported")
    if said.get("shift_label"):
        raise InputError(f"the head in {path} was trained with shift_label, which is not supported")


def _inner(found: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = found.get("dflash_config")
    return inner if isinstance(inner, Mapping) else {}


def _layers(given: Any, path: str) -> PreTrainedConfig:
    """The config of the decoder layers."""
    kind = given.get("model_type", "qwen3")
    known = {*AutoConfig.for_model(kind).to_dict(), *ROTARY} - {"model_type", "architectures"}
    layers = AutoConfig.for_model(kind, **{key: value for key, value in given.items() if key in known})
    if layers.hidden_act != "silu":
        raise InputError(f"the head in {path} has the activation {layers.hidden_act!r}, and silu is supported")
    if given.get("sliding_window") is not None:
        # A config class may drop it where `use_sliding_window` is not set.
        layers.sliding_window = given["sliding_window"]
    return layers


def _taps(given: Any, later: int, path: str) -> tuple[int, ...]:
    if not given:
        raise InputError(f"config.json of {path} does not say which layers of the target the head reads")
    return tuple(int(layer) + later for layer in given)


def _mask_id(given: Any, path: str, answers: Answers) -> int:
    chosen = answers.mask_token_id if given is None else given
    if chosen is None:
        raise InputError(
            f"config.json of {path} does not say which token stands for an unknown one; say it with mask_token_id=..."
        )
    return int(chosen)


def _from_anchor(
    given: Any, found: Mapping[str, Any], method: Method, block_size: int, path: str, answers: Answers
) -> bool:
    """Whether the anchor's position guesses. Without the key it follows from how many tokens are drafted."""
    if given is not None:
        return bool(given)
    methods = (found.get("speculators_config") or {}).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens")
    if drafted in (block_size, block_size - 1):
        return bool(drafted == block_size)
    if method != "dspark":
        return False
    if answers.sample_from_anchor is None:
        raise InputError(
            f"config.json of {path} does not say whether the anchor's position of a block guesses the first token, and "
            "engines differ; ask who trained the head, and say sample_from_anchor=true or sample_from_anchor=false"
        )
    return answers.sample_from_anchor


def _sights(
    layers: PreTrainedConfig, inner: Mapping[str, Any] | None, causal: bool | None, path: str
) -> tuple[Sight, ...]:
    """What each layer sees.

    Args:
        inner: An author's own settings; None in the `speculators` layout.
        causal: Whether blocks are causal: in layers with a window in the `speculators` layout, in all layers in an
            author's; None: in those with a window.
    """
    kinds = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    sliding = [kind == "sliding_attention" for kind in kinds]
    own = getattr(layers, "sliding_window", None)
    window = own if inner is None else inner.get("swa_window_size", own)
    if inner is not None and inner.get("use_swa") and not any(sliding):
        raise InputError(f"config.json of {path} asks for windows (use_swa) and names no layer that has one")
    if any(sliding) and not window:
        raise InputError(f"config.json of {path} has layers with a window and does not say how long it is")
    if own is not None and window != own and any(sliding):
        raise InputError(f"config.json of {path} names two windows: swa_window_size {window} and sliding_window {own}")
    length = None if window is None else int(window)
    everywhere = inner is not None and bool(causal)
    inside = causal is None or causal
    found = tuple(
        Sight(window=length, causal=bool(inside)) if slides else Sight(causal=everywhere) for slides in sliding
    )
    return found if any(sight != Sight() for sight in found) else ()


def _rank(given: Any, method: Method) -> int:
    return 0 if method != "dspark" else 256 if given is None else int(given)
