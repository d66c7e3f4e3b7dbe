"""Speculative decoding as a decoding method of `model.generate`: the callable for `custom_generate`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from outrider.assembly import OF_LOADING, tokenizer_of
from outrider.core.types import InputError
from outrider.integrate.batch import GenerateBatch
from outrider.integrate.draw import draw, result
from outrider.integrate.kept import borrowed, evaluating
from outrider.integrate.refusals import check, check_call, check_padding, check_processors, padding_of
from outrider.lm.hf.open import logit_width
from outrider.setup import Setup

MOST_SLOTS = 64
"""Most rows of a batch that run at once by default."""


@dataclass(frozen=True, kw_only=True)
class CustomGenerate:
    """The callable that `as_custom_generate` returns."""

    options: Setup
    streamer: BaseStreamer | None = None
    stop_strings: str | Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.stop_strings and self.options.tokenizer is None:
            raise InputError("stop_strings need the model's tokenizer; give as_custom_generate(tokenizer=...) too")

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Int[Tensor, "rows length"],
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> GenerateDecoderOnlyOutput | Int[Tensor, "rows longer"]:
        """Called by `generate` after it has prepared the batch, the processors and the criteria."""
        check_call()
        check(model, input_ids, generation_config, model_kwargs)
        criteria = list(stopping_criteria)
        if self.stop_strings:
            wanted = self.stop_strings if isinstance(self.stop_strings, str) else list(self.stop_strings)
            criteria.append(StopStringCriteria(tokenizer=tokenizer_of(self.options), stop_strings=wanted))
        batch = GenerateBatch(
            input_ids=input_ids,
            padding=padding_of(input_ids, model_kwargs.get("attention_mask")),
            processors=tuple(logits_processor),
            criteria=criteria,
            same_device=model.device == input_ids.device,
            config=generation_config,
        )
        check_padding(batch.pads, generation_config)
        check_processors(logits_processor, input_ids, logit_width(model))
        options = self.options
        if options.max_slots is None:
            options = replace(options, max_slots=min(max(8, 1 << (len(input_ids) - 1).bit_length()), MOST_SLOTS))
        with evaluating(model), borrowed(model, options) as engine:
            return result(draw(engine, batch, self.streamer))


def as_custom_generate(
    *,
    streamer: BaseStreamer | None = None,
    stop_strings: str | Sequence[str] | None = None,
    **options: Any,
) -> CustomGenerate:
    """Speculative decoding for `model.generate(..., custom_generate=...)`, with the outputs of `generate`.

    Greedy output is the same. Sampled output has the same law, seeded from torch's global generator. The logits
    processors and warpers that `generate` makes are the whole pipeline from logits to probabilities; they run per node
    of a draft, with that node's own prefix. Stopping criteria are called after every token, for the whole batch.
    Batches with left padding, `num_return_sequences`, `return_dict_in_generate`, `output_scores` and `output_logits`
    are supported; the scores of a row that has ended are 0. The cache is not returned. The model runs in
    evaluation mode and returns to its old mode afterwards.

    The first call with a model makes the engine. Later calls reuse it as long as the model lives. Weights may change
    between calls; a model that was moved or cast gets a new engine. Threads may call at once, each with its own engine;
    but a drafter that was given as an object serves one call at a time.

    transformers passes neither `streamer` nor `tokenizer` nor `stop_strings` to a callable, so give these here and not
    to `generate`. `outrider.integrate.generate` gets all arguments.

    Args:
        streamer: Gets the prompt and then each token, as from plain `generate`.
        stop_strings: End the output with the token that completes one of them; they need the option `tokenizer`.
        options: The fields of `outrider.Setup`, except those that name the target or say how to load it. The default
            drafter is `suffix`. Unless `forward` is `eager`, the weights must not change between calls, and what was
            packed or compiled stays in memory.

    Raises:
        InputError: The option does not exist or does not apply. When called: `generate` was asked for something that
            drafting cannot do.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from outrider.embedded import EMBEDDED_TARGET
        >>> model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype="float32")
        >>> inputs = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)("Once upon a time", return_tensors="pt")
        >>> plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        >>> drafted = model.generate(**inputs, max_new_tokens=8, do_sample=False, custom_generate=as_custom_generate())
        >>> bool((plain == drafted).all())
        True
    """
    return CustomGenerate(options=applicable(options), streamer=streamer, stop_strings=stop_strings)


def applicable(options: Mapping[str, Any]) -> Setup:
    """The setup of options by name. Raises InputError for options of loading, because the model is loaded already."""
    setup = Setup.of(options)
    if settled := [
        name for name in ("target", "vocab_size", "ignore_generation_config", *OF_LOADING) if name in setup.options()
    ]:
        raise InputError(f"inside transformers the model is loaded already; leave out {', '.join(settled)}")
    return setup
