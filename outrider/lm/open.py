"""Models and tokenizers from a directory or a hub id, with one clear sentence where that fails; models as LMs."""

import os
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider.lm.anatomy import Anatomy
from outrider.lm.model import LanguageModel
from outrider.lm.recurrent import RecurrentModel
from outrider.lm.support import refusal
from outrider.types import InputError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
LONGEST_ID = 256
"""Longer than any hub id."""


def open_model(
    path: str,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """A causal LM in evaluation mode, with the weights' own dtype unless another is asked for."""
    _exists(path)
    place, kind = as_device(device), as_dtype(dtype)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=kind,
            attn_implementation=attn_implementation,
            revision=revision or "main",
            trust_remote_code=trust_remote_code,
        )
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot load a causal LM from {path}: {str(error).strip().splitlines()[0]}") from error
    except (AttributeError, TypeError, AssertionError) as error:
        # Some models are no causal LMs, and transformers finds out by stumbling.
        reason = refusal(open_config(path, revision=revision, trust_remote_code=trust_remote_code)) or str(error)
        raise InputError(f"cannot load a causal LM from {path}: {reason}") from error
    # Weights that were quantised at loading are where they belong, and some kinds of them refuse to be moved.
    moved = model if model.device.type == place.type and getattr(model, "is_quantized", False) else model.to(place)
    return moved.eval()


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
    pad_to: int = 1,
    compile: bool = False,
    prepack: bool = False,
) -> LanguageModel | RecurrentModel:
    """The model as the engine sees it, in the way that its layers need.

    Recurrent layers are never padded, and models with such layers neither compiled nor packed.
    """
    if not Anatomy.of(model).recurrent:
        return LanguageModel(
            model,
            max_slots=max_slots,
            max_context=max_context,
            vocab_size=vocab_size,
            pad_to=pad_to,
            compile=compile,
            prepack=prepack,
        )
    if compile or prepack:
        raise InputError(
            f"{model.config.model_type} has recurrent layers and runs as it is; leave compile and prepack out"
        )
    return RecurrentModel(model, max_slots=max_slots, max_context=max_context, vocab_size=vocab_size)


def open_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """A model's config, without its weights."""
    _exists(path)
    try:
        return AutoConfig.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot read the config of {path}: {str(error).strip().splitlines()[0]}") from error


def open_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """The tokenizer that lies beside a model; None where a directory has none."""
    _exists(path)
    if Path(path).is_dir() and not any(Path(path).glob("*token*")) and not any(Path(path).glob("vocab*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, revision=revision or "main", trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise InputError(f"cannot load a tokenizer from {path}: {str(error).strip().splitlines()[0]}") from error


def _exists(path: str) -> None:
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1 or len(path) > LONGEST_ID or not path
    if looks_local and not os.path.isdir(os.path.expanduser(path)):
        raise InputError(
            f"there is no directory {path or repr(path)}; give a model's directory or a hub id such as org/name"
        )
    if os.path.isdir(path) and not os.path.isfile(os.path.join(path, "config.json")):
        raise InputError(f"{path} is not a model's directory: it has no config.json")
