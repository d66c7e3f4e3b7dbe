"""The law of engines over real transformers models: every run, from its prompt to its end, against plain forwards."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider import catalog
from outrider.concurrent import Pearl
from outrider.decode import Parts
from outrider.drafters.model import Model
from outrider.engine import Engine
from outrider.lengths.fixed import Fixed
from outrider.lm.model import LanguageModel
from outrider.lm.open import as_lm
from outrider.lm.recurrent import RecurrentModel
from outrider.lm.translated import Translated
from outrider.lm.vocabulary import Translation
from outrider.proof.runs import Runs, law_of_runs, plain_rows
from outrider.types import Request, Sampling
from outrider.verifiers.protocol import chains, everyone, recover
from tests.automaton import After
from tests.recurrent_zoo import RECURRENT, recurrent_config
from tests.zoo import scrambled, tiny_config

pytestmark = pytest.mark.usefixtures("float64_stays_float64")

BOUND = 1e-12
SLOTS = 24
PROMPT = (1, 0, 1, 1, 0)


def tiny(name: str, vocab: int, seed: int = 0, attention: str | None = None) -> PreTrainedModel:
    """A tiny model of an architecture over very few tokens, in float64."""
    config = recurrent_config(name) if name in RECURRENT else tiny_config(name)
    config.vocab_size = vocab
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    model = AutoModelForCausalLM.from_config(config, **({} if attention is None else {"attn_implementation": attention}), experts_implementation="eager")
    return scrambled(model.double().eval(), seed)


def drafter(name: str, vocab: int, seed: int = 50) -> Model:
    return Model(lm=as_lm(tiny(name, vocab, seed), max_slots=SLOTS))


def engine(target, guesser, verifier: str = "block", tree: str = "chain", gamma: int = 2, **others) -> Engine:
    lm = as_lm(target, max_slots=SLOTS) if isinstance(target, PreTrainedModel) else target
    parts = Parts(
        target=lm,
        drafter=guesser,
        tree=catalog.make("tree", tree),
        verifier=catalog.make("verifier", verifier) if isinstance(verifier, str) else verifier,
        length=Fixed(num_speculative_tokens=gamma),
    )
    return Engine(replace(parts, **others), max_slots=SLOTS)


def walk(made: Engine, prompt: Sequence[int] = PROMPT, most: int = 4, rows=None, **asked) -> Runs:
    request = Request(id="", prompt=tuple(prompt), max_new_tokens=most, **{"sampling": Sampling()} | asked)
    found = law_of_runs(made, [request], [rows or plain_rows(made.parts.target.model, prompt)])
    print(found.num_runs, found.drafted, found.accepted, found.error)
    return found


@pytest.mark.parametrize(
    ("verifier", "tree", "vocab", "most"),
    [
        ("token", "chain", 3, 4),
        ("block", "chain", 3, 4),
        ("recursive", "gumbel:branching=2x1", 3, 3),
        ("traversal", "gumbel:branching=2x1", 3, 3),
        ("kseq", "iid:num_paths=2", 2, 4),
        ("match", "dynamic:width=2,num_nodes=4", 3, 4),
    ],
)
def test_a_llama_keeps_its_law(verifier, tree, vocab, most):
    found = walk(engine(tiny("llama", vocab), drafter("llama", vocab), verifier, tree), most=most)
    assert found.error < BOUND
    assert 0 < found.accepted < found.drafted


@pytest.mark.parametrize("target", ["mamba2", "qwen3_next", "mamba", "recurrent_gemma"])
def test_a_recurrent_target_keeps_its_law_though_tokens_are_fed_again(target):
    made = engine(tiny(target, 2), drafter("llama", 2), "block")
    found = walk(made, most=5)
    assert found.error < BOUND
    assert 0 < found.accepted < found.drafted
    assert made.parts.target.num_replays > 0 or made.parts.target.stepwise
