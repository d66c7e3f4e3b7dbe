"""The sizes of heads that guess blocks, and the files that say them: vLLM's `speculators` layout, and those of their
authors.

A layout that leaves open what a head computes is not guessed at: the user is asked.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from reprlib import repr as short
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from outrider.core.types import InputError
from outrider.heads.parts.layer_config import made_config
from outrider.lm.hf.checkpoint import MOST_COUNT, TARGET, factor, nested, size, whole_numbers
from outrider.lm.hf.open import reason_of

Method = Literal["dflash", "jetspec", "dflare", "dspark", "domino", "dflash2"]
"""The heads that guess blocks."""
Confidence = Literal["markov", "trunk"]
"""What a confidence head reads."""
SPECULATORS = {"dflash": "DFlashSpeculator", "dflare": "DFlareSpeculator", "dspark": "DSparkSpeculator"}
"""The architectures of the `speculators` layout."""
AUTOMODEL = "Qwen3DFlashDraftModel"
"""The architecture of DFlash and JetSpec heads of NeMo AutoModel."""
DEEPSPEC = "Qwen3DSparkModel"
"""The architecture of DSpark heads of DeepSpec. Other files have the name too, and lack keys that its class needs."""
REFUSED = {"Qwen3DFlyModel": "DFly", "LiLiCorrDraftModel": "LiLiCorr"}
"""The architectures of relatives of DFlash that compute something else, and their names."""
AUTHORS = {
    "DFlashDraftModel": "dflash",
    AUTOMODEL: "dflash",
    **dict.fromkeys(REFUSED, "dflash"),
    "QwenDFlareDraftModel": "dflare",
    DEEPSPEC: "dspark",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DFlash2DraftModel": "dflash2",
    "DominoDraftModel": "domino",
}
"""The architectures of the authors' own layouts, and which head each is."""
NATIVE: dict[str, str] = {
    "dflash": "DFlashDraftModel",
    "jetspec": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "domino": "DominoDraftModel",
}
"""The architectures of the authors' layout as it is written."""
PROJECTORS = {"dspark": "dspark", "domino": "domino", "causal_v5": "domino"}
"""The values of `projector_type` that say which head it is."""
ASSISTANTS = ("muse_glimmer_assistant",)
"""The model types of transformers that are DFlash heads."""
LATER = ("selector_rank", "selector_top_k")
"""Keys that only DFlash 2 has."""
INNER = frozenset(
    {
        *("mask_token_id", "target_layer_ids", "num_target_layers", "block_size", "target_hidden_size"),
        *("causal", "causal_head", "use_swa", "swa_window_size", "sample_from_anchor"),
        *("projector_type", "input_embedding_scale", "attention_sink_bias", "shift_label"),
        *("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"),
    }
)
"""The keys of `dflash_config` that are known of every head."""
ROTARY = ("rope_theta", "rope_scaling")
"""Keys of decoder layers that a config has in older files."""
LAYER_TYPES = ("full_attention", "sliding_attention")
"""The types of layers: with all of the context, and with a window."""
_OF_FILES = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
UNUSED = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
"""Tensors that a checkpoint may have and a head does not need."""
CONFIDENCE = "confidence_head.proj."
"""What the names of DSpark's confidence head begin with."""
VERSION = "0.5.0"
"""The version of the `speculators` layout that is written."""


