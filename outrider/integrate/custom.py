"""Speculative decoding as a way of decoding of `model.generate`: the callable that `custom_generate` takes."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

from outrider.integrate.batch import Batch
from outrider.integrate.draw import draw, result
from outrider.integrate.kept import Options, borrowed, evaluating
from outrider.integrate.refusals import check, check_call, check_padding, check_processors, padding_of
from outrider.lm.open import logit_width
from outrider.types import InputError

MOST_SLOTS = 64
"""Most rows of a batch that run at once by default."""


@dataclass(frozen=True, kw_only=True)
class CustomGenerate:
    """What `as_custom_generate` returns: the arguments of that function."""

    options: Options
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
        """Called by `generate`, which has put the batch, its processors and its criteria together."""
        check_call()
        check(model, input_ids, generation_config, model_kwargs)
        criteria = list(stopping_criteria)
        if self.stop_strings:
            wanted = self.stop_strings if isinstance(self.stop_strings, str) else list(self.stop_strings)
            criteria.append(StopStringCriteria(tokenizer=self.options.tokenizer, stop_strings=wanted))
        batch = Batch(
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
    drafter: str | object = "suffix",
    tree: str | object = "chain",
    verifier: str | object | None = None,
    length: str | object | None = None,
    streamer: BaseStreamer | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    max_slots: int | None = None,
    max_context: int | None = None,
    pad_to: int | None = None,
    allow_lossy: bool = False,
) -> CustomGenerate:
    """Speculative decoding for `model.generate(..., custom_generate=...)`; what comes out is what `generate` gives.

    Greedy output is the same; sampled output has the same law, seeded from torch's global generator. The logits
    processors and warpers that `generate` makes are the whole pipeline from logits to probabilities, run per node of a
    draft with that node's own prefix. Stopping criteria are asked after every token, about the whole batch. Batches
    with left padding, `num_return_sequences`, `return_dict_in_generate`, `output_scores` and `output_logits` are
    supported; where a row has ended before others, its scores are 0. `past_key_values` is not returned. The model
    runs in evaluation mode, and is given back in the mode it was in.

    The engine is made at the first call with a model and these options, and used again for as long as the model lives.
    Weights may change between calls; a model that was moved or cast gets a new engine. Threads may call at once; each
    gets an engine of its own, but a drafter that was given as an object serves one call after the other.

    transformers hands a callable neither `streamer` nor `tokenizer` nor `stop_strings`, so these are given here and not
    to `generate`. `outrider.integrate.generate` gets all arguments.

    Args:
        drafter: `name:key=value,...` or an object, as in `outrider.load`.
        tree: How drafts grow.
        verifier: Which nodes survive.
        length: When to stop drafting.
        streamer: Gets the prompt and then each token, as from plain `generate`.
        stop_strings: End the output with the token that completes one of them; they need `tokenizer`.
        tokenizer: The model's; for stop strings, and to compare vocabularies with a draft model.
        max_slots: Most rows that run at once; further ones wait. By default as many as the batch has, at most 64.
        max_context: Longest prompt and output together, in tokens.
        pad_to: Fewest columns of a forward, as in `outrider.load`.
        allow_lossy: Let rules pass that do not keep the target's law.

    Raises:
        InputError: When called, for what cannot be had in this way, by name.

    Example:
        >>> from transformers import AutoModelForCausalLM, AutoTokenizer
        >>> from outrider.load import EMBEDDED_TARGET
        >>> model = AutoModelForCausalLM.from_pretrained(EMBEDDED_TARGET, dtype="float32")
        >>> inputs = AutoTokenizer.from_pretrained(EMBEDDED_TARGET)("Once upon a time", return_tensors="pt")
        >>> plain = model.generate(**inputs, max_new_tokens=8, do_sample=False)
        >>> drafted = model.generate(**inputs, max_new_tokens=8, do_sample=False, custom_generate=as_custom_generate())
        >>> bool((plain == drafted).all())
        True
    """
    options = Options(
        drafter=drafter,
        tree=tree,
        verifier=verifier,
        length=length,
        tokenizer=tokenizer,
        max_slots=max_slots,
        max_context=max_context,
        pad_to=pad_to,
        allow_lossy=allow_lossy,
    )
    return CustomGenerate(options=options, streamer=streamer, stop_strings=stop_strings)
