"""All options of an engine, in one place. The command line, transformers' `generate` and recipes read them here."""

import dataclasses
import inspect
import json
import os
import re
import textwrap
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from outrider.core import files
from outrider.core.inputs import InputError, parse_json, shown, text_of, unknown, whole
from outrider.core.option import bounds_of, option

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
else:
    # What cannot be written down. torch and transformers are imported when a model is loaded, not before.
    PreTrainedModel = PreTrainedTokenizerBase = object
    torch = SimpleNamespace(device=object, dtype=object)

DRAFTING, MODEL, SPEED = "Drafting", "Model", "Speed, memory"
"""Headings in the help."""


@dataclass(frozen=True)
class Setup:
    """The options of `outrider.load`, of the command line and of every other way to make an engine.

    The descriptions are also the help of the command line, without what they say about Python.

    Attributes:
        target: The target: a directory, a GGUF file, a hub id, or `org/name:file.gguf`. By default the pair that ships
            with Outrider. In Python also a loaded model.
        drafter: The drafter, as `name:key=value,...`; `outrider methods` lists all. By default `suffix`; for the pair
            that ships with Outrider, its draft model. In Python also an object, or `{"first": [...]}` or
            `{"union": [...]}` with a list.
        tree: How drafts grow. In Python also an object.
        verifier: Which draft tokens are accepted. By default the lossless verifier that accepts most of the tree's
            drafts. In Python also an object.
        length: When to stop drafting. By default `goodput`; `fixed` where the other parts need drafts of one length. In
            Python also an object.
        decoding: `step`, or `pearl` to draft and verify at once. In Python also an object.
        reproducible: Let texts depend on seed and target alone, up to roundings (verifier `coupled`).
        allow_lossy: Allow verifiers and length policies that do not keep the target's law.
        tokenizer: A tokenizer's directory, GGUF file or hub id. By default the one beside or in the target. In Python
            also a loaded tokenizer.
        vocab_size: Number of token ids that can be drawn. By default all ids up to the tokenizer's last one.
        max_slots: Most requests at once. By default 8; in `chat` 1; inside transformers the batch size, at most 64.
        max_context: Longest context in tokens. By default the model's own limit, or less if memory is short.
        max_prefill_tokens: Most prompt tokens that one step prefills, over all requests. By default 2,048, and 512 on
            CPUs while other requests decode.
        max_warm_slots: Slots beside `max_slots` for ended requests alone, such as chats that go on. By default 0.
        max_warm_tokens: Most tokens of ended requests, over all slots, that stay in the cache for prompts that begin
            alike; the least recently used ones leave first. By default as many as the slots hold.
        device: `cpu`, `cuda`, `cuda:1`. By default the GPU if there is one.
        dtype: `auto` (the weights' own), `float32`, `float64`, `bfloat16` or `float16`. On a CPU `auto` also keeps the
            blocks of a GGUF file as they are; the others make plain weights of them.
        weights: Quantise the target on a CPU: `q8_0`, `q5_0`, `q4_0` or `q4_k`.
        activations: `bfloat16`, or `int8` for products with packed weights on a CPU: another model.
        device_map: Where transformers puts the target's layers: `auto`, or JSON. It replaces `device`.
        tp_plan: `auto` or JSON divides the target among the processes of `torchrun`.
        quantization_config: How transformers quantises the target when it loads it, as JSON, such as
            `{"quant_method": "bitsandbytes", "load_in_4bit": true}`. In Python also transformers' object.
        attn_implementation: `sdpa`, `eager` or `flex_attention`. By default transformers' choice.
        revision: Branch, tag or commit of the target's hub id.
        ignore_generation_config: Take only the end tokens from the target's generation config. Otherwise it says how
            outputs are drawn, and what the engine cannot do is refused.
        trust_remote_code: Allow transformers to run code that comes with the target.
        threads: Threads of torch on a CPU, for the whole process. By default torch's own number, at most one per core
            that this process may use; `OMP_NUM_THREADS` is respected.
        pad_to: Fewest columns of a forward. By default 1; in half precision 2, on GPUs 2, 8 or 16, if a single token
            rounds otherwise than a block.
        forward: How forwards run: `eager`, as in transformers; `packed`, with weights laid out for the CPU; `compiled`,
            from a library that `outrider prepare` makes; `replayed`, as CUDA graphs on a GPU. By default the fastest at
            hand. With `packed` and `compiled` the weights must not change, so models loaded in Python use neither by
            default.
        probe: Time steps at loading if no costs are kept. Without costs drafts have a fixed length.

    Raises:
        InputError: A value of the wrong kind.

    Example:
        >>> Setup.of({"drafter": "ngram", "max_slots": "many"})
        Traceback (most recent call last):
        ...
        outrider.core.inputs.InputError: max_slots must be a whole number, got 'many'
    """

    target: str | os.PathLike[str] | PreTrainedModel | None = option(None, heading=MODEL)
    _: KW_ONLY
    drafter: str | object | None = option(None, heading=DRAFTING)
    tree: str | object = option("chain", heading=DRAFTING)
    verifier: str | object | None = option(None, heading=DRAFTING)
    length: str | object | None = option(None, heading=DRAFTING)
    decoding: str | object = option("step", heading=DRAFTING)
    reproducible: bool = option(False, heading=DRAFTING)
    allow_lossy: bool = option(False, heading=DRAFTING)
    tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = option(None, heading=MODEL)
    vocab_size: int | None = option(None, least=1, heading=MODEL)
    max_slots: int | None = option(None, least=1, heading=SPEED)
    max_context: int | None = option(None, least=1, heading=SPEED)
    max_prefill_tokens: int | None = option(None, least=1, heading=SPEED)
    max_warm_slots: int | None = option(None, least=0, heading=SPEED)
    max_warm_tokens: int | None = option(None, least=0, heading=SPEED)
    device: str | torch.device | None = option(None, heading=MODEL)
    dtype: str | torch.dtype = option("auto", heading=MODEL)
    weights: str | None = option(None, heading=MODEL)
    activations: str = option("bfloat16", heading=MODEL)
    device_map: str | Mapping[str, Any] | None = option(None, heading=MODEL)
    tp_plan: str | Mapping[str, Any] | None = option(None, heading=MODEL)
    quantization_config: Mapping[str, Any] | str | object | None = option(None, heading=MODEL)
    attn_implementation: str | None = option(None, heading=MODEL)
    revision: str | None = option(None, heading=MODEL)
    ignore_generation_config: bool = False
    trust_remote_code: bool = option(False, heading=MODEL)
    threads: int | None = option(None, least=1, heading=SPEED)
    pad_to: int | None = option(None, least=1, heading=SPEED)
    forward: str | None = option(None, heading=SPEED)
    probe: bool = option(True, heading=SPEED)

    def __post_init__(self) -> None:
        for name, kinds in KINDS.items():
            object.__setattr__(self, name, _checked(name, getattr(self, name), kinds))

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Setup":
        """The setup of options by name. Raises InputError for an unknown option, and suggests a similar name."""
        for name in options:
            if name not in KINDS:
                raise unknown("option", name, KINDS)
        return cls(**options)

    def options(self) -> dict[str, Any]:
        """The options that are not at their defaults."""
        values = {field.name: (getattr(self, field.name), field.default) for field in dataclasses.fields(self)}
        return {name: value for name, (value, default) in values.items() if value != default}

    def written(self) -> dict[str, Any]:
        """The same, as values that a file can hold. Raises InputError for other values, such as a loaded model."""
        return {name: _written(name, value) for name, value in self.options().items()}

    @classmethod
    def read(cls, file: str | os.PathLike[str]) -> "Setup":
        """The setup that a file holds: TOML, or JSON where the name ends in `.json`.

        Raises:
            InputError: The file does not exist, cannot be read, or holds an unknown option.
        """
        file = Path(file)
        text = text_of(file, "configuration", "a TOML or JSON file of options")
        options = parse_json(text, str(file)) if file.suffix == ".json" else _read_toml(text, file)
        if not isinstance(options, dict):
            raise InputError(f'{file} holds no object of options, such as {{"drafter": "suffix"}}')
        try:
            return cls.of(options)
        except InputError as error:
            raise InputError(f"{file}: {error}") from error

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the setup to a file that `read` understands. The old file stays until the new one is complete.

        Raises:
            InputError: A value that a file cannot hold, such as a loaded model, or the file cannot be written.
        """
        file, written = Path(file), self.written()
        text = json.dumps(written, indent=2) + "\n" if file.suffix == ".json" else _toml(written)
        with files.written(file):
            file.parent.mkdir(parents=True, exist_ok=True)
            files.replace(file, text.encode())


TABLE = Mapping[str, Any]
"""The type of options that are tables; on a command line they are JSON."""
KINDS: dict[str, tuple[Any, ...]] = {
    name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(Setup).items() if name != "_"
}
"""For each option, the types of its values. The first is the type in a file or on a command line."""


def documentation(kind: type) -> dict[str, str]:
    """The description of each attribute in the docstrings of a class and its bases, in one line each."""
    descriptions: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        section = (
            inspect.cleandoc(each.__dict__.get("__doc__") or "").partition("Attributes:\n")[2].partition("\n\n")[0]
        )
        entries = re.split(r"\n {4}(?=\w)", f"\n{section.rstrip()}")[1:]
        pairs = (entry.partition(": ") for entry in entries)
        descriptions |= {name: " ".join(text.split()) for name, _, text in pairs}
    return descriptions


def _checked(name: str, value: Any, kinds: tuple[Any, ...]) -> Any:
    """A value of one of these kinds. Raises InputError for others."""
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, os.PathLike) and os.PathLike[str] in kinds:
        return os.fspath(value)
    if isinstance(value, str) and (kinds[0] == TABLE or (TABLE in kinds and value.lstrip().startswith("{"))):
        return _table(name, value)
    if kinds[0] is bool:
        if not isinstance(value, bool):
            raise InputError(f"{name} must be true or false, got {shown(value)}")
    elif kinds[0] is int:
        value = whole(name, value)
        bounds_of(Setup)[name].check(name, value)
    elif not isinstance(value, str) and object not in kinds and not isinstance(value, Mapping):
        raise InputError(f"{name} must be a text, got {shown(value)}")
    return value


def _written(name: str, value: Any) -> Any:
    """A value as a file holds it."""
    if isinstance(value, Mapping):
        return {str(key): _written(name, each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_written(name, each) for each in value]
    if not isinstance(value, str | int | float):
        raise InputError(f"{name} is {value!r}, which a file cannot hold; give it by name")
    return value


def _read_toml(text: str, file: Path) -> dict[str, Any]:
    """The options of a TOML file."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{file} is not TOML: {error}") from error
    except ValueError as error:
        raise InputError(f"{file} cannot be read: it holds a number of thousands of digits") from error


def _toml(options: Mapping[str, Any]) -> str:
    """All options as TOML, each below its description. Options at their defaults are comments."""
    lines: list[str] = []
    for name, text in documentation(Setup).items():
        lines += textwrap.wrap(text, 100, initial_indent="# ", subsequent_indent="# ")
        lines += [f"{name} = {_toml_value(options[name])}" if name in options else f"# {name} =", ""]
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_value(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower()


def _table(name: str, text: str) -> dict[str, Any]:
    """The table that a JSON object stands for."""
    try:
        table = parse_json(text, name)
    except InputError as error:
        raise InputError(f"{name} must be a JSON object, got {shown(text)}: {error}") from error
    if not isinstance(table, dict):
        raise InputError(f"{name} must be a JSON object, got {shown(text)}")
    return table
