"""transformers' logits processors: which of them can follow a draft, and which need no tokens."""

from collections.abc import Callable

from torch import Tensor

Processor = Callable[[Tensor, Tensor], Tensor]
"""A stateless transformers `LogitsProcessor`: `(input_ids [1, n], scores [1, vocab]) -> scores [1, vocab]`."""

STATEFUL = frozenset(
    {
        "AlternatingCodebooksLogitsProcessor",
        "ClassifierFreeGuidanceLogitsProcessor",
        "DiaClassifierFreeGuidanceLogitsProcessor",
        "DiaEOSDelayPatternLogitsProcessor",
        "SynthIDTextWatermarkLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
        "WhisperNoSpeechDetection",
    }
)
"""transformers' processors that remember earlier calls or want rows of their own; a draft's branches would confuse
them."""

BLIND = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
"""transformers' processors that look at scores alone, each row by itself; many rows can go through them at once."""


def is_blind(processor: Processor) -> bool:
    """Whether a processor is one of transformers' own that read no tokens."""
    kind = type(processor)
    return kind.__name__ in BLIND and kind.__module__.startswith("transformers.")
