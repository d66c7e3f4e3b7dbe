"""The form of `custom_generate` that `generate` loads by path, and that gets all its arguments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
)
from transformers.generation import GenerateDecoderOnlyOutput

from outrider.integrate.custom import as_custom_generate
from outrider.types import InputError


def write_custom_generate(
    directory: str | Path,
    *,
    drafter: str = "suffix",
    tree: str = "chain",
    verifier: str | None = None,
    length: str | None = None,
) -> Path:
    """Write the form that `generate` loads by path, `custom_generate=directory` with `trust_remote_code=True`.

    In this form all arguments of `generate` arrive, `streamer`, `tokenizer` and `stop_strings` too; so a script changes
    by two arguments. The directory may be that of a model, whose `generate` then drafts when it is loaded with
    `trust_remote_code=True`.

    Returns:
        The file that was written, `custom_generate/generate.py`.
    """
    options = {"drafter": drafter, "tree": tree, "verifier": verifier, "length": length}
    place = Path(directory) / "custom_generate"
    place.mkdir(parents=True, exist_ok=True)
    (place / "requirements.txt").write_text("outrider\n", encoding="utf-8")
    file = place / "generate.py"
    file.write_text(
        '"""Speculative decoding by Outrider."""\n\n'
        "from outrider.integrate import generate_with\n\n\n"
        "def generate(model, **arguments):\n"
        f"    return generate_with(model, arguments, {', '.join(f'{k}={v!r}' for k, v in options.items())})\n",
        encoding="utf-8",
    )
    return file


def generate_with(
    model: PreTrainedModel, arguments: Mapping[str, Any], **options: Any
) -> GenerateDecoderOnlyOutput | Int[Tensor, "rows longer"]:
    """Run `model.generate` with all the arguments that it was given, and Outrider as its way of decoding.

    Args:
        arguments: The arguments of `generate`.
        options: Those of `as_custom_generate`.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if "assistant_model" in given:
        raise InputError("assistant_model is not used here; give a draft model as drafter='model:path=...' instead")
    config = given.get("generation_config")
    own = {"streamer": given.pop("streamer", None), "tokenizer": given.pop("tokenizer", None)}
    own["stop_strings"] = given.pop("stop_strings", None)
    if own["stop_strings"] is None and config is not None and config.stop_strings is not None:
        own["stop_strings"] = config.stop_strings
        given["generation_config"] = GenerationConfig.from_dict(config.to_dict() | {"stop_strings": None})
    if model.generation_config.stop_strings is not None:
        raise InputError("model.generation_config has stop_strings; set it to None and give them to generate instead")
    given.pop("synced_gpus", None)
    return model.generate(**given, custom_generate=as_custom_generate(**own, **options))
