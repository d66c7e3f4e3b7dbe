"""The two layouts of heads that guess blocks: vLLM's `speculators`, and that of DFlash's authors.

They are read and written here as far as all such heads have them. What one head has beside that is in its own file. A
layout that leaves open what a head computes is not guessed at: the user is asked.
"""

from collections.abc import Collection, Mapping, Sequence
from reprlib import repr as short
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.parts.block_config import AttentionSpan, BlockConfig, CheckpointHints
from outrider.heads.parts.layer_config import described, made_config
from outrider.lm.hf.checkpoint import MOST_COUNT, TARGET, factor, nested, size, whole_numbers

AUTOMODEL = "Qwen3DFlashDraftModel"
"""The architecture of DFlash and JetSpec heads of NeMo AutoModel."""
KEYS = frozenset(
    {
        *("mask_token_id", "target_layer_ids", "num_target_layers", "block_size", "target_hidden_size"),
        *("causal", "causal_head", "use_swa", "swa_window_size", "sample_from_anchor"),
        *("projector_type", "input_embedding_scale", "attention_sink_bias"),
        *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    }
)
"""The keys of `dflash_config` that the files of all heads may have."""
SPECIAL = ("selector_rank", "selector_top_k", "shift_label")
"""Keys that change what a head computes wherever they stand. A head that knows one names it among its own keys."""
ON_TOP = ("sample_from_anchor", "causal_head")
"""Keys of `dflash_config` that other engines do not look for: they read `sample_from_anchor` and `is_causal` on top."""
ROTARY = ("rope_theta", "rope_scaling")
"""Keys of decoder layers that a config has in older files."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""The types of layers: with all of the context, and with a window."""
VERSION = "0.5.0"
"""The version of the `speculators` layout that is written."""


def kind_of(config: Mapping[str, Any]) -> Any:
    """What a config of the `speculators` layout calls its head; None in the other layout."""
    return config.get("speculators_model_type")


def inner_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config in the authors' layout that is about drafting."""
    inner = config.get("dflash_config")
    return inner if isinstance(inner, Mapping) else {}


def merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its inner part, which goes before."""
    return {**config, **inner_of(config)}


def architecture_of(config: Mapping[str, Any]) -> Any:
    """The first architecture that a config names; None if it names none."""
    return next(iter(config.get("architectures") or ()), None)


def named_in(config: Mapping[str, Any]) -> Any:
    """What a config calls its head, for messages."""
    return kind_of(config) or inner_of(config).get("projector_type") or architecture_of(config)


def check_keys(
    config: Mapping[str, Any], path: str, name: str, keys: Collection[str], projectors: Collection[str]
) -> None:
    """Raise InputError for a relative of a head that computes something else.

    Args:
        name: The head.
        keys: Those of `dflash_config` that it has alone.
        projectors: What `projector_type` may be.
    """
    every, inner = merged(config), inner_of(config)
    projector = every.get("projector_type")
    if projector not in (None, name, *projectors):
        raise InputError(
            f"the head in {path} has the projector {short(projector)}, which is not supported of {name} heads; give "
            "its path alone if it is another head"
        )
    strange = [key for key in SPECIAL if every.get(key) not in (None, False)]
    strange += [key for key in inner if key not in KEYS and inner[key] not in (None, False)]
    if unknown := [key for key in strange if key not in keys]:
        raise InputError(
            f"the config of the head in {path} has {unknown[0]}, which is not known of {name} heads; give a head "
            "without it"
        )


def read_sizes(
    config: Mapping[str, Any], path: str, hints: CheckpointHints, *, from_anchor: bool | None = False
) -> BlockConfig:
    """The sizes of the head that a config of either layout describes.

    Args:
        path: Where the config lies, for messages.
        from_anchor: Whether the anchor's position guesses where the config does not say it; None: only the user knows.

    Raises:
        InputError: It lacks something, or leaves open what only the user can say.
    """
    speculators = kind_of(config) is not None
    return (_speculators if speculators else _authors)(config, path, hints, from_anchor)


def speculators_config(
    config: BlockConfig, kind: str, architecture: str, extra: Mapping[str, Any], target: str
) -> dict[str, Any]:
    """The config file of a head in the `speculators` layout.

    Args:
        kind: What the layout calls the head.
        architecture: The architecture's name there.
        extra: What it says of this head alone.
        target: Directory or hub id of its target.

    Raises:
        InputError: The layout cannot describe the head.
    """
    windows = {span.causal for span in config.sights if span.window is not None}
    if len(windows) > 1 or config.embedding_scale != 1:
        raise InputError(
            "the head cannot be written in the layout of speculators, which has no scaled embeddings and no two kinds "
            "of windows"
        )
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": config.max_depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "draft_vocab_size": config.num_outputs or config.layers.vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_id,
        "aux_hidden_state_layer_ids": list(config.taps),
        "target_hidden_size": config.target_size,
        "sample_from_anchor": config.from_anchor,
        # vLLM takes false for causal layers without windows too.
        "sliding_window_non_causal": windows != {True},
        **extra,
        "transformer_layer_config": _written_layers(config),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def authors_config(config: BlockConfig, architecture: str, inner: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config file of a head in the layout of its authors.

    Args:
        inner: What `dflash_config` says of this head alone.
        num_layers: The target's.

    Raises:
        InputError: The layout cannot describe the head.
    """
    mixed = len(config.causal) > 1
    if mixed and any(span.causal != (span.window is not None) for span in config.sights):
        raise InputError(
            "the head cannot be written in the layout of its authors, whose layers with a window are causal and whose "
            "other layers are not, or whose layers are all of one kind"
        )
    if (config.embedding_scale != 1 and "input_embedding_scale" not in inner) or 0 in config.taps:
        raise InputError(
            "the head cannot be written in the layout of its authors, which has embeddings without a factor, and taps "
            "from 1 on"
        )
    causal = config.causal == {True}
    return {
        **_written_layers(config),
        "architectures": [architecture],
        "block_size": config.block_size,
        "num_target_layers": num_layers,
        "target_hidden_size": config.target_size,
        "draft_vocab_size": config.num_outputs or config.layers.vocab_size,
        # Two keys for one thing: engines differ in which they read.
        **({} if mixed else {"is_causal": causal}),
        "dflash_config": {
            "mask_token_id": config.mask_id,
            "target_layer_ids": [tap - 1 for tap in config.taps],
            "block_size": config.block_size,
            **({} if mixed else {"causal": causal}),
            **inner,
        },
    }


