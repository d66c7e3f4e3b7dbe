"""Outputs of ended requests are drafted in later ones of the same owner, and change no text."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import outrider
from outrider.core.inputs import InputError
from outrider.core.types import Request, Sampling
from outrider.drafters.memory import TextMemory
from outrider.drafters.suffix import SuffixDrafter
from outrider.engine.engine import Engine
from outrider.engine.output import Output, Update
from outrider.lm.tabular import TabularLM
from tests.world.models import llama
from tests.world.parts import parts_of

VOCAB, LONG = 64, 40
GREEDY = Sampling(temperature=0)
PROMPT = [13, 5, 9, 1]


def next_row(prefix: tuple[int, ...]) -> np.ndarray:
    """Texts in which no token stands twice. The first token says which text it is; each has pairs of its own."""
    row = np.full(VOCAB, 0.05 / VOCAB)
    row[prefix[0] * len(prefix) % VOCAB] += 0.95
    return row


def engine(max_warm_tokens: int = 10_000, *, verifier: str = "token", max_slots: int = 4) -> Engine:
    drafter = replace(SuffixDrafter(), _memory=TextMemory(max_warm_tokens))
    parts = parts_of(TabularLM(next_row, VOCAB), drafter, verifier=verifier, length=8)
    return Engine(parts, max_slots=max_slots)


def answer(busy: Engine, prompt: list[int] = PROMPT, sampling: Sampling = GREEDY, **options: object) -> Output:
    [output] = busy.generate([prompt], max_new_tokens=LONG, sampling=sampling, **options)
    return output


def test_a_question_that_is_asked_again_is_drafted_from_the_first_answer() -> None:
    busy = engine()
    first, second = answer(busy), answer(busy)
    assert first.tokens == second.tokens == answer(engine(0)).tokens
    assert (first.num_steps, second.num_steps) == (LONG, 5)
    assert second.num_accepted_tokens == LONG - 5


def test_another_question_about_the_same_text_is_drafted_from_where_it_agrees() -> None:
    busy = engine()
    first = answer(busy)
    # It goes on behind the first ten tokens of the answer.
    [other] = busy.generate([[13, 60, 61, 62, *first.tokens[:10]]], max_new_tokens=20, sampling=GREEDY)
    assert other.num_steps < 20 / 2


def test_texts_of_another_owner_are_not_drafted() -> None:
    busy = engine()
    answer(busy, owner="a")
    assert answer(busy, owner="b").num_steps == LONG
    assert answer(busy).num_steps == LONG
    assert answer(busy, owner="a").num_steps == 5


def test_an_owner_is_a_text() -> None:
    with pytest.raises(InputError, match="owner must be a text, got 7"):
        engine().add(PROMPT, owner=7)


def test_texts_that_were_used_longest_ago_are_forgotten() -> None:
    size = len(PROMPT) + LONG
    busy, prompts = engine(4 * size), [[first, 5, 9, 1] for first in (13, 27, 35, 41, 51)]
    for prompt in prompts:
        assert answer(busy, prompt).num_steps == LONG
    assert answer(busy, prompts[4]).num_steps == 5
    assert answer(busy, prompts[2]).num_steps == 5
    assert answer(busy, prompts[0]).num_steps == LONG


def test_what_a_cancelled_request_said_is_remembered() -> None:
    busy = engine()
    said = []
    for update in busy.stream(PROMPT, max_new_tokens=LONG, sampling=GREEDY):
        said += update.tokens
        if len(said) == 18:
            break
    assert answer(busy).num_steps == 2 + LONG - 18


def test_a_request_without_output_or_with_an_error_is_not_remembered() -> None:
    busy = engine()
    busy.cancel(busy.add(PROMPT, max_new_tokens=LONG, sampling=GREEDY))
    stopped = busy.add(PROMPT, max_new_tokens=LONG, sampling=GREEDY)
    busy.step()
    busy.parts.target.extend, whole = None, busy.parts.target.extend
    busy.step()
    busy.parts.target.extend = whole
    assert stopped not in busy.running
    assert answer(busy).num_steps == LONG


def test_outputs_of_one_prompt_are_drafted_from_those_that_have_ended() -> None:
    alone = engine(max_slots=1).generate([PROMPT], n=3, max_new_tokens=LONG, sampling=GREEDY)
    assert [output.num_steps for output in alone] == [LONG, 5, 5]
    together = engine().generate([PROMPT], n=3, max_new_tokens=LONG, sampling=GREEDY)
    assert [output.num_steps for output in together] == [LONG] * 3


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_seed_repeats_its_text_and_its_steps_whatever_is_remembered(verifier: str) -> None:
    drawn = Sampling(temperature=1.0, seed=3)
    fresh, used = engine(verifier=verifier), engine(verifier=verifier)
    for _ in range(2):
        answer(used)
    first, later, again = answer(fresh, sampling=drawn), answer(used, sampling=drawn), answer(used, sampling=drawn)
    assert first.tokens == later.tokens == again.tokens
    assert first.num_draft_tokens == later.num_draft_tokens == again.num_draft_tokens
    unseeded = replace(drawn, seed=None)
    assert answer(used, sampling=unseeded).num_steps < LONG


def test_a_verifier_whose_text_does_not_depend_on_drafts_uses_what_is_remembered() -> None:
    drawn = Sampling(temperature=1.0, seed=3)
    used = engine(verifier="coupled")
    answer(used)
    first, later = answer(engine(verifier="coupled"), sampling=drawn), answer(used, sampling=drawn)
    assert first.tokens == later.tokens
    assert later.num_steps < first.num_steps


def test_an_engine_that_rests_has_forgotten_all_texts() -> None:
    busy = engine()
    answer(busy)
    busy.rest()
    assert answer(busy).num_steps == LONG
    assert answer(engine(0)).num_steps == LONG


def test_a_drafter_of_the_catalog_remembers() -> None:
    for options, forgets in (("", False), (":max_warm_tokens=0", True)):
        busy = outrider.load(llama(), drafter=f"suffix{options}", length="fixed:8")
        prompts = [[3 + i, 9, 30 + i, 7] for i in range(4)]
        first, second = (busy.generate(prompts, max_new_tokens=24, sampling=GREEDY, ignore_eos=True) for _ in range(2))
        assert [output.tokens for output in first] == [output.tokens for output in second]
        steps = [sum(output.num_steps for output in outputs) for outputs in (first, second)]
        assert steps[0] == steps[1] if forgets else steps[1] < steps[0]


def test_a_request_can_be_made_with_an_owner() -> None:
    busy = engine()
    request = Request(id="r", prompt=tuple(PROMPT), max_new_tokens=LONG, sampling=GREEDY, owner="a")
    answer(busy, owner="a")
    busy.add(request)
    [output] = [update.output for update in iter_updates(busy) if update.output is not None]
    assert output.num_steps == 5


def iter_updates(busy: Engine) -> Iterator[Update]:
    while busy.busy:
        yield from busy.step()
