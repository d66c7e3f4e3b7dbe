"""Open models and tokenizers from a directory, a GGUF file or a hub id, with a clear error if that fails."""

import importlib.util
import inspect
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import cached_file, is_accelerate_available

from outrider.core.inputs import needs, shown
from outrider.core.launched import launched
from outrider.core.place import CONFIGS, CheckpointPlace, place_of
from outrider.core.progress import task
from outrider.core.types import InputError
from outrider.host.versions import warn_of_untested
from outrider.lm.fingerprint import note_files
from outrider.lm.hf import unpacked
from outrider.lm.hf.anatomy import opener
from outrider.lm.hf.gguf import (
    PAD,
    MadePlain,
    as_plain,
    check_libraries,
    dequantised,
    gguf_config,
    header,
    quick_headers,
)
from outrider.lm.hf.mtp import behind_pattern
from outrider.lm.hf.support import refusal
from outrider.lm.hf.weights import weight_bytes

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
WEIGHTS = ("safetensors", "bin", "json")
"""How names of the files end that decide what a model's weights are."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""The files of a tokenizer; the first has its vocabulary."""
ADAPTER = "adapter_config.json"
"""The config of an adapter that PEFT has written."""
LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head"), 100_000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 100_000),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 1_000_000),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 10_000_000),
    "vocab_size": 100_000_000,
}
"""Sizes in configs that no model passes, by far."""
LONGEST_REASON = 300
"""Most characters that are quoted of another library's error."""
LARGE = 100_000_000
"""Bytes of weights from which on the log says what is loaded; fewer are loaded in a moment."""
LONGEST_HEADER = 100_000_000
"""Most bytes that the header of a file of safetensors has."""
LOADING = "outrider.loading"
"""The log of what is loaded."""
log = logging.getLogger(LOADING)


