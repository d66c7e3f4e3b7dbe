"""A proof over HTTP holds for an honest server and fails for planted faults."""

import math

import pytest

from outrider.serve.client.answers import AnswerToken
from outrider.serve.client.proof import check_drawn, check_greedy, first_tokens, prove
from outrider.serve.client.remote import Remote
from tests.cli.runs import run
from tests.serve.client.mutants import AcceptsEverything, DrawsAgain
from tests.serve.served import loaded, serving

PROMPTS = ["One day, a boy named Tim went to the park with his dog. They", "Once upon a time", "Lily had a red ball."]
DRAWS = 640


def silent(amount: int) -> None:
    """Hears of progress."""


def served(verifier=None):
    """A server, with a verifier of its own if one is given."""
    wanted = {"verifier": "token"} if verifier is None else {"verifier": verifier, "allow_lossy": True}
    return serving(loaded(**wanted, length="fixed:3", max_slots=16))


@pytest.mark.slow
def test_an_honest_server_is_proven(monkeypatch, capsys):
    with served() as url:
        proof = prove(Remote(url=url), PROMPTS, num_draws=DRAWS)
        assert proof.holds, proof
        assert proof.greedy.num_tokens == 32 * len(PROMPTS)
        assert proof.greedy.noise < 0.05
        assert proof.drawn.verdict == "fits", proof.drawn
        assert proof.drawn.num_draft_tokens > 0
        status, out, err = run(monkeypatch, capsys, "prove", "--url", url, "--num-draws", "64")
        assert status == 0, err
        assert "greedy identical   holds" in out
        assert "samples            FAILS" not in out


@pytest.mark.slow
def test_a_wrong_recovered_token_is_caught(monkeypatch, capsys):
    with served(DrawsAgain()) as url:
        status, out, _ = run(monkeypatch, capsys, "prove", "--url", url, "--num-draws", str(DRAWS))
    assert status == 1, out
    assert "greedy identical   holds" in out
    assert "samples            FAILS" in out


def test_a_draft_that_is_always_accepted_is_caught():
    with served(AcceptsEverything()) as url:
        greedy = check_greedy(Remote(url=url), PROMPTS, silent)
        drawn = check_drawn(Remote(url=url), PROMPTS[:1], 96, 0, silent)
    assert drawn.verdict == "differs", drawn
    assert not greedy.holds
    assert max(each.gap for each in greedy.differences) > 0.5


def test_first_tokens_that_are_too_rare_are_counted_together():
    top = {1: math.log(0.62), 2: math.log(0.37), 3: math.log(0.005)}
    outputs = [[AnswerToken(token=token, logprob=top[token], top=top)] for token in [1] * 61 + [2] * 37 + [3] * 2]
    found = first_tokens(outputs)
    assert (found.degrees, found.num_draws) == (1, 100)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--drafter", "ngram"], "--drafter is not for --url: the server has its own setup"),
        (["--temperature", "0.7"], "a server tells its log-probabilities at temperature 1"),
        (["--model", "nobody"], "unknown model 'nobody'"),
    ],
)
def test_what_a_server_cannot_do_is_refused(monkeypatch, capsys, url, options, sentence):
    status, _, err = run(monkeypatch, capsys, "prove", "--url", url, *options)
    assert (status, sentence in err) == (2, True), err


def test_a_server_that_is_not_there_is_one_sentence(monkeypatch, capsys):
    status, _, err = run(monkeypatch, capsys, "prove", "--url", "http://127.0.0.1:9")
    assert status == 2
    assert err.startswith("error: http://127.0.0.1:9/v1/models does not answer: ")
    assert len(err.splitlines()) == 1