@dataclass(frozen=True, kw_only=True)
class AttentionSpan:
    """What the positions of a block see in one layer. They see all of the context, unless it has a window.

    Attributes:
        window: They see positions closer than this; None: at any distance.
        causal: Whether they see no later position of the block.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """The sizes of a head that guesses blocks.

    Attributes:
        method: Which head it is.
        layers: The decoder layers, as a config of Qwen 3 describes them.
        block_size: Positions of a block, the anchor's included.
        mask_id: The token that stands for an unknown token.
        taps: The target's hidden states that it reads, in the order in which they stand side by side.
        target_size: Width of the target's hidden states.
        from_anchor: Whether the anchor's position guesses the first token; otherwise the first mask's position does.
        sights: What each layer sees; empty: everything.
        embedding_scale: Factor of the input embeddings.
        num_embeddings: Rows of its own input embedding; None: it uses the target's.
        num_outputs: Tokens of its own output layer; None: it uses the target's.
        listed: Whether its own output layer has a list of the tokens that it can guess.
        separate_context_kv: Whether the context has key and value projections of its own (DFlare).
        markov: The kind of sequential head (DSpark): `vanilla`, `gated` or `rnn`.
        markov_rank: Its width.
        confidence: What its confidence head reads beside the trunk's output: `markov`, the tokens before as the
            sequential head does, or `trunk`, nothing; None: it has none.
        unused_positions: How many positions at the end of a block guess nothing.
        own: The sizes that one kind of head has alone; None: it has none.

    Raises:
        InputError: A size makes no sense.
    """

    method: Method
    layers: PreTrainedConfig
    block_size: int
    mask_id: int
    taps: tuple[int, ...]
    target_size: int
    from_anchor: bool = False
    sights: tuple[AttentionSpan, ...] = ()
    embedding_scale: float = 1.0
    num_embeddings: int | None = None
    num_outputs: int | None = None
    listed: bool = False
    separate_context_kv: bool = False
    markov: str = "vanilla"
    markov_rank: int = 0
    confidence: Confidence | None = None
    unused_positions: int = 0
    extra: Any = None

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise InputError(f"block_size must be >= 2, the anchor and one mask at least, got {self.block_size}")
        if not self.taps or len(set(self.taps)) < len(self.taps) or min(self.taps) < 0:
            raise InputError(f"taps must be one or more different hidden states, got {list(self.taps)}")
        if self.layers.num_hidden_layers < 1:
            raise InputError(f"the head must have a layer, got {self.layers.num_hidden_layers}")

    @property
    def max_depth(self) -> int:
        """How many tokens a block guesses."""
        return self.block_size - self.first - self.unused_positions

    @property
    def first(self) -> int:
        """The position of a block that guesses the first token."""
        return 0 if self.from_anchor else 1


@dataclass(frozen=True, kw_only=True)
class CheckpointHints:
    """What a user says of a head whose files leave it open.

    Attributes:
        mask_token_id: The token that stands for an unknown token, where the files do not say it.
        sample_from_anchor: Whether the anchor's position guesses the first token, where the files do not say it.
        causal: Whether a position of a block sees no later one of it, where the files do not say it (JetSpec heads: it
            does not).
        shift_label: Of a Domino head, whether position k guesses the token k + 1 behind the anchor, where the files do
            not say it.
    """

    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    shift_label: bool | None = None


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Which head a config describes; None if it is none of these.

    A DFlash file that says that all its layers are causal is a JetSpec head.

    Example:
        >>> method_of({"speculators_model_type": "dspark"}), method_of({"architectures": ["DFlashDraftModel"]})
        ('dspark', 'dflash')
    """
    if config.get("model_type") in ASSISTANTS:
        return "dflash"
    named = config.get("speculators_model_type")
    if named is None:
        inner = _inner(config)
        projector, architectures = inner.get("projector_type"), config.get("architectures") or [None]
        named = PROJECTORS.get(projector) if isinstance(projector, str) else None
        named = named or AUTHORS.get(architectures[0])
        if named == "dflash" and any(inner.get(key) is not None for key in LATER):
            named = "dflash2"
        if named == "dflash" and _words_on_causality(config, inner) == {True}:
            named = "jetspec"
    return cast(Method, named) if named in get_args(Method) else None


def block_config(
    config: Mapping[str, Any], path: str, hints: CheckpointHints, own_keys: Collection[str] = ()
) -> BlockConfig:
    """The sizes of the head that a config describes.

    Args:
        path: Where the config lies, for messages.
        own_keys: The keys of `dflash_config` that the kind of head has alone.

    Raises:
        InputError: It describes no such head, lacks something, or leaves open what only the user can say.
    """
    method = method_of(config)
    if method is None:
        raise InputError(f"config.json of {path} describes no head of {', '.join(get_args(Method))}")
    _refuse_others(config, method, path, own_keys)
    try:
        if config.get("model_type") in ASSISTANTS:
            return _assistant(config, path)
        if "speculators_model_type" in config:
            return _speculators(config, path, method, hints)
        return _authors(config, path, method, hints)
    except (AttributeError, KeyError, TypeError) as error:
        raise InputError(f"config.json of {path} does not describe a {method} head: {short(error)}") from error


