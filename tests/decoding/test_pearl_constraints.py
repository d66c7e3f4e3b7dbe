"""PEARL under a constraint: the law and the text of constrained plain decoding, and failed steps."""

import numpy as np
import pytest

from outrider.drafters.ngram import NgramDrafter
from outrider.lm.tabular import random_rows
from outrider.proof.enumerate import law
from outrider.verifiers.block import BlockVerifier
from outrider.verifiers.match import MatchVerifier
from outrider.verifiers.token import TokenVerifier
from tests.decoding.pearl_engines import CLOCKS, DRAWN, GREEDY, PROMPT, SIMULATED, Broken, pearl
from tests.world.automaton import After
from tests.world.models import engine
from tests.world.tables import tables
from tests.world.zoo import VOCAB

exactly = pytest.mark.usefixtures("float64_stays_float64")
BOUND = 1e-12


TRIGGER = After(vocab=3, followers={2: frozenset({0, 1}), 0: frozenset({1, 2})})
"""Begins and ends inside drafts, and inside what lies ahead."""


@pytest.mark.parametrize(
    ("verifier", "drafter"),
    [
        (TokenVerifier(), None),
        (BlockVerifier(), None),
        (MatchVerifier(), None),
        (MatchVerifier(), NgramDrafter(prompt_lookup_min=1)),
    ],
    ids=["token", "block", "match", "ngram"],
)
def test_a_constraint_keeps_the_law_of_constrained_plain_decoding(verifier, drafter):
    prompt = [0, 1, 2, 0, 1, 2, 2, 0, 0, 1]
    row = random_rows(3, 0)

    def plainly(output: tuple[int, ...]) -> np.ndarray:
        kept = np.where(TRIGGER.allowed(output), row((*prompt, *output)), 0.0)
        return kept / kept.sum()

    found = law(
        tables(3, verifier, 2, drafter=drafter, decoding=SIMULATED), prompt, 3, target_law=plainly, constraint=TRIGGER
    )
    assert found.error < BOUND
    assert found.accepted > 0
    assert all(TRIGGER.fits(output) for output in found.emitted)


@exactly
def test_constrained_outputs_are_those_of_plain_decoding_and_the_same_on_both_clocks():
    rule = After(vocab=VOCAB, followers={t: frozenset({(t + 1) % 8 + 3, t % 8 + 3}) for t in range(3, 11)})
    asked = {"max_new_tokens": 30, "constraint": [rule, None, rule], "sampling": [GREEDY, DRAWN, DRAWN]}
    prompts = [PROMPT, [5], [4, 7]]
    real, simulated = (pearl("model", "block", clock).generate(prompts, **asked) for clock in CLOCKS)
    assert [out.tokens for out in real] == [out.tokens for out in simulated]
    assert all(rule.fits(real[i].tokens) for i in (0, 2))
    [plain] = engine("none").generate([PROMPT], max_new_tokens=30, constraint=rule, sampling=GREEDY)
    assert real[0].tokens == plain.tokens
    assert real[0].num_accepted_tokens > 0
    [alone] = pearl("model", "block").generate([[5]], max_new_tokens=30, sampling=DRAWN)
    assert real[1].tokens == alone.tokens


@exactly
@pytest.mark.parametrize("side", ["target", "draft"])
def test_a_failed_step_takes_its_constraint_back(side):
    rule = After(vocab=VOCAB, followers={t: frozenset({(t + 1) % 8 + 3, t % 8 + 3}) for t in range(3, 11)})
    used = pearl("model", "token")
    asked = {"max_new_tokens": 24, "constraint": rule, "sampling": DRAWN}
    fine = used.generate([PROMPT, [5]], **asked)
    lm = used.parts.target if side == "target" else used.parts.drafter.lm
    kept, calls = lm.commit, iter(range(1000))

    def failing(paths):
        if next(calls) == 9:
            raise Broken(side)
        return kept(paths)

    lm.commit = failing
    again = used.generate([PROMPT, [5]], **asked)
    assert next(calls) > 9
    assert [output.tokens for output in again] == [output.tokens for output in fine]
