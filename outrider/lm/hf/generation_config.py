"""What a checkpoint's generation config says of requests: end tokens, stop strings and sampling. What the engine cannot
do is refused by name."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from outrider.core.processors import STATEFUL, Processor
from outrider.core.types import InputError, Sampling

BY_PROCESSORS = (
    *("sequence_bias", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    *("remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    "watermarking_config",
)
"""Fields that transformers' own processors follow; they depend on the text before a token alone."""
WHERE_SAMPLED = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "top_h": None, "watermarking_config": None}
"""What transformers does behind its filters, where the engine does nothing, and the values at which it does nothing.
Greedy decoding has no filters."""
REFUSED = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "constraints": None,
    "force_words_ids": None,
    "guidance_scale": 1,
    "token_healing": False,
    "max_time": None,
}
"""Other fields that change outputs, and the values at which they do nothing."""
ADVICE = "remove it from generation_config.json, or give ignore_generation_config (--ignore-generation-config)"


@dataclass(frozen=True, kw_only=True)
class GenerationRules:
    """The processors that transformers' `generate` makes of a generation config; made anew for each request, because
    some depend on its prompt.

    Attributes:
        model: The target.
        config: Its generation config, without the fields that are fields of `Sampling`.
    """

    model: PreTrainedModel
    config: GenerationConfig

    def of(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[Processor, ...]:
        """The processors of a request."""
        ids = torch.tensor([list(prompt)], device=self.model.device)
        config = copy.copy(self.config)
        config.max_length = len(prompt) + max_new_tokens
        processors = self.model._get_logits_processor(
            config, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device=self.model.device
        )
        return tuple(processors)


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end an output."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config, "eos_token_id", None)
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def stop_strings(model: PreTrainedModel) -> tuple[str, ...]:
    """The texts that end an output."""
    strings = model.generation_config.stop_strings
    return () if strings is None else (strings,) if isinstance(strings, str) else tuple(strings)


def default_sampling(model: PreTrainedModel) -> Sampling:
    """Sampling by the model's generation config, as in vLLM. `do_sample=False` means greedy."""
    config = model.generation_config
    if config.do_sample is False:
        return Sampling(temperature=0.0, repetition_penalty=config.repetition_penalty or 1.0)
    return Sampling(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=config.top_k or 0,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        repetition_penalty=config.repetition_penalty or 1.0,
    )


def rules_of(model: PreTrainedModel, vocab_size: int) -> GenerationRules | None:
    """The rules of a model's generation config; None if it sets none.

    Args:
        vocab_size: Width of the logits.

    Raises:
        InputError: The config asks for something that the engine cannot do, or names tokens that do not exist.
    """
    config = model.generation_config
    for name, idle in (REFUSED | (WHERE_SAMPLED if config.do_sample is not False else {})).items():
        value = getattr(config, name, None)
        if value not in (None, idle):
            raise InputError(f"the target's generation config has {name}={value!r}, which is not done here; {ADVICE}")
    settings = {name: value for name in BY_PROCESSORS if (value := getattr(config, name, None)) is not None}
    if "sequence_bias" in settings and config.repetition_penalty not in (None, 1):
        raise InputError(
            "the target's generation config has sequence_bias and repetition_penalty, whose order differs from "
            f"transformers' here; {ADVICE}"
        )
    ends, text, scores = sorted(eos_ids(model)), torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, vocab_size)
    try:
        rules_config = GenerationConfig(**settings)
        rules_config._eos_token_tensor = torch.tensor(ends, device=model.device) if ends else None
        rules = GenerationRules(model=model, config=rules_config)
        processors = rules.of([0], 1)
        for processor in processors:
            scores = processor(text.to(model.device), scores.to(model.device))
    except Exception as error:
        raise InputError(f"the target's generation config cannot be followed: {error}; {ADVICE}") from error
    if wrong := STATEFUL.intersection(type(each).__name__ for each in processors):
        raise InputError(f"the target's generation config asks for {min(wrong)}, which is not done here; {ADVICE}")
    return rules if processors else None
