"""A target in Q4_K says the same with every kind of draft as without, and draws what its law says."""

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import outrider
from outrider import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.drafters.protocol import Drafter
from outrider.lm.model import LanguageModel
from outrider.lm.weights.blocks import KINDS
from outrider.lm.weights.linear import BlockLinear
from outrider.lm.weights.plain import has_blocks
from outrider.lm.weights.quantiser import Quantiser
from outrider.proof.gate import in_float32
from outrider.proof.statistics import sampled_law
from recipes.tiny import VOCAB, scrambled
from tests.world.learners import documents, head_learner
from tests.world.models import prompts

CASTS = True
GREEDY = Sampling(temperature=0.0, seed=0)
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
)
DRAFTERS = ("none", "suffix:min_match=1", "model", "head")


def plain(noise: float = 0.0) -> PreTrainedModel:
    """A tiny model with rows of whole blocks of 256, perhaps near another one."""
    model = scrambled(AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)).requires_grad_(False)
    random = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.add_(noise * weight.std() * torch.randn(weight.shape, generator=random))
    return model.eval()


def target(noise: float = 0.0) -> PreTrainedModel:
    """The same in Q4_K."""
    model = Quantiser(kind="Q4_K")(plain(noise).to(torch.bfloat16))
    assert {part.kind for part in model.modules() if isinstance(part, BlockLinear)} == {"Q4_K"}
    assert CONFIG.hidden_size % KINDS["Q4_K"].weights == 0
    return model


@cache
def said(num_tokens: int) -> list[list[int]]:
    """Greedy texts without drafts."""
    engine = outrider.load(target(), drafter="none", max_slots=3)
    return [each.tokens for each in engine.generate(given(), max_new_tokens=num_tokens, sampling=GREEDY)]


def given() -> list[list[int]]:
    [first, *others] = prompts(9, 13, 5)
    # A repetition, for drafters that look for some.
    return [first + first, *others]


def drafter(name: str, folder: Path) -> str | Drafter:
    if name == "model":
        return ModelDrafter(lm=LanguageModel(target(noise=0.05), max_slots=64))
    if name == "head":
        head_learner("eagle", plain(), documents=documents()).write(folder)
        return str(folder)
    return name


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_texts_are_those_without_drafts(name: str, tmp_path: Path) -> None:
    engine = outrider.load(target(), drafter=drafter(name, tmp_path), length="fixed:3", max_slots=3)
    assert has_blocks(engine.parts.target.modules["model"])
    outputs = engine.generate(given(), max_new_tokens=24, sampling=GREEDY)
    assert [each.tokens for each in outputs] == said(24)
    assert (sum(each.num_draft_tokens for each in outputs) > 0) == (name != "none")
    if name == "model":
        assert sum(each.num_accepted_tokens for each in outputs) > 0


def test_draws_keep_the_law_of_the_blocks(tmp_path: Path) -> None:
    engine = outrider.load(target(), drafter=drafter("model", tmp_path), length="fixed:3", max_slots=64)
    exact = in_float32(engine)
    weight = engine.parts.target.modules["model"].lm_head.blocks.dequantised(torch.float32)
    assert torch.equal(exact.parts.target.modules["model"].lm_head.weight, weight)
    samples = sampled_law(exact, given(), 400)
    assert samples.verdict == "fits", samples
    assert 0 < samples.num_accepted_tokens < samples.num_draft_tokens