class UnreadBlockModel(Protocol):
    """A model whose layers compute from a checkpoint's packed weights, before these are read."""

    @property
    def size(self) -> int:
        """Bytes that its weights will take."""

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in."""

    @property
    def blocks(self) -> str:
        """What is packed, for a sentence."""

    def read(self) -> tuple[PreTrainedModel, Mapping[str, Any]]:
        """The model with its weights, and what transformers tells of a loading."""


KeepBlocks = Callable[[CheckpointPlace, PreTrainedConfig, str | None], UnreadBlockModel | None]
"""Gives such a model of a checkpoint, its config and the attention implementation that was asked for. None: it has no
packed weights, or they do not stay.
"""
Quantise = Callable[[PreTrainedModel], PreTrainedModel]
"""Gives the quantised model of one with plain weights, which it may change."""


def open_model(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    tp_plan: str | Mapping[str, Any] | None = None,
    quantization_config: object | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    keep_blocks: KeepBlocks | None = None,
    quantise: Quantise | None = None,
) -> PreTrainedModel:
    """A causal LM in evaluation mode, with the weights' own dtype unless another is asked for.

    An adapter's directory gives its base model with the adapter's layers in it. The blocks of a GGUF file become plain
    weights, by default in bfloat16, unless `keep_blocks` keeps them. Weights for a GPU are read straight onto it where
    accelerate is installed, and otherwise into the host's memory first. What is loaded is logged before.

    Args:
        path: Directory, GGUF file, hub id, or hub id and GGUF file, as `place_of` takes it.
        device_map: Where transformers puts the layers; it takes the place of `device`.
        tp_plan: How transformers divides the weights among the processes that `torchrun` started.
        quantization_config: How transformers quantises the weights.
        keep_blocks: Gives the model of a checkpoint on a CPU whose layers compute from its packed weights. Where it
            raises MadePlain, and elsewhere, transformers reads the checkpoint.
        quantise: Quantises the model after it was read, on a CPU.

    Raises:
        InputError: The model does not exist, transformers cannot load it, its checkpoint does not have the model's
            tensors, or it cannot be quantised here.
    """
    warn_of_untested()
    checkpoint = model_place(path, revision=revision)
    if device is not None and device_map is not None:
        raise InputError("device and device_map both say where the model goes; give one of them")
    if tp_plan is not None:
        _check_processes(device_map, device)
    if (base := base_of(path)) is not None:
        if tp_plan is not None or quantise is not None:
            _refuse_adapter(
                path, base, "packed weights" if tp_plan is None else "weights that are divided among processes"
            )
        _check_peft(path, base)
        plain = open_model(
            base,
            dtype=dtype,
            device=device,
            device_map=device_map,
            quantization_config=quantization_config,
            attn_implementation=attn_implementation,
            trust_remote_code=trust_remote_code,
        )
        return _adapted(path, base, plain)
    place, kind = as_device(device), as_dtype(dtype)
    if quantise is not None:
        _check_quantisable(checkpoint, place, device_map or tp_plan, quantization_config)
    device_map = straight_to(place) if device_map is None and tp_plan is None else device_map
    kind, quantization_config = _of_blocks(checkpoint, kind, quantization_config)
    options = {
        "device_map": device_map,
        "quantization_config": quantization_config,
        "attn_implementation": attn_implementation,
        "dtype": kind,
        "revision": revision or "main",
        "trust_remote_code": trust_remote_code,
        **_divided(tp_plan),
    }
    config, began = None, time.time_ns()
    try:
        config = _config(checkpoint, revision, trust_remote_code)
        if quantise is not None:
            _check_unquantised(checkpoint, config)
        on_cpu = place.type == "cpu" and device_map is None and tp_plan is None
        model, loaded = _loaded(checkpoint, config, options, began, keep_blocks if on_cpu else None)
    except InputError:
        raise
    except (AttributeError, TypeError, AssertionError, ValueError) as error:
        # Some models are no causal LMs, and transformers finds out by stumbling.
        reason = (None if config is None else refusal(config)) or reason_of(error)
        raise InputError(f"cannot load a causal LM from {path}: {reason}") from error
    except Exception as error:
        raise InputError(f"cannot load a causal LM from {path}: {reason_of(error)}") from error
    if (difference := mismatch(model, loaded)) is not None:
        raise InputError(
            f"the checkpoint {path} does not fit {type(model).__name__}: {difference}; get a complete checkpoint, or "
            "the config that belongs to it"
        )
    # Weights that were quantised at loading are where they belong, and some kinds of them refuse to be moved.
    stays = (
        device_map is not None
        or tp_plan is not None
        or (model.device.type == place.type and getattr(model, "is_quantized", False))
    )
    model = model.eval() if stays else model.to(place).eval()
    if quantise is not None:
        model = quantise(model)
    note_files(model, weight_files(checkpoint, revision), began, how="" if quantise is None else repr(quantise))
    return model


def _loaded(
    place: CheckpointPlace,
    config: PreTrainedConfig,
    options: Mapping[str, Any],
    began: int,
    keep_blocks: KeepBlocks | None,
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model, and what transformers tells of its loading. The log says what is loaded."""
    blocks, reason = None, ""
    if keep_blocks is not None:
        try:
            blocks = keep_blocks(place, config, options["attn_implementation"])
        except MadePlain as error:
            reason = str(error)
    _log_loading(place, config, options["dtype"], blocks, reason)
    if blocks is not None:
        try:
            return blocks.read()
        except MadePlain as error:
            _log_loading(place, config, options["dtype"], None, str(error))
    return _read_plain(place, config, options, began)


