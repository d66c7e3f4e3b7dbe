"""All runs of engines over tiny transformers models in float64, and what they show of the law."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.core.types import Request, Sampling
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.open import as_lm
from outrider.proof.runs import Row, Runs, law_of_runs, plain_rows
from tests.world.parts import parts_of
from tests.world.recurrent_zoo import RECURRENT, recurrent_config
from tests.world.zoo import attention_of, scrambled, tiny_config

BOUND = 1e-12
SLOTS = 48
PROMPT = (1, 0, 1, 1, 0)


def tiny(name: str, vocab: int = 2, seed: int = 0) -> PreTrainedModel:
    """A tiny model of an architecture over very few tokens, in float64; none of them is sure to come."""
    recurrent = name in RECURRENT
    config = recurrent_config(name) if recurrent else tiny_config(name)
    attention = {} if recurrent else {"attn_implementation": attention_of(name)}
    config.vocab_size = vocab
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager", **attention).double().eval()
    scrambled(model, seed).get_output_embeddings().weight.data.mul_(0.4)
    return model


def drafter(name: str = "llama", vocab: int = 2) -> ModelDrafter:
    """A drafter with a tiny model of other weights."""
    return ModelDrafter(lm=as_lm(tiny(name, vocab, seed=50), max_slots=SLOTS))


def engine(
    target: object, guesser: object, verifier: object = "block", tree: str = "chain", **others: object
) -> Engine:
    """An engine that drafts two tokens; the target is a model, or as the engine sees it."""
    parts = parts_of(
        as_lm(target, max_slots=SLOTS) if isinstance(target, PreTrainedModel) else target,
        guesser,
        tree=tree,
        verifier=verifier,
        length=2,
    )
    return Engine(replace(parts, **others), max_slots=SLOTS)


def walk(made: Engine, prompt: Sequence[int] = PROMPT, most: int = 4, rows: Row | None = None, **asked: object) -> Runs:
    """All runs of one request."""
    request = Request(id="", prompt=tuple(prompt), max_new_tokens=most, sampling=Sampling(), **asked)
    found = law_of_runs(made, [request], [rows or plain_rows(made.parts.target.model, prompt)])
    made.rest()
    print(found.num_runs, "runs,", found.drafted, "drafted,", found.accepted, "accepted, error", found.error)
    assert sum(found.outputs.values()) == pytest.approx(1, abs=BOUND), found
    return found


def assert_lossless(found: Runs) -> None:
    """The law is kept by runs in which some draft tokens are accepted and some are not."""
    assert found.error < BOUND, found
    assert 0.1 < found.accepted < found.drafted - 0.1, found


def pair(made: Engine, prompts: Sequence[Sequence[int]], most: int) -> Runs:
    """All runs of several requests in one batch."""
    requests = [Request(id="", prompt=tuple(p), max_new_tokens=most, sampling=Sampling()) for p in prompts]
    found = law_of_runs(made, requests, [plain_rows(made.parts.target.model, p) for p in prompts])
    print(found.num_runs, "runs, error", found.error)
    return found
