"""What transformers itself says: logits of its own forwards over whole texts, and what its own processors make of them.

Nothing here goes through the engine's slots, masks, batches or `to_rows`, so that a fault in those shows.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core.types import Sampling
from outrider.lm.hf import flex
from outrider.lm.protocol import LM, Segment

MIXED = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_k=20),
    Sampling(temperature=1.3, top_p=0.8),
    Sampling(temperature=1.0, repetition_penalty=1.3),
    Sampling(temperature=0.0),
    Sampling(temperature=1.1, min_p=0.02),
    Sampling(temperature=0.9, top_p=0.95, frequency_penalty=0.5, presence_penalty=0.3),
    Sampling(temperature=1.5, top_k=8, top_p=0.7, repetition_penalty=1.1),
)
"""Different settings, so that a request of a batch that gets another one's shows."""
SLACK = 1e-5
"""Rounding may move the bounds of top-p and min-p by less than this share of them."""


def model_of(target: LM) -> PreTrainedModel | None:
    """The transformers model of a target; None where it is none, as with tables."""
    model = target.modules.get("model")
    return model if isinstance(model, PreTrainedModel) else None


def is_exact(target: LM) -> bool:
    """Whether a target computes in float32 or float64, by weights that are not quantised. Otherwise roundings of a
    block of tokens may differ much from those of a text.
    """
    quantised = bool(getattr(model_of(target), "is_quantized", False))
    return target.dtype in (torch.float32, torch.float64) and not quantised


@torch.inference_mode()
def plain_logits(target: LM, texts: Sequence[Sequence[int]], last: int) -> Float[Tensor, "texts last vocab"]:
    """Logits at the last positions of some texts of one length.

    They come from a forward of the unmodified model over the whole texts, without a cache, a mask or positions. A
    target without such a model is read by `extend`, each text in an empty slot.
    """
    model = model_of(target)
    tokens = torch.tensor([list(text) for text in texts])
    if model is None:
        return torch.stack([_extended(target, text, last) for text in tokens])
    with flex.tried(getattr(model.config, "_attn_implementation", None) == "flex_attention"):
        logits: Tensor = model(input_ids=tokens.to(target.device), use_cache=False).logits
    return logits[:, -last:, : target.vocab_size]


def _extended(target: LM, text: Int[Tensor, " tokens"], last: int) -> Float[Tensor, "last vocab"]:
    slot = target.open()
    logits = target.extend([Segment(slot=slot, tokens=text.to(target.device), logits=last)]).logits
    target.release(slot)
    return logits


def transformers_rows(
    logits: Float[Tensor, "n vocab"],
    texts: Sequence[Sequence[int]],
    num_prompt: int,
    sampling: Sampling,
    slack: float = 0.0,
) -> Float[Tensor, "n vocab"]:
    """The distributions that transformers draws from after some texts of one length, in float64.

    Its own processors make them of these logits; transformers has none for frequency and presence penalties, which
    are counted here. Tokens that tie with the last token that top-p keeps are kept too, as Outrider promises.

    Args:
        num_prompt: How many tokens of each text are the prompt.
        slack: Moves the bounds of top-p and min-p outwards by this share, because rounding may move them.
    """
    scores, seen = logits.double(), torch.tensor([list(text) for text in texts]).to(logits.device)
    if sampling.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(seen, scores)
    counts = torch.stack([row.bincount(minlength=scores.shape[1]) for row in seen[:, num_prompt:]])
    scores = scores - sampling.frequency_penalty * counts - sampling.presence_penalty * (counts > 0)
    if sampling.temperature == 0:
        return torch.zeros_like(scores).scatter_(1, scores.argmax(1, keepdim=True), 1.0)
    for warper in _warpers(sampling, slack):
        kept = warper(seen, scores)
        if isinstance(warper, TopPLogitsWarper):
            least = kept.masked_fill(kept == -torch.inf, torch.inf).amin(1, keepdim=True)
            kept = scores.masked_fill(scores < least, -torch.inf)
        scores = kept
    return scores.softmax(1)


def _warpers(
    sampling: Sampling, slack: float
) -> Iterator[TemperatureLogitsWarper | TopKLogitsWarper | TopPLogitsWarper | MinPLogitsWarper]:
    """transformers' own, in its own order."""
    yield TemperatureLogitsWarper(float(sampling.temperature))
    if sampling.top_k:
        yield TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield TopPLogitsWarper(min(1.0, sampling.top_p * (1 + slack)))
    if sampling.min_p:
        yield MinPLogitsWarper(min(1.0, sampling.min_p * (1 - slack)))
