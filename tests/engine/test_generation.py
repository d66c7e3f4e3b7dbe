"""Options of a request are the same whether they come by name or as one value, and in every method that takes them."""

import inspect
import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from outrider.cli.request import ENDING, RequestOptions
from outrider.core.inputs import InputError
from outrider.core.types import Request, Sampling
from outrider.engine.engine import Engine
from outrider.engine.generation import Generation, Keywords, SharedKeywords
from tests.world.models import engine

GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=1.3, seed=5)
PROMPT = [3, 9, 4]
NAMES = [field.name for field in fields(Generation)]
METHODS = (Engine.add, Engine.stream, Engine.generate)


def made(given: Engine, method: str, **options: object) -> list[int]:
    """The tokens that a method makes of the prompt."""
    if method == "generate":
        return given.generate([PROMPT], **options)[0].tokens
    if method == "stream":
        return [token for update in given.stream(PROMPT, **options) for token in update.tokens]
    given.add(PROMPT, **options)
    tokens = []
    while given.busy:
        tokens += [token for update in given.step() for token in update.tokens]
    return tokens


def test_keywords_are_the_fields_with_the_same_types():
    assert get_type_hints(Keywords) == get_type_hints(Generation)
    assert get_type_hints(Keywords).keys() - get_type_hints(SharedKeywords) == {"sampling", "constraint"}
    assert {*ENDING} <= {*NAMES} & {field.name for field in fields(RequestOptions)}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_help_lists_every_option_with_its_default(method):
    shown = inspect.signature(method).parameters
    assert shown.keys() >= {*NAMES, "options"}
    assert "keywords" not in shown
    defaults = {field.name: field.default for field in fields(Generation)}
    assert {name: shown[name].default for name in NAMES} == defaults


@pytest.mark.parametrize("method", ["add", "stream", "generate"])
def test_one_value_means_what_its_fields_mean_and_keywords_override_it(method):
    idle = engine("ngram")
    value = Generation(max_new_tokens=9, sampling=DRAWN, min_tokens=9)
    by_name = made(idle, method, max_new_tokens=9, sampling=DRAWN, min_tokens=9)
    assert made(idle, method, options=value) == by_name
    assert len(by_name) == 9
    greedy = made(idle, method, max_new_tokens=6, sampling=GREEDY, min_tokens=5)
    assert made(idle, method, options=value, max_new_tokens=6, sampling=GREEDY, min_tokens=5) == greedy
    assert greedy != by_name[: len(greedy)]


def test_settings_for_each_prompt_override_those_of_the_value():
    idle = engine("ngram")
    one, two = idle.generate([PROMPT, PROMPT], sampling=[GREEDY, DRAWN], options=Generation(max_new_tokens=7))
    value = Generation(max_new_tokens=7, sampling=DRAWN)
    assert [two.tokens] == [out.tokens for out in idle.generate([PROMPT], options=value)]
    assert [one.tokens] == [out.tokens for out in idle.generate([PROMPT], sampling=GREEDY, options=value)]


@pytest.mark.parametrize(
    ("method", "name", "sentence"),
    [
        ("generate", "max_new_token", "unknown option 'max_new_token'; did you mean 'max_new_tokens'?"),
        ("generate", "id", "unknown option 'id'"),
        ("stream", "samplings", "unknown option 'samplings'; did you mean 'sampling'?"),
        ("stream", "progress", "unknown option 'progress'"),
        ("add", "max_length", "unknown option 'max_length'"),
    ],
)
def test_a_name_that_is_no_option_is_refused_with_those_that_are(method, name, sentence):
    idle = engine("none")
    with pytest.raises(InputError, match=re.escape(sentence)) as refused:
        made(idle, method, **{name: 8})
    assert not idle.busy
    listed = re.findall(r"\w+", str(refused.value).partition("vailable:")[2])
    own = {"prompts", "n", "progress", "errors"} if method == "generate" else {"prompt", "id"}
    assert {*listed} == {*NAMES, "options"} | own


@pytest.mark.parametrize("method", ["add", "stream", "generate"])
@pytest.mark.parametrize("name", ["temperature", "seed"])
def test_options_of_sampling_are_shown_their_place(method, name):
    with pytest.raises(InputError, match=re.escape(f"give sampling=outrider.Sampling({name}=...)")):
        made(engine("none"), method, **{name: 0})


@pytest.mark.parametrize("method", ["add", "stream"])
@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"max_new_tokens": 128}, "max_new_tokens"),
        ({"options": Generation(max_new_tokens=4)}, "max_new_tokens"),
        ({"id": "other"}, "id"),
        ({"sampling": GREEDY, "bad_words": ()}, "sampling"),
    ],
    ids=["default", "value", "id", "sampling"],
)
def test_settings_beside_a_ready_request_are_refused_by_name(method, given, name):
    idle, ready = engine("ngram"), Request(id="r", prompt=tuple(PROMPT), max_new_tokens=2, sampling=GREEDY)
    with pytest.raises(InputError, match=f"{name} is given beside a Request, which has its own settings"):
        list(getattr(idle, method)(ready, **given))
    assert not idle.busy


def test_a_constraint_may_be_given_beside_a_ready_request():
    idle = engine("ngram")
    ready = Request(id="r", prompt=tuple(PROMPT), max_new_tokens=2, sampling=GREEDY)
    idle.add(ready, allowed_token_ids=[7])
    outputs = [update.output for _ in range(3) for update in idle.step() if update.output is not None]
    assert [output.tokens for output in outputs] == [[7, 7]]


def test_an_output_says_whether_the_context_was_full():
    idle = engine("ngram")
    longest = idle.parts.target.max_context
    prompt = [5] * (longest - 3)
    outputs = [idle.generate([prompt], max_new_tokens=count, sampling=GREEDY)[0] for count in (3, 4)]
    assert [(len(out.tokens), out.finish_reason, out.context_full) for out in outputs] == [
        (3, "length", False),
        (3, "length", True),
    ]
