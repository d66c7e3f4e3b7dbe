"""One entry point for all recipes: they are listed, and each has a quick form of options that it knows."""

import dataclasses
import importlib
import inspect
import sys

import pytest
import typer

from outrider.core.types import InputError
from recipes import options
from recipes.__main__ import command, main, recipes, with_quick
from recipes.fresh import row_of
from recipes.inquiry.trial import Setting

NAMES = list(recipes())
MAKERS = ("stand_in", "embedded_pair", "moe_target", "answers")
"""Recipes that make models or answers."""


def test_recipes_are_listed_with_a_line_each(capsys):
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES
    assert {"overhead", "regression", "claims", "zoo"} <= set(NAMES)
    assert all(len(line) > 30 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_a_quick_form_and_writes_only_when_asked(name):
    module = importlib.import_module(f"recipes.{name}")
    quick = inspect.signature(with_quick(module.main, module.QUICK, True)).parameters
    for option, value in module.QUICK.items():
        assert quick[option].default == value
    out = inspect.signature(module.main).parameters["out"].default
    # What a recipe makes is a folder of models, or its results, which nobody gets unasked.
    assert out is None or (out is inspect.Parameter.empty and name in MAKERS)


def test_options_that_are_given_count_before_those_of_the_quick_form(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["pearl", "--quick", "--num-prompts", "0"])
    assert ended.value.code == 2
    assert "--num-prompts" in capsys.readouterr().err


def test_a_quick_form_of_unknown_options_is_a_mistake():
    with pytest.raises(TypeError, match="gives nonsense, which are no options"):
        with_quick(lambda out=None: None, {"nonsense": 1}, True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["sped"], "unknown recipe 'sped'; available: answers, audit, block_gain"),
        (["gpu"], "needs a CUDA device"),
        (["stopping", "--draft", "/no/such"], "is not a model's directory"),
        (["sharing", "--num-prompts", "2"], "num_prompts must be >= 16"),
        (["overhead", "--batch-sizes", "3,x"], "--batch-sizes must be whole numbers"),
        (["never_loses", "--temperatures", "warm"], "--temperatures must be numbers"),
        (["costs", "--requests", "1"], "warmup must be <= the number of requests"),
        (["zoo", "--only", "nonesuch"], "unknown model type 'nonesuch'"),
        (["claims", "--measurements", "/no/such"], "no folder of /no/such has claims"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_input_gets_one_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


def test_every_field_of_a_setting_is_an_option():
    made = inspect.signature(options.with_fields(Setting)(lambda setting: None)).parameters
    assert {n: option.default for n, option in made.items()} == {f.name: f.default for f in dataclasses.fields(Setting)}


def test_what_is_no_field_of_a_setting_is_a_mistake():
    with pytest.raises(TypeError, match="nonsense, rounds are no fields of a setting"):
        options.with_fields(Setting, without=["nonsense"], rounds=3)


def test_a_setting_holds_what_was_typed_and_the_recipe_gets_its_other_options():
    seen = []

    @options.with_fields(Setting, without=["dtype"], seeds=4)
    def recipe(setting, clock: options.Clock = False):
        seen.append((setting, clock))

    app = typer.Typer()
    app.command()(recipe)
    app(["--num-prompts", "7", "--clock"], standalone_mode=False)
    assert seen == [(Setting(num_prompts=7, seeds=4), True)]
    assert "dtype" not in inspect.signature(recipe).parameters


def test_a_package_that_is_missing_gets_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "recipes.audit", None)
    with pytest.raises(InputError, match=r"this recipe needs .*install the extras"):
        command("audit", [])


def test_a_fresh_process_prints_its_row_last_and_its_failure_is_told():
    said = "import json, os; print('loading'); print(json.dumps([os.environ[n] for n in ('OMP_NUM_THREADS', 'MORE')]))"
    assert row_of(["-c", said], 3, MORE="yes") == ["3", "yes"]
    with pytest.raises(RuntimeError, match="no such thing"):
        row_of(["-c", "raise SystemExit('no such thing')"])


def test_a_fresh_process_finds_the_project_and_relative_paths_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = "import json, os, recipes; print(json.dumps(os.getcwd()))"
    assert row_of(["-c", said]) == str(tmp_path)


def test_an_unknown_word_of_an_option_is_named():
    assert options.words("b, a") == ["b", "a"]
    with pytest.raises(InputError, match="--states must be of empty, kept, with commas between them, got 'warm'"):
        options.words("empty, warm", "--states", ("empty", "kept"))
