"""transformers' logits processors: which of them cannot follow a draft, and which read no tokens."""

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
"""transformers' processors that remember earlier calls or add rows of their own. They cannot follow a draft's branches.
"""

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
"""transformers' processors that read only the scores, each row by itself. They can process many rows at once."""


def is_blind(processor: Processor) -> bool:
    """Whether a processor is one of transformers' own that read no tokens."""
    kind = type(processor)
    return kind.__name__ in BLIND and kind.__module__.startswith("transformers.")
