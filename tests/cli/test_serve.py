"""`outrider serve` as a process: where it listens, whom it lets in, and how it ends."""

import json
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from tests.cli.runs import refused, run, run_apart, start
from tests.world.compiling import needs_compiled_forwards, with_kernels

QUICK = ("--no-probe", "--length", "fixed:3")
LONG = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}


@contextmanager
def server(*options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and its address. It is killed at the end if it still runs."""
    with start("serve", "--port", "0", *QUICK, *options, **environment) as process:
        try:
            line = ""
            while "serving" not in line:
                line = process.stderr.readline()
                assert line, process.wait()
            yield process, re.search(r"http://\S+", line)[0]
        finally:
            process.kill()


def post(url: str, body: dict, **headers: str):
    """The open answer to a body."""
    given = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), given)
    return urllib.request.urlopen(request, timeout=60)


def read(url: str, body: dict) -> str:
    """The whole answer to a body."""
    with post(url, body) as answer:
        return answer.read().decode()


def status_of(url: str) -> int:
    """The status of an address."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_signal_lets_running_and_waiting_requests_end():
    with server("--max-slots", "1") as (process, url), ThreadPoolExecutor(1) as pool:
        with post(url, LONG | {"max_tokens": 200}) as answer:
            assert answer.readline().startswith(b"data: ")
            waiting = pool.submit(read, url, LONG | {"max_tokens": 20})
            while b'"server_load":2' not in urllib.request.urlopen(f"{url}/load", timeout=10).read():
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            while status_of(f"{url}/health") == 200:
                time.sleep(0.01)
            assert status_of(f"{url}/health") == 503
            texts = [answer.read().decode(), waiting.result()]
        for text in texts:
            assert text.rstrip().endswith("data: [DONE]")
            assert '"finish_reason":"length"' in text
            assert '"error"' not in text
        assert process.wait(timeout=30) == 0


def test_a_second_signal_ends_them_at_once():
    with server("--drain-seconds", "60") as (process, url):
        with post(url, LONG) as answer:
            assert answer.readline().startswith(b"data: ")
            process.send_signal(signal.SIGTERM)
            # Two signals that come at once are one.
            while status_of(f"{url}/health") == 200:
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            text = answer.read().decode()
        assert '"error"' in text
        assert text.rstrip().endswith("data: [DONE]")
        assert process.wait(timeout=30) == 0


def test_a_key_of_the_environment_guards_the_api_and_an_interrupt_ends_an_idle_server():
    with server("--served-model-name", "mine", "--api-key", "other", OUTRIDER_API_KEY="secret") as (process, url):
        for key in ("secret", "other"):
            with post(url, {"prompt": "Once", "max_tokens": 2}, Authorization=f"Bearer {key}") as answer:
                assert json.load(answer)["model"] == "mine"
        with pytest.raises(urllib.error.HTTPError) as refused:
            post(url, {"prompt": "Once", "max_tokens": 2})
        with refused.value as answer:
            assert answer.code == 401
        assert status_of(f"{url}/health") == 200
        assert status_of(f"{url}/metrics") == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0


@pytest.mark.parametrize(
    ("options", "told"), [pytest.param((), True, marks=needs_compiled_forwards), (("--forward", "eager"), False)]
)
def test_forwards_that_could_be_compiled_are_named_unless_another_kind_is_asked_for(options, told, tmp_path):
    with server(*options, OUTRIDER_CACHE=with_kernels(tmp_path)) as (process, url):
        assert status_of(f"{url}/health") == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert ("`outrider prepare` with the same models" in process.stderr.read()) == told


def test_other_machines_are_let_in_with_a_key_alone(monkeypatch, capsys):
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    err = refused(monkeypatch, capsys, "serve", "--host", "0.0.0.0")
    assert "other machines can reach 0.0.0.0, and no key is set" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--port", "70000"], "port must be 0 .. 65535"),
        (["--host", "192.0.2.1", "--allow-no-key"], "the server cannot use port 8000 of 192.0.2.1"),
        (["--per-request-metrics", "some"], "unknown per_request_metrics 'some'"),
        (["--max-queue", "-1"], "max_queue must be >= 0, got -1"),
        (["--response-template", "/no/such"], "there is no response template file /no/such"),
        (["--api-key", ""], "api_key must not be empty"),
    ],
)
def test_what_is_wrong_is_one_sentence(monkeypatch, capsys, options, sentence):
    status, _, err = run(monkeypatch, capsys, "serve", *options)
    assert (status, sentence in err) == (2, True), err
    assert len(err.splitlines()) == 1


def test_a_missing_library_is_named_with_its_extra(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'uvicorn' else find(name, *rest)\n"
    )
    done = run_apart("serve", path=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith('error: outrider serve needs uvicorn; `pip install "outrider[serve] @ ')
    assert len(done.stderr.splitlines()) == 1