def _read_plain(
    place: CheckpointPlace, config: PreTrainedConfig, options: Mapping[str, Any], began: int
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model as transformers reads it, and what it tells of the loading.

    The weights of a GGUF file are unpacked once and kept, and then mapped from there, so that they need not stay in
    memory.
    """
    if place.file is None:
        return _read(config, place.folder, options)
    plain = {**options, "config": config, "quantization_config": None}
    dtype = str(options["dtype"])
    kept = unpacked.kept(place.file, dtype)
    if kept is None:
        blocks = {"gguf_file": place.gguf, "quantization_config": options["quantization_config"]}
        with quick_headers():
            model, loaded = _read(config, place.folder, plain | blocks)
        as_plain(model, place)
        whole = mismatch(model, loaded) is None
        if not whole or (kept := unpacked.keep(place.file, dtype, model.save_pretrained, began)) is None:
            return model, loaded
        log.info("its weights were unpacked into %s, and are read from there from now on", kept)
    model, loaded = _read(config, str(kept), plain)
    return as_plain(model, place), loaded


def _read(
    config: PreTrainedConfig, folder: str, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """A model, and what transformers tells of its loading. Options that are None are left out."""
    model_and_report: tuple[PreTrainedModel, Mapping[str, Any]] = opener(config).from_pretrained(
        folder,
        # Otherwise it raises where shapes differ, and names none of them.
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        **{name: value for name, value in options.items() if value is not None},
    )
    return model_and_report


def weight_files(place: CheckpointPlace, revision: str | None) -> list[Path]:
    """The files that a model's weights were read from."""
    name = place.gguf or "config.json"
    file = Path(place.folder) / name
    if not file.is_file():
        try:
            file = Path(str(cached_file(place.folder, name, revision=revision, local_files_only=True)))
        except OSError:
            return []
    return [file] if place.gguf else sorted(each for kind in WEIGHTS for each in file.parent.glob(f"*.{kind}"))


def _check_quantisable(
    checkpoint: CheckpointPlace, device: torch.device, spread: object, quantization_config: object
) -> None:
    """Raise InputError if a model cannot be quantised on a CPU while it is opened.

    Args:
        spread: What says that it goes onto several devices or into several processes.
    """
    if checkpoint.file is not None:
        raise InputError(f"{checkpoint.name} is quantised already, as a GGUF file; leave out weights")
    if quantization_config is not None:
        raise InputError("weights and quantization_config both quantise the model; give one of them")
    if spread is not None:
        raise InputError("weights quantises a model on one CPU; leave it out, or leave out device_map and tp_plan")
    if device.type != "cpu":
        raise InputError(
            f"weights quantises a model on a CPU, and this one goes onto {device}; leave it out, or give device=cpu"
        )


def _check_unquantised(checkpoint: CheckpointPlace, config: PreTrainedConfig) -> None:
    """Raise InputError if a checkpoint's config says how it was quantised."""
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"{checkpoint.name} is quantised already, as its config says; leave out weights")


def _check_processes(device_map: object, device: object) -> None:
    """Raise InputError if weights cannot be divided among processes."""
    if device_map is not None or device is not None:
        raise InputError("tp_plan and device or device_map both say where the model goes; give one of them")
    if launched() == 1:
        raise InputError(
            "tp_plan divides the target among several processes, and this is one; start them with "
            "torchrun --nproc-per-node 2 -m outrider ..."
        )


