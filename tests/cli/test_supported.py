"""Options that a backend cannot use are refused, and never dropped."""

from dataclasses import fields

import pytest

from outrider.cli.bench import BenchOptions
from outrider.cli.learn import LearnOptions
from outrider.cli.serve import ServeOptions
from outrider.cli.supported import ENGINE, URL, VLLM
from outrider.core.inputs import InputError
from outrider.serve.limits import Limits
from outrider.setup import Setup

ONES = {each.name for group in (Setup, BenchOptions, LearnOptions, ServeOptions, Limits) for each in fields(group)}


@pytest.mark.parametrize("support", [ENGINE, VLLM, URL], ids=lambda support: support.option)
def test_every_name_of_the_table_is_an_option(support):
    of_commands = {"with", "profile", "compare", "engine", "engine_args", "vllm_python"}
    assert {*support.instead, *(support.used or ())} <= ONES | of_commands
    assert not {*support.instead} & (support.used or frozenset())


@pytest.mark.parametrize(
    ("support", "group", "sentence"),
    [
        (VLLM, Setup(reproducible=True), "--reproducible is not for --engine vllm: vLLM has no verifier `coupled`"),
        (VLLM, Setup(device_map="auto"), "--device-map is not for --engine vllm: vLLM places layers by its own flags"),
        (VLLM, Limits(max_queue=3), "--max-queue is not for --engine vllm: it is about Outrider's own engine"),
        (VLLM, ServeOptions(log_json=True), "--log-json is not for --engine vllm: it is about Outrider's own engine"),
        (
            VLLM,
            {"profile": True},
            "--profile is not for --engine vllm: it is about Outrider's own engine; leave it out",
        ),
        (URL, Setup(drafter="ngram"), "--drafter is not for --url: the server has its own setup"),
        (URL, BenchOptions(sweep=("length=fixed:1..2",)), "--sweep is not for --url"),
        (ENGINE, ServeOptions(weight_updates=True), "--weight-updates is not for Outrider's own engine: its server"),
    ],
)
def test_an_option_that_a_backend_cannot_use_is_refused_by_name(support, group, sentence):
    with pytest.raises(InputError) as refused:
        support.check(group)
    assert str(refused.value).startswith(sentence)


def test_options_that_a_backend_can_use_pass():
    VLLM.check(Setup("t", drafter="ngram", max_slots=2), ServeOptions(port=0, weight_updates=True), {"profile": False})
    URL.check(Setup(), BenchOptions(rate="2", rounds=1))
    ENGINE.check(Setup(forward="eager"), ServeOptions(admin_key="a"))