def for_engines(written: Mapping[str, Any], config: BlockConfig, num_layers: int) -> dict[str, Any]:
    """A config file in the authors' layout with what other engines read, and with every size of the layers, because an
    older transformers has other defaults.

    Args:
        written: What `authors_config` says.
        num_layers: The target's.

    Raises:
        InputError: The head reads the target's last hidden state, which engines norm or not.
    """
    if not all(tap < num_layers for tap in config.taps):
        raise InputError(
            f"other engines read hidden states from 1 to {num_layers - 1}, and this head reads {list(config.taps)}; "
            "train one with other --taps"
        )
    inner = {key: value for key, value in written["dflash_config"].items() if key not in ON_TOP}
    return {
        **{key: value for key, value in written.items() if value is not None},
        **described(config.layers),
        "sample_from_anchor": config.from_anchor,
        "dflash_config": {**inner, "num_target_layers": num_layers},
    }


def _written_layers(config: BlockConfig) -> dict[str, Any]:
    """The decoder layers for a JSON file."""
    layers = config.layers.to_diff_dict() | {"model_type": config.layers.model_type}
    layers.pop("transformers_version", None)
    rotary = layers.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        # Engines with an older transformers read this key.
        layers["rope_theta"] = rotary["rope_theta"]
    return layers


def _speculators(config: Mapping[str, Any], path: str, hints: CheckpointHints, from_anchor: bool | None) -> BlockConfig:
    """A head of the `speculators` layout. Its tap k is the state that enters layer k."""
    layers = _layers(nested(config, "transformer_layer_config", path), path)
    block_size = size(config, "block_size", path, default=8, least=2, most=MOST_COUNT)
    return BlockConfig(
        layers=layers,
        block_size=block_size,
        mask_id=_mask_id(config, path, hints),
        taps=read_taps(config.get("aux_hidden_state_layer_ids"), 0, path),
        target_size=size(config, "target_hidden_size", path, default=layers.hidden_size),
        from_anchor=_from_anchor(config, config, block_size, path, hints, from_anchor),
        sights=_sights_of_speculators(config, layers, path, hints),
    )


