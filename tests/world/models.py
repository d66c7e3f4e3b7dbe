"""A tiny target and a shallower draft of the same weights, in float64, and engines over them without a tokenizer."""

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.drafters.protocol import Drafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.protocol import Verifier
from outrider.verifiers.token import TokenVerifier
from tests.world.parts import parts_of
from tests.world.zoo import VOCAB, scrambled

CONTEXT = 256
"""Every model's longest context."""
DRAFTERS = ("model", "ngram", "none")
VERIFIERS: dict[str, Verifier] = {"token": TokenVerifier(), "block": BlockVerifier(), "match": MatchVerifier()}


def llama(num_layers: int = 2, context: int = CONTEXT) -> LlamaForCausalLM:
    """A random Llama in float64; one with fewer layers is the beginning of one with more, so that they often agree."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = scrambled(LlamaForCausalLM(config).double())
    model.model.layers = model.model.layers[:num_layers]
    model.config.num_hidden_layers = num_layers
    return model


def target(max_slots: int = 8, max_context: int | None = None) -> LanguageModel:
    """The target."""
    return LanguageModel(llama(), max_slots=max_slots, max_context=max_context)


def prompts(*sizes: int) -> list[list[int]]:
    """Random prompts of some lengths, the same ones at every call."""
    random = np.random.default_rng(0)
    return [random.integers(3, VOCAB, size=size).tolist() for size in sizes]


def drafter_of(name: str, max_slots: int = 8, max_context: int | None = None) -> Drafter:
    """A drafter by its name in `DRAFTERS`; the context is the draft model's."""
    if name == "model":
        return ModelDrafter(lm=LanguageModel(llama(num_layers=1), max_slots=max_slots, max_context=max_context))
    return NgramDrafter(prompt_lookup_min=1) if name == "ngram" else NoDrafter()


def engine(
    drafter: str | Drafter = "model",
    verifier: str = "token",
    *,
    gamma: int = 3,
    max_slots: int = 8,
    draft_context: int | None = None,
    eos_ids: frozenset[int] = frozenset(),
) -> Engine:
    """An engine without tokenizer over the tiny target; the drafter is given, or named."""
    parts = parts_of(
        target(max_slots),
        drafter_of(drafter, max_slots, draft_context) if isinstance(drafter, str) else drafter,
        verifier=VERIFIERS[verifier],
        length=gamma,
    )
    return Engine(parts, max_slots=max_slots, eos_ids=eos_ids)


def raw_logits(tokens: list[int]) -> Float[Tensor, "positions vocab"]:
    """What the target's model itself says at every position of a text."""
    with torch.no_grad():
        return llama()(torch.tensor([tokens]), use_cache=False).logits[0]


def free_slots(used: Engine) -> list[int]:
    """How many slots of the target, and of the draft model where there is one, can be taken once the engine rests."""
    used.rest()
    lms = [used.parts.target, *([used.parts.drafter.lm] if hasattr(used.parts.drafter, "lm") else [])]
    counts = []
    for lm in lms:
        slots = [lm.open() for _ in range(lm.max_slots)]
        counts.append(len(slots))
        for slot in reversed(slots):
            lm.release(slot)
    return counts