def with_tensors(
    config: BlockConfig, tensors: Mapping[str, Tensor], path: str, vocab_size: int
) -> tuple[BlockConfig, dict[str, Tensor]]:
    """The config with what the tensors of a checkpoint say of the head, and the tensors under the head's names.

    Args:
        path: Where they lie, for messages.
        vocab_size: Width of the target's logits.

    Raises:
        InputError: The tokens that the head knows are not the target's.
    """
    renamed = _renamed(tensors, config)
    output, embedding = renamed.get("lm_head.weight"), renamed.get("embed_tokens.weight")
    if output is None or (len(output) >= vocab_size and not renamed.get("d2t", torch.zeros(1)).any()):
        # All tokens, at their own places.
        renamed.pop("d2t", None)
    config = replace(
        config,
        num_outputs=None if output is None else len(output),
        num_embeddings=None if embedding is None else len(embedding),
        listed="d2t" in renamed,
        confidence=_confidence(config, renamed),
    )
    _check(config, renamed, path, vocab_size)
    return config, renamed


def speculators_config(config: BlockConfig, target: str) -> dict[str, Any]:
    """The config file of a head in the `speculators` layout.

    Args:
        target: Directory or hub id of its target.

    Raises:
        InputError: The layout cannot describe the head.
    """
    windows = {sight.causal for sight in config.sights if sight.window is not None}
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
    extra: dict[str, Any] = {}
    if config.method == "dflare":
        extra = {"use_heterogeneous_kv": config.separate_context_kv}
    elif config.method == "dspark":
        extra = {"markov_rank": config.markov_rank, "markov_head_type": config.markov}
        reads = config.confidence
        extra |= {"enable_confidence_head": reads is not None, "confidence_head_with_markov": reads == "markov"}
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
        **extra,
        "transformer_layer_config": _written_layers(config),
        "speculators_config": {
            "algorithm": config.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target, "architectures": []},
        },
    }


def native_config(config: BlockConfig, extra: Mapping[str, Any], num_layers: int) -> dict[str, Any]:
    """The config file of a head in the layout of its authors, which vLLM reads too.

    Args:
        extra: What `dflash_config` says beside what all heads say there.
        num_layers: The target's.

    Raises:
        InputError: The layout cannot describe the head.
    """
    causal = {sight.causal for sight in config.sights or (AttentionSpan(),)}
    scaled = config.embedding_scale != 1 and "input_embedding_scale" not in extra
    if len(causal) > 1 or scaled or 0 in config.taps:
        raise InputError(
            f"the {config.method} head cannot be written in the layout of its authors, which has layers that are all "
            "causal or all not, embeddings without a factor, and taps from 1 on"
        )
    inner = {
        "mask_token_id": config.mask_id,
        "target_layer_ids": [tap - 1 for tap in config.taps],
        "block_size": config.block_size,
        # vLLM reads the key on top first, JetSpec's authors the last one.
        "causal": causal == {True},
        **({"causal_head": True} if config.method == "jetspec" else {}),
        **({"sample_from_anchor": True} if config.from_anchor and config.method != "domino" else {}),
        **extra,
    }
    return {
        **_written_layers(config),
        "architectures": [NATIVE[config.method]],
        "block_size": config.block_size,
        "num_target_layers": num_layers,
        "target_hidden_size": config.target_size,
        "draft_vocab_size": config.num_outputs or config.layers.vocab_size,
        "is_causal": causal == {True},
        "dflash_config": inner,
    }


def in_speculators(config: BlockConfig) -> bool:
    """Whether a head is written in the layout of `speculators`. It has no causal layers without a window."""
    return config.method in SPECULATORS and not any(sight.causal and sight.window is None for sight in config.sights)


def _written_layers(config: BlockConfig) -> dict[str, Any]:
    """The decoder layers for a JSON file."""
    layers = config.layers.to_diff_dict() | {"model_type": config.layers.model_type}
    layers.pop("transformers_version", None)
    rotary = layers.get("rope_parameters") or {}
    if "rope_theta" in rotary:
        # Engines with an older transformers read this key.
        layers["rope_theta"] = rotary["rope_theta"]
    return layers


