"""A `generate` with speculative decoding, with all arguments of transformers' own; for scripts, or loaded by path."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from jaxtyping import Int
from torch import Tensor
from torch.nn import Module
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from outrider import catalog
from outrider.core.row import Family
from outrider.core.types import InputError
from outrider.integrate.custom import applicable, as_custom_generate
from outrider.integrate.refusals import check_cache
from outrider.setup import KINDS


def generate(
    inputs: Int[Tensor, "rows length"] | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    prefix_allowed_tokens_fn: Callable[[int, Tensor], list[int]] | None = None,
    synced_gpus: bool | None = None,
    assistant_model: PreTrainedModel | None = None,
    streamer: BaseStreamer | None = None,
    *,
    model: Module,
    stop_strings: str | list[str] | None = None,
    tokenizer: str | PreTrainedTokenizerBase | None = None,
    **arguments: Any,
) -> GenerateDecoderOnlyOutput | Int[Tensor, "rows longer"]:
    """The output of `model.generate`, by speculative decoding. Takes the arguments of `generate` and the options of
    `outrider.Setup`.

    Unlike a callable given as `custom_generate`, it gets `streamer`, `tokenizer`, `stop_strings` and `assistant_model`.
    So it can replace a model's own `generate`, and a script needs no other change: `model.generate =
    functools.partial(outrider.integrate.generate, model=model)`.

    Args:
        inputs: As in `generate`, like every argument not named here.
        model: The model. For a model that torch compiled, the compiled forward is used, as in its own `generate`.
        arguments: Those of `generate`, and the options that `as_custom_generate` takes.

    Raises:
        InputError: `generate` was asked for something that drafting cannot do; the message names it.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
        >>> from outrider.embedded import EMBEDDED_TARGET
        >>> model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET)
        >>> tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)
        >>> said = generate(**tokenizer("Once upon a", return_tensors="pt"), model=model, max_new_tokens=1,
        ...                 streamer=TextStreamer(tokenizer))
        Once upon a time
    """
    options = {name: arguments.pop(name) for name in KINDS if name in arguments}
    plain_model: PreTrainedModel = getattr(model, "_orig_mod", model)
    if not hasattr(type(plain_model), "generate"):
        raise InputError(
            f"a {type(plain_model).__name__} has no generate of its own; give the transformers model in it"
        )
    if assistant_model is not None:
        raise InputError("assistant_model is not used here; give a draft model as drafter='model:path=...' instead")
    if synced_gpus:
        raise InputError("synced_gpus would have all GPUs step together, and drafts differ in length; drop it")
    if arguments.pop("custom_generate", None) is not None:
        raise InputError("custom_generate is Outrider here already; drop it")
    check_cache(arguments.get("cache_implementation"))
    configs = [config for config in (generation_config, plain_model.generation_config) if config is not None]
    if arguments.get("token_healing") or any(config.token_healing for config in configs):
        raise InputError("token_healing is not done here; heal the prompt with model.heal_tokens first, and drop it")
    if generation_config is not None and generation_config.stop_strings is not None:
        stop_strings = generation_config.stop_strings if stop_strings is None else stop_strings
        generation_config = copy.deepcopy(generation_config)
        generation_config.stop_strings = None
    if plain_model.generation_config.stop_strings is not None:
        raise InputError("model.generation_config has stop_strings; set it to None and give them to generate instead")
    if stop_strings and tokenizer is None:
        raise InputError("stop_strings need the model's tokenizer; give tokenizer=... too")
    return type(plain_model).generate(
        plain_model,
        inputs,
        generation_config,
        logits_processor,
        stopping_criteria,
        prefix_allowed_tokens_fn,
        custom_generate=as_custom_generate(
            streamer=streamer,
            stop_strings=stop_strings,
            tokenizer=tokenizer,
            **options,
        ),
        **arguments,
    )


def write_custom_generate(directory: str | Path, **options: Any) -> Path:
    """Write the above `generate` as a file that transformers loads by path or from the hub.

    `model.generate(..., custom_generate=directory, trust_remote_code=True)` then runs it. In a model's own directory it
    becomes that model's `generate`, when the model is loaded with `trust_remote_code=True`.

    Args:
        options: Those that `as_custom_generate` takes, by name.

    Returns:
        The file that was written, `custom_generate/generate.py`; beside it lies `requirements.txt`.

    Raises:
        InputError: The option does not exist, does not apply or cannot be written to a file.
    """
    written = applicable(options).written()
    for family in get_args(Family):
        if family in written:
            catalog.make(family, written[family])
    place = Path(directory) / "custom_generate"
    place.mkdir(parents=True, exist_ok=True)
    (place / "requirements.txt").write_text("outrider\n", encoding="utf-8")
    file = place / "generate.py"
    file.write_text(
        '"""Speculative decoding by Outrider."""\n\n'
        "import functools\n\n"
        "import outrider.integrate\n\n"
        f"generate = functools.partial(outrider.integrate.generate, **{written!r})\n",
        encoding="utf-8",
    )
    return file