def _authors(config: Mapping[str, Any], path: str, hints: CheckpointHints, from_anchor: bool | None) -> BlockConfig:
    """A head of an author's layout. Its layer k is the output of layer k, which enters layer k + 1."""
    every = merged(config)
    if every.get("attention_sink_bias"):
        raise InputError(f"the head in {path} has attention sinks, which are not supported")
    layers = _layers(config, path)
    taps = read_taps(every.get("target_layer_ids"), 1, path)
    if config.get("num_target_layers") in taps and TARGET not in config:
        raise InputError(
            f"the head in {path} reads the output of the target's last layer, and its config does not say whether "
            "before or after the final norm; give a head that reads other layers"
        )
    block_size = size(every, "block_size", path, default=16, least=2, most=MOST_COUNT)
    return BlockConfig(
        layers=layers,
        block_size=block_size,
        mask_id=_mask_id(every, path, hints),
        taps=taps,
        target_size=size(every, "target_hidden_size", path, default=layers.hidden_size),
        from_anchor=_from_anchor(every, config, block_size, path, hints, from_anchor),
        sights=_sights_of_authors(config, layers, path, hints),
        embedding_scale=factor(every, "input_embedding_scale", path),
    )


def _layers(config: Any, path: str) -> PreTrainedConfig:
    """The config of the decoder layers."""
    kind = config.get("model_type", "qwen3")
    try:
        known = {*AutoConfig.for_model(kind).to_dict(), *ROTARY} - {"model_type", "architectures"}
    except Exception as error:
        raise InputError(f"config.json of {path} has layers of the type {short(kind)}, which are not known") from error
    layers = made_config(kind, {key: value for key, value in config.items() if key in known}, path)
    if layers.hidden_act != "silu":
        raise InputError(f"the head in {path} has the activation {short(layers.hidden_act)}, and silu is supported")
    if config.get("sliding_window") is not None:
        # A config class may drop it where `use_sliding_window` is not set.
        layers.sliding_window = config["sliding_window"]
    return layers


def read_taps(layers: Any, later: int, path: str) -> tuple[int, ...]:
    """The hidden states that a list of layers names: what enters them, or with `later` 1 what leaves them."""
    if not layers:
        raise InputError(f"config.json of {path} does not say which layers of the target the head reads")
    return tuple(layer + later for layer in whole_numbers(layers, "the list of the target's layers", path))


def _mask_id(config: Mapping[str, Any], path: str, hints: CheckpointHints) -> int:
    if config.get("mask_token_id") is None and hints.mask_token_id is None:
        raise InputError(
            f"config.json of {path} does not say which token stands for an unknown one; say it with mask_token_id=..."
        )
    return size(config, "mask_token_id", path, default=hints.mask_token_id, least=0)


def _from_anchor(
    every: Mapping[str, Any],
    config: Mapping[str, Any],
    block_size: int,
    path: str,
    hints: CheckpointHints,
    usual: bool | None,
) -> bool:
    """Whether the anchor's position guesses. Without the key it follows from how many tokens are drafted, or it is what
    is usual of such heads.
    """
    value = read_truth(every, "sample_from_anchor", path)
    if value is not None:
        return value
    methods = nested(config, "speculators_config", path).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens")
    if drafted in (block_size, block_size - 1):
        return bool(drafted == block_size)
    value = hints.sample_from_anchor if usual is None else usual
    if value is None:
        raise InputError(
            f"config.json of {path} does not say whether the anchor's position of a block guesses the first token, and "
            "engines differ; ask who trained the head, and say sample_from_anchor=true or sample_from_anchor=false"
        )
    return value


def _sights_of_speculators(
    config: Mapping[str, Any], layers: PreTrainedConfig, path: str, hints: CheckpointHints
) -> tuple[AttentionSpan, ...]:
    """What each layer sees in the layout of `speculators`, whose own layers without a window are never causal."""
    slides, both = sliding_layers(layers, path), read_truth(config, "sliding_window_non_causal", path)
    if any(slides):
        causal = hints.causal if both is None else not both
        if causal is None:
            fact = "has no sliding_window_non_causal, which speculators takes for false and vLLM for true"
            raise _open_question(path, fact)
        return _sights(slides, _window(layers, layers.sliding_window, path), inside=causal)
    if both is None or both:
        return ()
    # The default of speculators, which its windows alone read. vLLM takes it for the answer for all layers.
    if hints.causal is None:
        fact = "has sliding_window_non_causal false and no windows, which speculators ignores and vLLM does not"
        raise _open_question(path, fact)
    return _sights(slides, None, everywhere=hints.causal)