def _speculators(config: Mapping[str, Any], path: str, method: Method, hints: CheckpointHints) -> BlockConfig:
    """A head of the `speculators` layout. Its tap k is the state that enters layer k."""
    layers = _layers(nested(config, "transformer_layer_config", path), path)
    block = size(config, "block_size", path, default=8, least=2, most=MOST_COUNT)
    return BlockConfig(
        method=method,
        layers=layers,
        block_size=block,
        mask_id=_mask_id(config, path, hints),
        taps=_taps(config.get("aux_hidden_state_layer_ids"), 0, path),
        target_size=size(config, "target_hidden_size", path, default=layers.hidden_size),
        from_anchor=_from_anchor(config, config, method, block, path, hints),
        sights=_sights_of_speculators(config, layers, path, hints),
        separate_context_kv=method == "dflare" and bool(config.get("use_heterogeneous_kv", True)),
        markov=_markov(config, path),
        markov_rank=_rank(config, method, path),
    )


def _authors(config: Mapping[str, Any], path: str, method: Method, hints: CheckpointHints) -> BlockConfig:
    """A head of an author's layout. Its layer k is the output of layer k, which enters layer k + 1."""
    inner = _inner(config)
    merged = {**config, **inner}
    if merged.get("attention_sink_bias"):
        raise InputError(f"the head in {path} has attention sinks, which are not supported")
    layers = _layers(config, path)
    taps = _taps(merged.get("target_layer_ids"), 1, path)
    if config.get("num_target_layers") in taps and TARGET not in config:
        raise InputError(
            f"the head in {path} reads the output of the target's last layer, and its config does not say whether "
            "before or after the final norm; give a head that reads other layers"
        )
    block = size(merged, "block_size", path, default=16, least=2, most=MOST_COUNT)
    return BlockConfig(
        method=method,
        layers=layers,
        block_size=block,
        mask_id=_mask_id(merged, path, hints),
        taps=taps,
        target_size=size(merged, "target_hidden_size", path, default=layers.hidden_size),
        from_anchor=_from_anchor(merged, config, method, block, path, hints),
        sights=_sights_of_authors(config, inner, layers, path, hints),
        embedding_scale=factor(merged, "input_embedding_scale", path),
        separate_context_kv=method == "dflare",
        markov=_markov(merged, path),
        markov_rank=_rank(merged, method, path),
        unused_positions=1 if method == "domino" and _shifted(merged, path, hints) else 0,
    )


def _assistant(config: Mapping[str, Any], path: str) -> BlockConfig:
    """An assistant of Muse Glimmer, whose file leaves out what is the default of its class. It has no vocabulary of its
    own. Its layers with a window w see positions up to a distance of w, as their masks in transformers say.
    """
    try:
        assistant = AutoConfig.for_model(**{key: value for key, value in config.items() if key not in _OF_FILES})
    except Exception as error:
        raise InputError(f"the config of the head in {path} is refused by transformers: {reason_of(error)}") from error
    sizes = {name: getattr(assistant, name, None) for name in ("block_size", "mask_token_id", "sliding_window")}
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "hidden_act")
    shared = {name: getattr(assistant, name) for name in (*same, *more)}
    layers = made_config("qwen3", {"vocab_size": 0, **shared}, path, least_vocab=0)
    near = AttentionSpan(window=size(sizes, "sliding_window", path) + 1)
    return BlockConfig(
        method="dflash",
        layers=layers,
        block_size=size(sizes, "block_size", path, least=2, most=MOST_COUNT),
        mask_id=size(sizes, "mask_token_id", path, least=0),
        taps=_taps(assistant.target_layer_ids, 1, path),
        target_size=assistant.hidden_size,
        sights=tuple(near if slides else AttentionSpan() for slides in _sliding(assistant, path)),
    )


def _refuse_others(config: Mapping[str, Any], method: Method, path: str, own_keys: Collection[str]) -> None:
    """Raise InputError for relatives that compute something else."""
    inner = _inner(config)
    merged = {**config, **inner}
    other = next((REFUSED[name] for name in config.get("architectures") or () if name in REFUSED), None)
    if other is not None:
        raise InputError(
            f"the head in {path} is a {other} head, which is not supported; give a head of "
            f"{', '.join(get_args(Method))}"
        )
    later = [key for key in LATER if merged.get(key) is not None]
    if later and method != "dflash2":
        raise InputError(f"the head in {path} is a DFlash 2 head (it has {later[0]}), and its config calls it {method}")
    projector = merged.get("projector_type")
    if projector not in (None, method) and PROJECTORS.get(projector) != method:
        raise InputError(f"the head in {path} has the projector {short(projector)}, which is not supported")
    if merged.get("shift_label") and method != "domino":
        raise InputError(f"the head in {path} was trained with shift_label, which is not supported")
    strange = [key for key in inner if key not in INNER | set(own_keys) and inner[key] not in (None, False)]
    if strange:
        raise InputError(
            f"dflash_config of the head in {path} has {strange[0]}, which is not known of {method} heads; give a head "
            "without it"
        )


