"""Data sets of the Hugging Face Hub, and files that only the library `datasets` reads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.inputs import InputError, needs

Fields = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class HubSet:
    """A data set of the Hub.

    Attributes:
        config: Which of its configurations; None where it has one.
        split: Which part of it.
    """

    id: str
    config: str | None = None
    split: str = "test"


KNOWN = {
    "gsm8k": HubSet(id="openai/gsm8k", config="main"),
    "math500": HubSet(id="HuggingFaceH4/MATH-500"),
    "humaneval": HubSet(id="openai/openai_humaneval"),
    "mbpp": HubSet(id="google-research-datasets/mbpp", config="full"),
    "mtbench": HubSet(id="HuggingFaceH4/mt_bench_prompts", split="train"),
}
"""The five sets on which papers and other tools measure speculative decoding, by short names."""


def hub_set(text: str) -> HubSet:
    """The data set that a text names: a short name, or an id with `:config` and `:split` behind it.

    Example:
        >>> hub_set("gsm8k").id, hub_set("org/name:main:train")
        ('openai/gsm8k', HubSet(id='org/name', config='main', split='train'))
    """
    if text in KNOWN:
        return KNOWN[text]
    id, *more = text.split(":")
    if len(more) > 2 or "/" not in id:
        raise InputError(f"{text!r} is no data set; write org/name, org/name:split or org/name:config:split")
    return HubSet(id=id, config=more[0] if len(more) == 2 else None, split=more[-1] if more else "test")


def download(wanted: HubSet) -> list[Fields]:
    """The records of a data set.

    Raises:
        InputError: There is no such set, or it cannot be reached.
    """
    library = _library(f"the data set {wanted.id}")
    try:
        return list(library.load_dataset(wanted.id, wanted.config, split=wanted.split))
    except Exception as error:
        # Every failure of the library, of the network and of the names has a class of its own.
        raise InputError(f"the data set {wanted.id} cannot be read: {str(error).partition(chr(10))[0]}") from error


def read_parquet(file: Path) -> list[Fields]:
    """The records of a Parquet file."""
    library = _library("a Parquet file")
    try:
        return list(library.Dataset.from_parquet(str(file), keep_in_memory=True))
    except Exception as error:
        raise InputError(f"{file} is no Parquet file: {str(error).partition(chr(10))[0]}") from error


def _library(what: str) -> Any:
    """The library `datasets`."""
    try:
        import datasets
    except ImportError as error:
        raise needs(what, "datasets", "bench") from error
    datasets.disable_progress_bars()
    return datasets
