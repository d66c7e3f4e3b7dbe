"""Requests with limits of their own keep the law where one step depends on what an earlier one left."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from outrider.core.types import Request, Sampling
from outrider.decoding import drafting
from outrider.decoding.pearl import PearlDecoding
from outrider.decoding.protocol import Parts
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.engine.engine import Engine
from outrider.lm.tabular import TabularLM, random_rows
from outrider.proof.rule import law_error
from outrider.proof.runs import Runs, law_of_runs
from tests.world.tables import tables
from tests.world.tokenizers import letters
from tests.world.verifiers import CARRYING, LOSSLESS, each, judges_of, verifier

BOUND = 1e-12
SEED = 5
PROMPT = (0, 1, 0, 1, 0)
MOST = 4
SHARING = [name for name, make in LOSSLESS.items() if make.shares_noise]
LINKED: dict[str, Parts] = (
    {f"{name}, vocabulary 2": tables(2, verifier(name), 3, SEED) for name in (*CARRYING, *SHARING)}
    | {f"{name}, vocabulary 3": tables(3, verifier(name), 2, SEED) for name in CARRYING}
    | {"ahead": tables(2, verifier("block"), 2, SEED, decoding=PearlDecoding(clock="simulated"))}
)
"""Decoders of which a step leaves something to the next: changed rows, noise of positions, tokens that lie ahead."""
LIMITS: dict[str, dict[str, object]] = (
    {f"max_draft_context={most}": {"max_draft_context": most} for most in range(4, 9)}
    | {f"max_draft_tokens={most}": {"max_draft_tokens": most} for most in range(4)}
    | {
        "both": {"max_draft_context": 6, "max_draft_tokens": 2},
        "an end token": {"eos_ids": frozenset({1})},
        "an end": {"ends": lambda output: tuple(output[-2:]) == (1, 0)},
        "a stop string": {"stop": ("\u4e01\u4e00",)},
        "an end token and a limit": {"eos_ids": frozenset({1}), "max_draft_context": 6},
        "three tokens": {"max_new_tokens": 3},
    }
)


def runs(made: Engine, *asked: Request) -> Runs:
    """All runs of some requests at once."""
    row = random_rows(made.parts.target.vocab_size, SEED)
    found = law_of_runs(made, asked, [lambda output, r=request: row((*r.prompt, *output)) for request in asked])
    print(found.num_runs, "runs,", found.drafted, "drafted,", found.accepted, "accepted, error", found.error)
    assert sum(found.outputs.values()) == pytest.approx(1, abs=BOUND)
    return found


def request(prompt: Sequence[int] = PROMPT, **limits: object) -> Request:
    return Request(id="", prompt=tuple(prompt), sampling=Sampling(), **{"max_new_tokens": MOST} | limits)


def engine(parts: Parts) -> Engine:
    return Engine(parts, tokenizer=letters(), max_slots=64, keep_warm=False)


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("name", LINKED)
def test_every_limit_of_a_request_keeps_the_law_of_all_its_steps(name, limits):
    most = {"max_new_tokens": 3} if name.endswith("3") else {}
    assert runs(engine(LINKED[name]), request(**most | limits)).error < BOUND


@pytest.mark.parametrize("made", each(CARRYING))
def test_the_context_of_a_limit_is_that_of_each_draft_token(made):
    drafted = [runs(engine(tables(2, made, 3, SEED)), request(max_draft_context=most)).drafted for most in range(4, 9)]
    assert drafted[0] == 0
    assert sorted(drafted) == drafted
    assert drafted[1] == pytest.approx(1)


@pytest.mark.parametrize("made", each(set(CARRYING) & set(judges_of("chosen chain"))))
@pytest.mark.parametrize("most", range(5, 9))
def test_chosen_drafts_keep_the_law_behind_a_limit_of_the_context(made, most):
    parts = tables(2, made, 3, SEED, drafter=NgramDrafter(prompt_lookup_min=1))
    found = runs(engine(parts), request(max_draft_context=most))
    assert found.error < BOUND
    assert found.accepted > 0


@pytest.mark.parametrize("made", each([*CARRYING, *SHARING]))
@pytest.mark.parametrize("limits", [{}, {"max_draft_context": 5}], ids=["no limit", "a limit"])
def test_requests_of_two_drafters_keep_their_laws_while_drafters_are_exchanged(made, limits):
    parts = tables(2, made, 2, SEED)
    drafters = [parts.drafter, ModelDrafter(lm=TabularLM(random_rows(2, seed=77), 2))]
    routed = engine(parts)
    routed.route = lambda asked: drafters[int(asked.id[-1])]
    swapped = []

    def swap() -> None:
        swapped.append(drafters[len(swapped) % 2])
        routed.swap(swapped[-1])

    routed.between = swap
    found = runs(routed, request(max_new_tokens=3, **limits), request(PROMPT[:-1], max_new_tokens=3))
    assert found.error < BOUND
    assert len(swapped) > 2


@pytest.mark.parametrize("name", CARRYING)
def test_prove_sees_a_limit_behind_which_a_change_of_the_rows_is_lost(monkeypatch, name):
    honest = drafting.room

    def room(parts, state, left):
        """By where the draft begins, not by where it ends."""
        most, asked = state.request.max_draft_context, replace(state.request, max_draft_context=None)
        if most is not None and len(state.tokens) > most:
            return 0
        return honest(parts, replace(state, request=asked), left)

    parts = tables(3, verifier(name), 3, SEED)
    assert law_error(parts) < BOUND
    monkeypatch.setattr(drafting, "room", room)
    assert law_error(parts) > 1e-3