def _inner(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("dflash_config")
    return inner if isinstance(inner, Mapping) else {}


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


def _taps(layers: Any, later: int, path: str) -> tuple[int, ...]:
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
    merged: Mapping[str, Any],
    config: Mapping[str, Any],
    method: Method,
    block_size: int,
    path: str,
    hints: CheckpointHints,
) -> bool:
    """Whether the anchor's position guesses. Without the key it follows from how many tokens are drafted, or from the
    code that the file comes from.
    """
    if method == "domino":
        return _shifted(merged, path, hints)
    value = _truth(merged, "sample_from_anchor", path)
    if value is not None:
        return value
    methods = nested(config, "speculators_config", path).get("proposal_methods") or [{}]
    drafted = methods[0].get("speculative_tokens")
    if drafted in (block_size, block_size - 1):
        return bool(drafted == block_size)
    if _is_deepspec(config):
        return True
    if method != "dspark":
        return False
    if hints.sample_from_anchor is None:
        raise InputError(
            f"config.json of {path} does not say whether the anchor's position of a block guesses the first token, and "
            "engines differ; ask who trained the head, and say sample_from_anchor=true or sample_from_anchor=false"
        )
    return hints.sample_from_anchor


def _shifted(config: Mapping[str, Any], path: str, hints: CheckpointHints) -> bool:
    """Whether a Domino head guesses from the anchor's position on."""
    value = _truth(config, "shift_label", path)
    value = hints.shift_label if value is None else value
    if value is None:
        raise InputError(
            f"config.json of {path} does not say shift_label, and published Domino heads differ in it; ask who trained "
            "the head, and say shift_label=true (position k of a block guesses the token k + 1 behind the anchor) or "
            "shift_label=false behind the path"
        )
    return value


def _sights_of_speculators(
    config: Mapping[str, Any], layers: PreTrainedConfig, path: str, hints: CheckpointHints
) -> tuple[AttentionSpan, ...]:
    """What each layer sees in the layout of `speculators`, whose own layers without a window are never causal."""
    slides, both = _sliding(layers, path), _truth(config, "sliding_window_non_causal", path)
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
    config: Mapping[str, Any], inner: Mapping[str, Any], layers: PreTrainedConfig, path: str, hints: CheckpointHints
) -> tuple[AttentionSpan, ...]:
    """What each layer sees in an author's layout.

    `use_swa` gives every layer a window where no layer is named that has one, and changes nothing else. Without a word
    on it, layers that are named as having a window are causal, and all others see both ways.
    """
    slides, causal = _sliding(layers, path), _causal(config, inner, path, hints)
    named = any(slides)
    if _truth(inner, "use_swa", path) and not named:
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


def _causal(config: Mapping[str, Any], inner: Mapping[str, Any], path: str, hints: CheckpointHints) -> bool | None:
    """Whether blocks are causal in all layers; None where an author's file has no word on it."""
    for place, name in ((inner, "causal_head"), (inner, "causal"), (config, "is_causal")):
        _truth(place, name, path)
    words = _words_on_causality(config, inner)
    if len(words) > 1:
        if hints.causal is None:
            raise _open_question(path, "says both that blocks are causal and that they are not")
        return hints.causal
    if not words and _is_deepspec(config):
        return False
    return next(iter(words), None)


def _words_on_causality(config: Mapping[str, Any], inner: Mapping[str, Any]) -> set[bool]:
    """What an author's file says on whether blocks are causal: nothing, one thing, or both."""
    head, block, whole = inner.get("causal_head"), inner.get("causal"), config.get("is_causal")
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