def _sights_of_authors(
    config: Mapping[str, Any], layers: PreTrainedConfig, path: str, hints: CheckpointHints
) -> tuple[AttentionSpan, ...]:
    """What each layer sees in an author's layout.

    `use_swa` gives every layer a window where no layer is named that has one, and changes nothing else. Without a word
    on it, layers that are named as having a window are causal, and all others see both ways.
    """
    inner = inner_of(config)
    slides, causal = sliding_layers(layers, path), _causal(config, path, hints)
    named = any(slides)
    if read_truth(inner, "use_swa", path) and not named:
        slides = [True] * len(slides)
    if not any(slides):
        return _sights(slides, None, everywhere=bool(causal))
    outer_window = getattr(layers, "sliding_window", None)
    inner_window = inner.get("swa_window_size")
    if named and None not in (outer_window, inner_window) and inner_window != outer_window:
        raise InputError(
            f"config.json of {path} names two windows: swa_window_size {inner_window} and sliding_window {outer_window}"
        )
    window = _window(layers, outer_window if inner_window is None else inner_window, path)
    # So that the config says the same where it is written again.
    layers.sliding_window, layers.layer_types = window, [LAYER_TYPES[each] for each in slides]
    return _sights(slides, window, inside=named if causal is None else causal, everywhere=bool(causal))


def _causal(config: Mapping[str, Any], path: str, hints: CheckpointHints) -> bool | None:
    """Whether blocks are causal in all layers; None where an author's file has no word on it."""
    inner = inner_of(config)
    for place, name in ((inner, "causal_head"), (inner, "causal"), (config, "is_causal")):
        read_truth(place, name, path)
    words = words_on_causality(config)
    if len(words) > 1:
        if hints.causal is None:
            raise _open_question(path, "says both that blocks are causal and that they are not")
        return hints.causal
    return next(iter(words), None)


def words_on_causality(config: Mapping[str, Any]) -> set[bool]:
    """What an author's file says on whether blocks are causal: nothing, one thing, or both."""
    inner, whole = inner_of(config), config.get("is_causal")
    head, block = inner.get("causal_head"), inner.get("causal")
    if block and whole is False and AUTOMODEL in (config.get("architectures") or ()):
        # AutoModel writes `is_causal: false` for every DFlash head, and its JetSpec recipe the inner key alone.
        whole = None
    # JetSpec's own code reads `causal_head` and nothing else.
    return {each for each in (head, block, whole if head is None else None) if isinstance(each, bool)}


def _open_question(path: str, fact: str) -> InputError:
    """The question whether blocks are causal."""
    return InputError(
        f"config.json of {path} {fact}; ask who trained the head, and say causal=true (a position of a block sees no "
        "later one) or causal=false behind the path"
    )


def sliding_layers(layers: PreTrainedConfig, path: str) -> list[bool]:
    """Which layers have a window."""
    count = layers.num_hidden_layers
    kinds = getattr(layers, "layer_types", None) or [LAYER_TYPES[0]] * count
    if len(kinds) != count or any(kind not in LAYER_TYPES for kind in kinds):
        raise InputError(
            f"layer_types in config.json of {path} must name {count} layers, each {' or '.join(LAYER_TYPES)}"
        )
    return [kind == LAYER_TYPES[1] for kind in kinds]


def _window(layers: PreTrainedConfig, window: Any, path: str) -> int:
    """How far layers with a window see."""
    if window is None:
        raise InputError(f"config.json of {path} has layers with a window and does not say how long it is")
    return size({"sliding_window": window}, "sliding_window", path)


def _sights(
    slides: Sequence[bool], window: int | None, *, inside: bool = False, everywhere: bool = False
) -> tuple[AttentionSpan, ...]:
    """What each layer sees.

    Args:
        slides: Which layers have the window.
        inside: Whether these are causal.
        everywhere: Whether the others are.
    """
    near, far = AttentionSpan(window=window, causal=inside), AttentionSpan(causal=everywhere)
    spans = tuple(near if each else far for each in slides)
    return spans if any(span != AttentionSpan() for span in spans) else ()


def read_truth(config: Mapping[str, Any], name: str, path: str) -> bool | None:
    """A key that is true or false; None where it is not there. Raises InputError for other values."""
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise InputError(f"{name} in config.json of {path} must be true or false, got {short(value)}")
