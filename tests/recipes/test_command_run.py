"""A command that is watched: what it took, and how long it said nothing."""

import sys
import urllib.request

from recipes.command_run import run, served

SERVER = """
import http.server, sys
print("ready", flush=True)
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.test(http.server.SimpleHTTPRequestHandler, port=port, bind="127.0.0.1")
"""


def test_a_command_sees_a_terminal_and_its_silence_is_the_longest_pause():
    program = "import sys, time; print(sys.stdout.isatty(), flush=True); time.sleep(2); print('end')"
    found = run("name", "model", [sys.executable, "-c", program], limit=60)
    assert (found.status, found.said) == (0, ["True", "end"])
    # On a busy machine the first line is read late, so that less of the two seconds is silent.
    assert 1 <= found.silence <= found.seconds
    assert found.memory > 1e6


def test_what_is_typed_reaches_a_command_and_its_status_is_kept():
    program = "print(input()); raise SystemExit(3)"
    found = run("name", "model", [sys.executable, "-c", program], typed="hello\n", limit=60)
    assert (found.status, found.said) == (3, ["hello"])


def test_a_command_that_takes_too_long_is_stopped_and_has_failed():
    found = run("name", "model", [sys.executable, "-c", "import time; time.sleep(600)"], limit=0.5)
    assert found.status != 0


def test_a_server_without_an_answer_has_failed(tmp_path):
    (tmp_path / "health").write_text("ok")
    (tmp_path / "server.py").write_text(f"import os; os.chdir({str(tmp_path)!r})\n{SERVER}")
    command = [sys.executable, tmp_path / "server.py"]

    def ask(url: str) -> str:
        with urllib.request.urlopen(f"{url}/health") as answer:
            return answer.read().decode()

    good = served("name", "model", command, ask, limit=60)
    assert good.said[-1] == "ok"
    assert served("name", "model", command, lambda url: "", limit=3).status != 0
