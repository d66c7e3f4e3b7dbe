"""What a drafter may know of the target: its sizes, its embedding and output layer, never the model itself."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider.core.types import InputError
from outrider.lm.forwards.forward import Forward
from outrider.lm.hf.anatomy import Anatomy
from outrider.lm.hf.embedding_and_head import EmbeddingAndHead, find_embedding_and_head
from outrider.lm.hf.open import logit_width
from outrider.lm.protocol import LM, Readable

UNLIMITED = 1 << 15
"""The longest context of a model that names none."""


def _no_embedding_and_head() -> EmbeddingAndHead:
    raise InputError(
        "this drafter needs the target's embedding, final norm and output layer, and this target does not offer them"
    )


def _no_mtp(path: str | None) -> Any:
    raise InputError("this target is no transformers model, so it has no multi-token-prediction layers")


def _no_keys_values(slot: int, layer: int) -> tuple[Tensor, Tensor]:
    raise InputError("this drafter reads the target's keys and values, and this target keeps none that can be read")


@dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What a drafter may know of the target when the engine is built. It never holds the target itself.

    Attributes:
        tokenizer: The target's tokenizer; None if there is none.
        vocab_size: Width of the target's logits.
        device: Where the target is.
        dtype: The dtype that the target computes in.
        max_slots: Most slots in use at once, warm slots of ended requests included.
        max_context: The target's longest context.
        num_layers: The target's decoder layers; 0 if its hidden states cannot be read.
        hidden_size: Width of its hidden states; 0 if they cannot be read.
        embedding_and_head: Its input embedding, final norm and output layer; raises InputError if a drafter cannot
            use them.
        keys_values: A slot's committed keys and values in a layer, `[length, heads, dim]` each: views that are valid
            until the target's next call.
        mtp: Its multi-token-prediction layers, as transformers loads them from a checkpoint, by default its own.
        config: The config of the part of it that generates text; None if it has none.
        forward: How forwards run, if that was said; otherwise each model's are chosen by measurement.
        target_forward: How the target's forwards run.
    """

    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int
    device: torch.device
    dtype: torch.dtype
    max_slots: int
    max_context: int
    num_layers: int = 0
    hidden_size: int = 0
    embedding_and_head: Callable[[], EmbeddingAndHead] = _no_embedding_and_head
    keys_values: Callable[[int, int], tuple[Tensor, Tensor]] = _no_keys_values
    mtp: Callable[[str | None], Any] = _no_mtp
    config: PreTrainedConfig | None = None
    forward: Forward | None = "eager"
    target_forward: Forward = "eager"

    @classmethod
    def of(
        cls,
        target: LM,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        max_slots: int | None = None,
        forward: Forward | None = "eager",
    ) -> "TargetInfo":
        """What a drafter may know of a target.

        Args:
            max_slots: Most slots in use at once; by default as many as the target has.
        """
        known = cls(
            tokenizer=tokenizer,
            vocab_size=target.vocab_size,
            device=target.device,
            dtype=target.dtype,
            max_slots=max_slots or target.max_slots,
            max_context=target.max_context,
            forward=forward,
            target_forward=getattr(target, "forward", "eager"),
        )
        if not isinstance(target, Readable):
            return known
        return replace(
            known,
            num_layers=target.num_layers,
            hidden_size=target.hidden_size,
            embedding_and_head=target.embedding_and_head,
            keys_values=target.keys_values,
            mtp=getattr(target, "mtp", _no_mtp),
            config=getattr(getattr(target, "anatomy", None), "text", None),
        )

    @classmethod
    def of_model(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> "TargetInfo":
        """What a head may know of a model that it is trained for."""
        anatomy = Anatomy.of(model)
        return cls(
            tokenizer=tokenizer,
            vocab_size=logit_width(model),
            device=model.device,
            dtype=model.dtype,
            max_slots=0,
            max_context=anatomy.longest_context or UNLIMITED,
            num_layers=anatomy.num_layers,
            hidden_size=anatomy.hidden_size,
            embedding_and_head=partial(find_embedding_and_head, model, anatomy),
            config=anatomy.text,
        )

    def embed(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch hidden"]:
        """The target's input embeddings of tokens."""
        return self.embedding_and_head().embed(tokens)

    def norm(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch hidden"]:
        """The target's final norm of the output of its last layer."""
        return self.embedding_and_head().norm(hidden)

    def head(self, hidden: Float[Tensor, "*batch hidden"]) -> Float[Tensor, "*batch vocab"]:
        """The target's logits of normed states."""
        return self.embedding_and_head().head(hidden)
