"""What a model can do here, feature by feature, with the reason where it cannot; a config says enough."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from outrider.lm.support import context_limit, refusal

FEATURES = ("plain decoding", "chains", "trees", "ragged batches", "hidden states for drafters")


@dataclass(frozen=True, kw_only=True)
class Capability:
    """Whether a feature works, and why not; where it works the reason may name a limit."""

    feature: str
    supported: bool
    reason: str = ""


def capabilities(model_or_config: PreTrainedModel | PreTrainedConfig) -> list[Capability]:
    """Every feature, supported or not.

    Example:
        >>> from transformers import LlamaConfig
        >>> [c.feature for c in capabilities(LlamaConfig()) if not c.supported]
        []
    """
    why = refusal(model_or_config)
    config = model_or_config.config if isinstance(model_or_config, PreTrainedModel) else model_or_config
    limit = context_limit(config)
    note = why or ("" if limit is None else f"in contexts of up to {limit} tokens")
    return [Capability(feature=feature, supported=why is None, reason=note) for feature in FEATURES]
