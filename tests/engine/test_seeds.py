"""What a seed promises, and where: docs/guide/running.md, "Seeds"."""

from dataclasses import replace

import pytest
import torch

import outrider
from outrider.core.types import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from tests.world.models import engine, llama

PROMPTS = [[3 + i, 9, 4 + 2 * i] + [5, 6] * (i % 3) for i in range(8)]
DRAWN = [Sampling(temperature=0.9, seed=i) for i in range(8)]


def pair(dtype: torch.dtype, drafter: str = "model") -> Engine:
    """The tiny pair in a type."""
    made = engine(drafter, "block")
    target = LanguageModel(llama().to(dtype), max_slots=8)
    parts = replace(made.parts, target=target)
    if drafter == "model":
        parts = replace(parts, drafter=ModelDrafter(lm=LanguageModel(llama(num_layers=1).to(dtype), max_slots=8)))
    return Engine(parts, max_slots=8)


def texts(made: Engine, prompts: list[list[int]], settings: list[Sampling], most: int = 24) -> list[list[int]]:
    """Tokens of each output."""
    return [out.tokens for out in made.generate(prompts, max_new_tokens=most, sampling=settings, ignore_eos=True)]


@pytest.mark.parametrize("drafter", ["model", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_seed_gives_the_same_text_alone_and_in_a_batch_of_eight(dtype, drafter):
    made = pair(dtype, drafter)
    together = texts(made, PROMPTS, DRAWN)
    alone = [texts(made, [prompt], [setting])[0] for prompt, setting in zip(PROMPTS, DRAWN, strict=True)]
    assert alone == together


@pytest.mark.parametrize("drafter", ["model", "none"])
def test_so_it_does_for_the_pair_that_ships_in_float32(drafter):
    # The default length depends on how many requests run.
    parts = {"length": "fixed:4"} if drafter == "model" else {"drafter": "none"}
    made = outrider.load(dtype="float32", **parts)
    prompts = [made.encode(text) for text in ["Once upon a time", "One day, a dog", "def main(", "The answer is"]]
    settings = DRAWN[: len(prompts)]
    alone = [texts(made, [p], [setting], most=12)[0] for p, setting in zip(prompts, settings, strict=True)]
    assert alone == texts(made, prompts, settings, most=12)


def test_without_a_drafter_a_shorter_text_is_the_beginning_of_a_longer_one():
    made = pair(torch.float32, "none")
    assert texts(made, PROMPTS, DRAWN, most=12) == [text[:12] for text in texts(made, PROMPTS, DRAWN)]
