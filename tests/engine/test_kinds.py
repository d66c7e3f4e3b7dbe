"""Tokens are of the kind that the draft and the verdict of their step say."""

from dataclasses import replace
from xml.etree import ElementTree

import pytest

import outrider
from outrider.core.types import Sampling, Step, Timing
from outrider.decoding.protocol import Cycle
from outrider.engine.kinds import kinds

PROMPT = "One day, a boy named Tim went to the park with his dog. They"


@pytest.mark.parametrize(("tree", "length"), [("chain", "fixed:2"), ("iid:3", "fixed:2"), ("dynamic", "fixed:3")])
def test_a_bonus_token_follows_a_leaf_of_the_draft(tree, length):
    engine = outrider.load(tree=tree, length=length, probe=False)
    leaves: list[bool] = []

    def look(cycle: Cycle) -> None:
        path = cycle.verdict.paths[0][: cycle.verdict.num_accepted[0]]
        last = int(path[-1]) if len(path) else 0
        leaves.append(last not in cycle.draft.parents.tolist())

    engine.watch = look
    [watched] = engine.generate([PROMPT], max_new_tokens=60, sampling=Sampling(temperature=1.0, seed=3))
    engine.watch = None
    [output] = engine.generate([PROMPT], max_new_tokens=60, sampling=Sampling(temperature=1.0, seed=3))
    assert [step.bonus for step in watched.steps] == leaves
    assert [step.bonus for step in output.steps] == leaves
    assert {True, False} == set(leaves)
    for step in output.steps:
        found = kinds(step)
        assert len(found) == len(step.tokens)
        if step.num_draft_tokens and tree == "chain" and len(found) > step.num_accepted_tokens:
            assert found[-1] == ("bonus" if step.num_accepted_tokens == step.num_draft_tokens else "recovered")


def test_a_step_that_the_end_cuts_has_accepted_tokens_alone():
    cut = Step(
        request="a",
        num_draft_tokens=4,
        num_accepted_tokens=4,
        tokens=(1, 2),
        timing=Timing(),
        num_requests=1,
        bonus=True,
    )
    assert kinds(cut) == ["accepted", "accepted"]


def test_without_a_draft_a_token_is_plain():
    step = Step(
        request="a", num_draft_tokens=0, num_accepted_tokens=0, tokens=(1,), timing=Timing(), num_requests=1, bonus=True
    )
    assert kinds(step) == ["plain"]


def test_a_notebook_shows_each_token_in_the_colour_of_its_kind():
    [output] = outrider.load(length="fixed:3", probe=False).generate([PROMPT], max_new_tokens=40)
    shown = ElementTree.fromstring(f"<a>{output._repr_html_()}</a>")
    *tokens, rest = shown[0]
    assert "".join(token.text or "" for token in [*tokens, rest]) == output.text
    of_steps = [kind for step in output.steps for kind in kinds(step)]
    assert [token.get("title") for token in tokens] == of_steps
    assert {"accepted", "recovered", "bonus"} <= set(of_steps)
    assert len({token.get("style") for token in tokens}) == len(set(of_steps))
    assert f"block efficiency {output.block_efficiency:.2f}" in "".join(shown.itertext())


def test_a_notebook_shows_what_comes_without_steps_as_plain_text():
    *_, last = outrider.load(probe=False).stream(PROMPT, max_new_tokens=4)
    output = replace(last.output, text="a < b & c")
    shown = ElementTree.fromstring(f"<a>{output._repr_html_()}</a>")
    assert "".join(shown[0].itertext()) == output.text
