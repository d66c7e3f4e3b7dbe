"""What works for one model and what does not, with reasons: the facts of `support` as a list for people."""

from dataclasses import dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from outrider.lm.hf.alibi import MODELS as ALIBI
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.support import CHAINS_ONLY, refusal


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One feature that a model supports or does not.

    Attributes:
        feature: The feature.
        supported: Whether it works.
        reason: How it works, or why it does not.
    """

    feature: str
    supported: bool
    reason: str


def capabilities(model_or_config: PreTrainedModel | PreTrainedConfig) -> list[Capability]:
    """What works for a model as target or as draft model. A model that is refused can do nothing, for one reason.

    Args:
        model_or_config: A model says more than a config: a config does not know yet how attention will be computed.

    Example:
        >>> from transformers import Mamba2Config
        >>> for line in capabilities(Mamba2Config())[:3]:
        ...     print(line.feature, line.supported)
        target True
        chains True
        branching trees False
    """
    anatomy = Anatomy.of(model_or_config)
    if (reason := refusal(anatomy)) is not None:
        return [Capability(feature="target", supported=False, reason=reason)]
    features = [
        Capability(
            feature="target",
            supported=True,
            reason="opened as RecurrentModel" if anatomy.recurrent else "opened as LanguageModel",
        ),
        *(_recurrent(anatomy) if anatomy.recurrent else _attending(anatomy)),
        _taps(anatomy, isinstance(model_or_config, PreTrainedModel)),
        _context(anatomy),
        _kernel(anatomy),
    ]
    if getattr(anatomy.config, "quantization_config", None) is not None:
        features.append(
            Capability(
                feature="quantised weights",
                supported=True,
                reason="used as transformers loads them; on a CPU, 4 bits of AWQ and GPTQ stay packed",
            )
        )
    return features


def _taps(anatomy: Anatomy, loaded: bool) -> Capability:
    if loaded and anatomy.layers is None:
        return Capability(feature="taps", supported=False, reason="there is no one list of decoder layers to read")
    return Capability(feature="taps", supported=True, reason="hidden states of decoder layers are read by hooks")


def _recurrent(anatomy: Anatomy) -> list[Capability]:
    chains = (
        "behind the prompt, drafts are verified token by token, because the model's scan takes no initial state; "
        "nothing is gained over plain decoding as a target"
        if anatomy.stepwise
        else "a draft is verified in one forward; after a rejection the accepted tokens are fed again with the next"
    )
    return [
        Capability(feature="chains", supported=True, reason=chains),
        Capability(feature="branching trees", supported=False, reason=f"{anatomy.name} {CHAINS_ONLY}"),
        Capability(
            feature="ragged batches",
            supported=True,
            reason="one forward per distinct length: recurrent layers never see padding",
        ),
        Capability(
            feature="prefix reuse",
            supported=True,
            reason="a prompt that continues the last text prefills only its new tokens; any other prompt starts anew",
        ),
        Capability(feature="compiled forwards", supported=False, reason="segments have as many lengths as drafts do"),
    ]


def _attending(anatomy: Anatomy) -> list[Capability]:
    trees = "nodes see their ancestors only, by explicit masks"
    if anatomy.name in ALIBI:
        trees += "; the bias by distance (ALiBi) is moved into them"
    uncompiled = None
    if anatomy.name in ALIBI:
        uncompiled = "the model is changed during each forward (ALiBi)"
    elif anatomy.flex:
        uncompiled = "flex_attention runs uncompiled"
    return [
        Capability(feature="chains", supported=True, reason="a draft is verified in one forward"),
        Capability(feature="branching trees", supported=True, reason=trees),
        Capability(feature="ragged batches", supported=True, reason="one forward for all requests"),
        Capability(
            feature="prefix reuse", supported=True, reason="the longest common beginning with the last text is kept"
        ),
        Capability(
            feature="compiled forwards",
            supported=uncompiled is None,
            reason=uncompiled or "from a library that `outrider prepare` makes",
        ),
    ]


def _context(anatomy: Anatomy) -> Capability:
    limit, forced = anatomy.longest_context, anatomy.context_limit
    if limit is None:
        reason = "as long as memory allows: the model names no limit"
    elif forced is not None and forced == limit:
        reason = f"{limit} tokens; beyond, the model changes what it has already read"
    else:
        reason = f"{limit} tokens, as the model's config says"
    return Capability(feature="context", supported=True, reason=reason)


def _kernel(anatomy: Anatomy) -> Capability:
    if anatomy.attention is None:
        return Capability(
            feature="attention implementation",
            supported=True,
            reason="chosen at loading: sdpa, or eager where it must be",
        )
    how = "exact, run uncompiled and slower than sdpa" if anatomy.flex else "exact with explicit masks"
    return Capability(feature="attention implementation", supported=True, reason=f"{anatomy.attention}, {how}")
