"""Requests of very different lengths in one batch say what they say in one forward, and read fewer keys."""

import pytest

from outrider.core.types import Sampling
from outrider.drafters.model import ModelDrafter
from outrider.engine.engine import Engine
from outrider.lm.model import LanguageModel
from outrider.verifiers.match import MatchVerifier
from tests.world.counting import CountingModel, texts, whole
from tests.world.models import llama
from tests.world.parts import parts_of

LONG, SHORT, CONTEXT = 1900, 40, 2048


@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "drafted"])
def test_in_float32_texts_are_the_same_and_fewer_keys_are_read(drafted: bool) -> None:
    prompts, greedy = texts([SHORT, LONG, *[SHORT - i for i in range(22)]]), Sampling(temperature=0.0, seed=0)
    model = llama(context=CONTEXT).float()
    lms = [CountingModel(model, max_slots=24), whole(CountingModel(model, max_slots=24))]
    found = []
    for lm in lms:
        draft = ModelDrafter(lm=LanguageModel(model, max_slots=24))
        parts = parts_of(lm, draft, verifier=MatchVerifier(), length=2)
        busy = Engine(parts, max_slots=24) if drafted else Engine(parts, max_slots=24).plain()
        found.append([output.tokens for output in busy.generate(prompts, max_new_tokens=8, sampling=greedy)])
    assert found[0] == found[1]
    apart, together = lms
    # Apart from the prompts, 23 rows of 1920 keys become one, and 22 rows of 64.
    assert apart.num_keys < 0.3 * together.num_keys, (apart.num_keys, together.num_keys)
    assert apart.num_forwards > together.num_forwards