def _divided(plan: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """What transformers is told to divide weights among processes."""
    if plan is None:
        return {}
    if isinstance(plan, str) and plan != "auto":
        raise InputError(f"tp_plan must be auto or a JSON object, got {plan!r}")
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
    except ImportError:
        return {"tp_plan": plan}
    if "tp_plan" not in inspect.signature(DistributedConfig).parameters:
        return {"tp_plan": plan}
    return {"distributed_config": DistributedConfig(tp_plan=plan, tp_size=launched())}


def _of_blocks(
    place: CheckpointPlace, dtype: str | torch.dtype, quantization_config: object | None
) -> tuple[str | torch.dtype, object | None]:
    """The dtype and the `quantization_config` of a model, which for a GGUF file make plain weights of its blocks."""
    if place.file is None:
        return dtype, quantization_config
    if quantization_config is not None:
        raise InputError(
            f"{place.name} is quantised already, as a GGUF file, and its blocks become plain weights here; leave out "
            "quantization_config"
        )
    return header(place.file).dtype if dtype == "auto" else dtype, dequantised()


def level_of(model: PreTrainedModel) -> int:
    """The level at which the log says something about a model: small ones are loaded before a line is read."""
    return logging.INFO if weight_bytes(model) >= LARGE else logging.DEBUG


def _log_loading(
    place: CheckpointPlace,
    config: PreTrainedConfig,
    dtype: str | torch.dtype,
    blocks: UnreadBlockModel | None,
    reason: str,
) -> None:
    """Say in the log what is loaded, from where, and in which dtype.

    Args:
        blocks: The model whose blocks stay as they are; None: there is none.
        reason: Why there is none; empty where nobody asked.
    """
    kind = blocks.dtype if blocks is not None else config.dtype if dtype == "auto" else dtype
    head = None if place.file is None else header(place.file)
    count = _num_parameters(Path(place.folder)) if head is None else head.num_parameters
    size = None if count is None else count * (kind.itemsize if isinstance(kind, torch.dtype) else 2)
    words = [
        config.model_type,
        *([] if count is None else [f"{count / 1e6:,.4g} M parameters"]),
        *([] if kind is None else [str(kind).removeprefix("torch.")]),
        f"from {place.name}",
    ]
    size = size if blocks is None else blocks.size
    details = ""
    what = blocks.blocks if blocks is not None else None if head is None else head.blocks
    if what is not None and size is not None:
        how = "stay packed, " if blocks is not None else f"made plain, because {reason}, " if reason else ""
        details = f" ({what}; {how}{size / 1e6:,.4g} MB in memory)"
    log.log(logging.INFO if size is None or size >= LARGE else logging.DEBUG, "loading %s%s", ", ".join(words), details)


def _num_parameters(folder: Path) -> int | None:
    """Numbers in the files of weights in a directory; None where their headers do not say it."""
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with open(file, "rb") as opened:
                size = int.from_bytes(opened.read(8), "little")
                entries = json.loads(opened.read(min(size, LONGEST_HEADER)))
            entries.pop("__metadata__", None)
            total += sum(_num_weights(name) * prod(entry["shape"]) for name, entry in entries.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    return total or None


def _num_weights(name: str) -> int:
    """Weights in a number of a tensor. AWQ and GPTQ have eight codes in a word, and what belongs to codes is none."""
    *_, part = name.split(".")
    return {"qweight": 8, "qzeros": 0, "scales": 0, "g_idx": 0}.get(part, 1)


def _check_peft(path: str, base: str) -> None:
    """Raise InputError if the adapter has no weights, or PEFT is not installed."""
    if not any((Path(path) / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise InputError(
            f"{path} is an adapter of {base} without adapter_model.safetensors; get the complete directory"
        )
    if importlib.util.find_spec("peft") is None:
        raise InputError(
            f"{needs(f'{path} is an adapter of {base}, which', 'peft', 'peft')}; or give the directory of a model that "
            "the adapter was merged into"
        )


def _refuse_adapter(path: str, base: str, weights: str) -> None:
    """Raise InputError, because PEFT's layers do not know such weights."""
    raise InputError(
        f"{path} is an adapter of {base}, and PEFT's layers do not know {weights}; give the directory of a model that "
        "the adapter was merged into"
    )


def _adapted(path: str, base: str, model: PreTrainedModel) -> PreTrainedModel:
    """A model with the layers of an adapter in it."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, path)
    except Exception as error:
        raise InputError(f"cannot load the adapter {path} of {base}: {reason_of(error)}") from error
    inner = unwrapped(adapted)
    assert isinstance(inner, PreTrainedModel)
    return inner.eval()


def base_of(path: str) -> str | None:
    """The model that an adapter's directory belongs to; None if the directory is no adapter's."""
    file = Path(path) / ADAPTER
    if not file.is_file() or (file.parent / "config.json").is_file():
        return None
    try:
        base = json.loads(file.read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        base = None
    if not base or not isinstance(base, str):
        raise InputError(f"{path} is an adapter's directory, and its {ADAPTER} names no base_model_name_or_path")
    return base


def unwrapped(model: Any) -> Any:
    """The model in what others put around it: `torch.compile`, `DataParallel`, or PEFT, whose adapters are layers.

    Raises:
        InputError: PEFT does more to the model than its layers do.
    """
    while isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel):
        if isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        elif isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(type(model), "get_base_model"):
            adapted: Any = model
            config = adapted.active_peft_config
            outside = config.is_prompt_learning or config.peft_type == "XLORA"
            if outside or getattr(config, "alora_invocation_tokens", None):
                kind = getattr(config.peft_type, "value", config.peft_type)
                raise InputError(
                    f"a {type(model).__name__} of kind {kind} acts outside of the model's layers, and a draft's "
                    "forwards would miss that; give a model without it, or a LoRA adapter"
                )
            model = adapted.get_base_model()
        else:
            break
    return model


def mismatch(model: PreTrainedModel, loaded: Mapping[str, Any]) -> str | None:
    """The difference between a checkpoint's tensors and the model's, in words; None if there is none.

    transformers leaves out what a model's own rules excuse, such as tied weights. A buffer that is computed anew may
    stand in old checkpoints, and layers that predict several tokens stand behind the model's own ones.

    Args:
        loaded: What `from_pretrained(..., output_loading_info=True)` says.
    """
    buffers = {name: buffer.is_floating_point() for name, buffer in model.named_buffers()}
    prefix = f"{model.base_model_prefix}."
    missing = [name for name in sorted(loaded["missing_keys"]) if buffers.get(name, True)]
    behind = behind_pattern(model)
    unexpected = [
        name
        for name in sorted(loaded["unexpected_keys"])
        if not {name, prefix + name} & buffers.keys() and not (behind and re.search(behind, name))
    ]
    shapes = [
        f"{name} is {tuple(stored)} instead of {tuple(wanted)}"
        for name, stored, wanted in sorted(loaded["mismatched_keys"])
    ]
    faults = [
        *([f"{_some(missing)} {_are(missing)} missing"] if missing else []),
        *([f"{_some(unexpected)} {_are(unexpected)} not part of the model"] if unexpected else []),
        *([_some(shapes)] if shapes else []),
    ]
    return ", ".join(faults) or None


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _some(names: Sequence[str], most: int = 3) -> str:
    """Names for a sentence; of many, the first."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:most])} and {rest} more tensors"


def reason_of(error: Exception) -> str:
    """The message of another library's error, in one line."""
    text = f"{error} is unknown or missing" if isinstance(error, KeyError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    reason = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]}..."


def _config(place: CheckpointPlace, revision: str | None, trust_remote_code: bool) -> PreTrainedConfig:
    """The config of a place. Raises InputError for sizes of no model, and otherwise what transformers raises."""
    if place.gguf is not None:
        config = gguf_config(place)
        check_sizes(config.to_dict(), place.name)
        return config
    read: object = {}
    with suppress(OSError, ValueError):
        read = json.loads((Path(place.folder) / "config.json").read_bytes())
    if not isinstance(read, dict):
        raise InputError(f"cannot load a causal LM from {place.name}: its config.json holds no JSON object")
    try:
        whole, _ = PreTrainedConfig.get_config_dict(place.folder, revision=revision or "main")
    except Exception:
        # What cannot be read is left to those who read it.
        whole = {}
    check_sizes(whole, place.name)
    return AutoConfig.from_pretrained(place.folder, revision=revision or "main", trust_remote_code=trust_remote_code)


def check_sizes(config: object, path: str) -> None:
    """Raise InputError if a config names a size beyond any model's: building it would fill the memory."""
    if not isinstance(config, dict):
        return
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in LARGEST.keys() & part.keys():
            size, most = part[name], LARGEST[name]
            if isinstance(size, int) and size > most:
                raise InputError(
                    f"the config of {path} says {name}={shown(size)}, and no model has more than {most}; get the "
                    "config that belongs to the weights"
                )


def as_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """The dtype of a name; `auto` stays as it is."""
    if not isinstance(dtype, str) or dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype {dtype!r}; available: auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def as_device(device: str | torch.device | None) -> torch.device:
    """A device that tensors can be on; by default the GPU where there is one."""
    try:
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0][:LONGEST_REASON]
        raise InputError(f"device {shown(str(device))} cannot be used: {reason}") from error
    return place


def straight_to(device: torch.device) -> dict[str, torch.device] | None:
    """The `device_map` with which transformers reads weights straight onto a device; None where it cannot or need not.

    Example:
        >>> straight_to(torch.device("cpu")) is None
        True
    """
    return None if device.type == "cpu" or not is_accelerate_available() else {"": device}


def logit_width(model: PreTrainedModel) -> int:
    """Width of the logits. Heads of quantised models keep weights of other shapes, so their word is taken for it."""
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)


def open_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model's config, without its weights; of an adapter, its base model's."""
    place = model_place(path, revision=revision)
    if (base := base_of(path)) is not None:
        return open_config(base, trust_remote_code=trust_remote_code)
    try:
        return _config(place, revision, trust_remote_code)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"cannot read the config of {path}: {reason_of(error)}") from error


def open_tokenizer(
    path: str, *, what: str = "tokenizer", revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, in a GGUF file, or in a directory that holds nothing else; None if the directory
    has none. `what` names what the path is of, for errors.
    """
    place = place_of(path, what, revision)
    if place.file is not None:
        check_libraries(place.file)
    elif Path(path).is_dir() and not any(Path(path).glob("*token*")) and not any(Path(path).glob("vocab*")):
        base = base_of(path)
        return None if base is None else open_tokenizer(base, trust_remote_code=trust_remote_code)
    try:
        if place.file is not None:
            return _tokenizer_of_gguf(place, place.file)
        return AutoTokenizer.from_pretrained(
            place.folder, revision=revision or "main", trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise InputError(f"cannot load a tokenizer from {path}: {reason_of(error)}") from error


def _tokenizer_of_gguf(place: CheckpointPlace, file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a GGUF file. Raises what transformers raises."""
    began, kept = time.time_ns(), unpacked.kept(file, "tokenizer")
    if kept is None:
        with task("unpacking the tokenizer, once"), quick_headers():
            tokenizer = AutoTokenizer.from_pretrained(place.folder, gguf_file=place.gguf)
        pad = header(file).values.get(PAD)
        # transformers 5.17 leaves it out.
        if tokenizer.pad_token_id is None and pad is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
        kept = unpacked.keep(file, "tokenizer", tokenizer.save_pretrained, began)
    if kept is not None:
        tokenizer = AutoTokenizer.from_pretrained(kept)
    tokenizer.name_or_path = place.name
    return tokenizer


def holds_files_of(path: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a directory or a GGUF file holds the very tokenizer that was read from another, so that nobody must read
    it again.
    """
    if Path(path).is_file() and Path(path) == Path(tokenizer.name_or_path):
        return True
    here, there = _files_of_tokenizer(tokenizer.name_or_path), _files_of_tokenizer(path)
    if here is None or there is None or not (there / TOKENIZER_FILES[0]).is_file():
        return False
    return all(_content(here / name) == _content(there / name) for name in TOKENIZER_FILES)


def _files_of_tokenizer(path: str) -> Path | None:
    """The directory with the files of a tokenizer; of a GGUF file, those that were unpacked once, or None."""
    return unpacked.kept(Path(path), "tokenizer") if Path(path).is_file() else Path(path)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def model_place(path: str, *, what: str = "model", revision: str | None = None) -> CheckpointPlace:
    """Where a model is. Raises InputError if nothing is there, or a directory has no config."""
    place = place_of(path, what, revision)
    if place.gguf is None and os.path.isdir(path) and not any(Path(path, name).is_file() for name in CONFIGS):
        raise InputError(f"{path} is not a {what}'s directory: it has no config.json")
    return place
