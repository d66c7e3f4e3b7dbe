"""What `outrider prove` says of its test of samples, to people and to programs."""

import json
import re
import time
from pathlib import Path

import pytest

from outrider.cli import prove as cli
from outrider.cli.opened import opened
from outrider.proof.pair import prove as proven
from tests.cli.runs import done, refused, run
from tests.world.models import llama

pytestmark = pytest.mark.usefixtures("fewer_draws")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options that name a tiny target and its draft model."""
    place: Path = tmp_path_factory.mktemp("pair")
    llama().save_pretrained(place / "target")
    llama(num_layers=1).save_pretrained(place / "draft")
    # Drafts of one length: the law of a length that is chosen for a batch takes much longer to enumerate.
    return ["--target", str(place / "target"), "--drafter", f"model:path={place / 'draft'}", "--length", "fixed:3"]


def test_samples_that_fit_come_with_their_degrees_of_freedom(capsys, monkeypatch, pair):
    found = json.loads(done(monkeypatch, capsys, "prove", *pair, "--num-draws", "200", "--json"))
    samples = found["samples"]
    assert found["proven"]
    assert (samples["verdict"], samples["doubt"], samples["num_draws"]) == ("fits", None, 200)
    assert samples["degrees"] >= 10
    assert 0 < samples["num_accepted_tokens"] < samples["num_draft_tokens"]
    assert len(samples["temperatures"]) == 2


def test_the_time_that_is_given_includes_the_loading(capsys, monkeypatch, pair):
    found: list[float] = []

    def load(setup):
        found.append(time.monotonic())
        return opened(setup)

    def prove_until(engine, num_draws, temperature, seed, until):
        found.append(until.at)
        return proven(engine, num_draws, temperature, seed, until)

    monkeypatch.setattr(cli, "opened", load)
    monkeypatch.setattr(cli, "proven", prove_until)
    done(monkeypatch, capsys, "prove", *pair, "--num-draws", "0", "--time-limit", "1")
    began, until = found
    assert until <= began + 1


def test_people_read_the_degrees_of_freedom_too(capsys, monkeypatch, pair):
    out = done(monkeypatch, capsys, "prove", *pair, "--num-draws", "100")
    assert re.search(
        r"samples +holds +p = [01]\.\d+ over .* 100 outputs at temperature .* \(\d\d degrees of freedom\)", out
    )
    assert re.search(r"\d+ of \d+ draft tokens accepted", out)


@pytest.mark.parametrize(
    ("arguments", "doubt"),
    [
        (["--drafter", "none", "--num-draws", "100"], "nothing was drafted"),
        (["--temperature", "0.02", "--num-draws", "100"], "degrees of freedom tell too few outputs apart"),
    ],
    ids=["no drafter", "cold"],
)
def test_a_test_that_can_see_little_is_inconclusive_and_fails_nothing(capsys, monkeypatch, pair, arguments, doubt):
    out = done(monkeypatch, capsys, "prove", *pair, *arguments)
    assert "samples            inconclusive" in out
    assert doubt in out


def test_programs_read_that_it_is_inconclusive_and_why(capsys, monkeypatch, pair):
    status, out, _ = run(monkeypatch, capsys, "prove", *pair, "--num-draws", "7", "--time-limit", "0.001", "--json")
    found = json.loads(out)
    assert (status, found["proven"]) == (0, True)
    assert found["samples"]["verdict"] == "inconclusive"
    assert "0 degrees of freedom tell too few outputs apart" in found["samples"]["doubt"]


def test_a_lossy_rule_fails_in_its_law_and_in_its_samples(capsys, monkeypatch, pair):
    arguments = ["--verifier", "typical", "--allow-lossy", "--num-draws", "400"]
    status, out, _ = run(monkeypatch, capsys, "prove", *pair, *arguments, "--json")
    found = json.loads(out)
    assert status == 1
    assert not found["exact_law"]
    assert found["samples"]["verdict"] == "differs"


def test_without_draws_there_is_no_test_of_samples(capsys, monkeypatch, pair):
    found = json.loads(done(monkeypatch, capsys, "prove", *pair, "--num-draws", "0", "--json"))
    assert "samples" not in found
    assert found["greedy_identical"]["compared"] == found["rows"]["compared"] == "float64"
    assert found["dice"]["holds"]
    assert found["rows"]["holds"]
    assert found["rows"]["num_drafted"] > 20


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--temperature", "0"], "temperature must be > 0, because greedy outputs are not drawn, got 0.0"),
        (["--temperature", "nan"], "temperature must be > 0, because greedy outputs are not drawn, got nan"),
        (["--num-draws", "-1"], "num_draws must be >= 0, got -1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(capsys, monkeypatch, pair, arguments, sentence):
    assert sentence in refused(monkeypatch, capsys, "prove", *pair, *arguments)
