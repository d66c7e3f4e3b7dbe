"""Open models and tokenizers from a directory or a hub id, with a clear error if that fails."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.core.types import InputError
from outrider.lm.forwards.choice import choose
from outrider.lm.forwards.forward import Forward
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.mtp import behind_pattern
from outrider.lm.hf.support import refusal
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""The files of a tokenizer; the first has its vocabulary."""
LONGEST_ID = 256
"""Longer than any hub id."""
LONGEST_REASON = 300
"""Most characters that are quoted of another library's error."""


def open_model(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    quantization_config: object | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM in evaluation mode, with the weights' own dtype unless another is asked for.

    Args:
        device_map: Where transformers puts the layers; it takes the place of `device`.
        quantization_config: How transformers quantises the weights.

    Raises:
        InputError: The model does not exist, transformers cannot load it, or its checkpoint does not have the model's
            tensors.
    """
    _exists(path)
    if device is not None and device_map is not None:
        raise InputError("device and device_map both say where the model goes; give one of them")
    place, kind = as_device(device), as_dtype(dtype)
    given = {"device_map": device_map, "quantization_config": quantization_config}
    try:
        model, loaded = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=kind,
            attn_implementation=attn_implementation,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
            # Otherwise it raises where shapes differ, and names none of them.
            ignore_mismatched_sizes=True,
            output_loading_info=True,
            **{name: value for name, value in given.items() if value is not None},
        )
    except (AttributeError, TypeError, AssertionError) as error:
        # Some models are no causal LMs, and transformers finds out by stumbling.
        reason = refusal(open_config(path, revision=revision, trust_remote_code=trust_remote_code)) or reason_of(error)
        raise InputError(f"cannot load a causal LM from {path}: {reason}") from error
    except Exception as error:
        raise InputError(f"cannot load a causal LM from {path}: {reason_of(error)}") from error
    if (difference := mismatch(model, loaded)) is not None:
        raise InputError(
            f"the checkpoint {path} does not fit {type(model).__name__}: {difference}; get a complete checkpoint, or "
            "the config that belongs to it"
        )
    # Weights that were quantised at loading are where they belong, and some kinds of them refuse to be moved.
    stays = device_map is not None or (model.device.type == place.type and getattr(model, "is_quantized", False))
    return model.eval() if stays else model.to(place).eval()


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
    said = [
        *([f"{_some(missing)} {_are(missing)} missing"] if missing else []),
        *([f"{_some(unexpected)} {_are(unexpected)} not part of the model"] if unexpected else []),
        *([_some(shapes)] if shapes else []),
    ]
    return ", ".join(said) or None


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _some(names: Sequence[str], most: int = 3) -> str:
    """Names for a sentence; of many, the first."""
    rest = len(names) - most
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:most])} and {rest} more tensors"


def reason_of(error: Exception) -> str:
    """The message of another library's error, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    said = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return said if len(said) <= LONGEST_REASON else f"{said[:LONGEST_REASON]}..."


def as_dtype(given: str | torch.dtype) -> str | torch.dtype:
    """The dtype of a name; `auto` stays as it is."""
    if not isinstance(given, str) or given == "auto":
        return given
    if given not in DTYPES:
        raise InputError(f"unknown dtype {given!r}; available: auto, {', '.join(DTYPES)}")
    return DTYPES[given]


def as_device(given: str | torch.device | None) -> torch.device:
    """A device that tensors can be on; by default the GPU where there is one."""
    try:
        place = torch.device("cuda" if torch.cuda.is_available() else "cpu") if given is None else torch.device(given)
        torch.zeros(1, device=place).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0].split(". ")[0]
        raise InputError(f"device {str(given)!r} cannot be used: {reason}") from error
    return place


def logit_width(model: PreTrainedModel) -> int:
    """Width of the logits. Heads of quantised models keep weights of other shapes, so their word is taken for it."""
    head = model.get_output_embeddings()
    width = getattr(head, "out_features", None)
    return int(width or model.config.get_text_config(decoder=True).vocab_size)


def as_lm(
    model: PreTrainedModel,
    *,
    max_slots: int,
    max_context: int | None = None,
    vocab_size: int | None = None,
    pad_to: int | None = 1,
    forward: Forward | None = "eager",
    lasting: bool = True,
) -> LanguageModel | RecurrentModel:
    """The model as the engine sees it, in the way that its layers need.

    Recurrent layers are never padded, and models with such layers never compiled or packed.

    Args:
        pad_to: Fewest columns of a forward; None chooses.
        forward: How forwards run; None chooses.
        lasting: Whether the weights will stay as they are.
    """
    if not Anatomy.of(model).recurrent:
        lm = LanguageModel(
            model,
            max_slots=max_slots,
            max_context=max_context,
            vocab_size=vocab_size,
            pad_to=pad_to or 1,
            forward=forward or "eager",
        )
        lm.choice = choose(lm, forward=forward, pad_to=pad_to, lasting=lasting)
        return lm
    if forward not in (None, "eager"):
        raise InputError(f"{model.config.model_type} has recurrent layers and runs as it is; choose forward=eager")
    return RecurrentModel(model, max_slots=max_slots, max_context=max_context, vocab_size=vocab_size)


def open_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model's config, without its weights."""
    _exists(path)
    try:
        return AutoConfig.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"cannot read the config of {path}: {reason_of(error)}") from error


def open_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer beside a model, or in a directory that holds nothing else; None if the directory has none."""
    _exists(path, what="tokenizer")
    if Path(path).is_dir() and not any(Path(path).glob("*token*")) and not any(Path(path).glob("vocab*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except Exception as error:
        raise InputError(f"cannot load a tokenizer from {path}: {reason_of(error)}") from error


def holds_files_of(path: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a directory holds the very files that a tokenizer was read from, so that nobody must read them again."""
    here, there = Path(tokenizer.name_or_path), Path(path)
    if not (there / TOKENIZER_FILES[0]).is_file():
        return False
    return all(_content(here / name) == _content(there / name) for name in TOKENIZER_FILES)


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _exists(path: str, what: str = "model") -> None:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or len(path) > LONGEST_ID or not path
    if looks_local and not os.path.isdir(os.path.expanduser(path)):
        raise InputError(
            f"there is no directory {path or repr(path)}; give a {what}'s directory or a hub id such as org/name"
        )
    if what == "model" and os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise InputError(f"{path} is not a model's directory: it has no config.json")