def _is_deepspec(config: Mapping[str, Any]) -> bool:
    """Whether a file comes from DeepSpec, whose class needs these keys. Its anchor guesses, and no layer is causal."""
    keys = {"num_anchors", "enable_confidence_head", "target_layer_ids"}
    return DEEPSPEC in (config.get("architectures") or ()) and keys <= config.keys()


def _sliding(layers: PreTrainedConfig, path: str) -> list[bool]:
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
    spans = tuple(
        AttentionSpan(window=window, causal=inside) if each else AttentionSpan(causal=everywhere) for each in slides
    )
    return spans if any(sight != AttentionSpan() for sight in spans) else ()


def _truth(config: Mapping[str, Any], name: str, path: str) -> bool | None:
    """A key that is true or false; None where it is not there. Raises InputError for other values."""
    value = config.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise InputError(f"{name} in config.json of {path} must be true or false, got {short(value)}")


def _markov(config: Mapping[str, Any], path: str) -> str:
    """The kind of the sequential head."""
    kind = config.get("markov_head_type", "vanilla")
    if not isinstance(kind, str):
        raise InputError(f"markov_head_type in config.json of {path} must be a name, got {short(kind)}")
    return kind


def _rank(config: Mapping[str, Any], method: Method, path: str) -> int:
    return 0 if method != "dspark" else size(config, "markov_rank", path, default=256, least=0)


def _renamed(tensors: Mapping[str, Tensor], config: BlockConfig) -> dict[str, Tensor]:
    """The tensors under the names of the `speculators` layout, without those that are not used."""
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    for ours, theirs in (("fc", "encoder.fc"), ("hidden_norm", "encoder.output_norm_enc")):
        if f"{theirs}.weight" in renamed:
            renamed[f"{ours}.weight"] = renamed.pop(f"{theirs}.weight")
    if config.method == "dflare" and "layer_fusion_weights" in renamed:
        # The authors' layout has one norm for all layers.
        norm, count = renamed.pop("hidden_norm.weight", None), config.layers.num_hidden_layers
        renamed["fusion_weights"] = renamed.pop("layer_fusion_weights")
        if norm is not None:
            renamed |= {f"fusion_norms.{i}.weight": norm.clone() for i in range(count)}
    weight, bias = f"{CONFIDENCE}weight", f"{CONFIDENCE}bias"
    if config.method != "dspark":
        renamed = {name: tensor for name, tensor in renamed.items() if not name.startswith(CONFIDENCE)}
    elif weight in renamed and bias not in renamed:
        renamed[bias] = renamed[weight].new_zeros(1)
    return {name: tensor for name, tensor in renamed.items() if name not in UNUSED and not name.endswith("inv_freq")}


def _confidence(config: BlockConfig, tensors: Mapping[str, Tensor]) -> Confidence | None:
    """What the confidence head reads, by the width of its weight."""
    weight = tensors.get(f"{CONFIDENCE}weight")
    if weight is None:
        return None
    return "trunk" if weight.shape[-1] == config.layers.hidden_size else "markov"


def _check(config: BlockConfig, tensors: Mapping[str, Tensor], path: str, vocab_size: int) -> None:
    """Raise InputError if the tokens that a head knows are not the target's."""
    # An assistant of transformers has its target's vocabulary.
    known = config.layers.vocab_size or vocab_size
    if known < vocab_size:
        raise InputError(
            f"the head in {path} knows {known:,} tokens, and this target has {vocab_size:,}; give a head that was "
            "trained for this target"
        )
    if not config.listed and config.num_outputs is not None and config.num_outputs < vocab_size:
        raise InputError(
            f"the head in {path} guesses {config.num_outputs:,} of {vocab_size:,} tokens, and has no list (d2t) of them"
        )
    if config.listed:
        offsets = tensors["d2t"].long()
        ids = torch.arange(len(offsets)) + offsets
        rising = bool((ids[1:] > ids[:-1]).all())
        if len(ids) != config.num_outputs or not rising or int(ids[-1]) >= vocab_size or int(ids[0]) < 0:
            raise InputError(f"the list of tokens (d2t) of the head in {path} does not fit this target; get it again")
    if not 0 <= config.mask_id < (config.num_embeddings or known):
        raise InputError(
            f"the head in {path} has the mask token {config.mask_id}, and its tokens are below {known}; say the right "
            "one with mask_token_id=..."
        )
