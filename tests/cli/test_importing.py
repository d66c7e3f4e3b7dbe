"""Nothing is silent while a command imports torch and transformers."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Finder(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            from outrider.core import progress

            sys.exit("told" if progress._display is not None else "silent")

sys.meta_path.insert(0, Finder())
from outrider.cli.app import main

sys.argv = ["outrider", *sys.argv[1:]]
main()
"""
COMMANDS = {
    "generate": (),
    "chat": (),
    "serve": (),
    "prove": (),
    "prepare": (),
    "bench": (),
    "plan": (),
    "doctor": (),
    "export": ("--to", "vllm", "--out", "out"),
    "train eagle3": ("--target", "target", "--data", "data.jsonl", "--out", "out"),
    "train data": ("--target", "target", "--data", "data.jsonl", "--out", "out"),
    "train distill": ("--target", "target", "--drafter", "drafter", "--data", "data.jsonl", "--out", "out"),
    "prune tokens": ("--target", "target", "--out", "out", "--data", "data.jsonl"),
    "prune shape": ("--target", "target", "--out", "out", "--data", "data.jsonl"),
    "learn": ("--target", "target", "--drafter", "model:path=drafter", "--from", "log.jsonl", "--out", "out"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_tells_that_it_imports_what_takes_seconds(command, tmp_path):
    (tmp_path / "log.jsonl").write_text('{"prompt": "Once", "response": " upon"}\n')
    (tmp_path / "data.jsonl").write_text('{"prompt": "Once"}\n')
    arguments = [sys.executable, "-c", PROGRAM, *command.split(), *COMMANDS[command]]
    ended = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.stderr.splitlines()[-1:] == ["told"], ended.stderr
